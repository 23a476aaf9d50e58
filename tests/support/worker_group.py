"""As much of torch's worker group and rendezvous store as `launch.rounds` looks at."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Group:
    """As much of torch's WorkerGroup as Rounds looks at."""

    group_world_size: int = 1
    group_rank: int = 0
    master_addr: str = "127.0.0.1"
    store: dict[str, str] = field(default_factory=dict)


class Store(dict[str, str]):
    """A rendezvous store in memory."""

    def set(self, key: str, value: str) -> None:
        """As TCPStore's."""
        self[key] = value

    def check(self, keys: list[str]) -> bool:
        """As TCPStore's."""
        return all(key in self for key in keys)
