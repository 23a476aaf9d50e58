"""As much of torch's worker group and rendezvous store as `launch.attempts` looks at."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

from torch.distributed import DistStoreError

from lastgasp.launch.attempts import LaunchAttempt, LaunchAttempts


@dataclass
class Group:
    """As much of torch's WorkerGroup as LaunchAttempts uses."""

    group_world_size: int = 1
    group_rank: int = 0
    master_addr: str = "127.0.0.1"
    store: Store = field(default_factory=lambda: Store())


class Store:
    """A rendezvous store in memory; bytes come out."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        """As TCPStore's."""
        self.content[key] = value.encode()

    def get(self, key: str) -> bytes:
        """As TCPStore's, except that nobody else writes meanwhile."""
        self.wait([key])
        return self.content[key]

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        """As TCPStore's, except that nobody else writes meanwhile."""
        if not self.check(keys):
            raise DistStoreError(f"wait timeout after {timeout}, keys: {keys}")

    def check(self, keys: list[str]) -> bool:
        """As TCPStore's."""
        return all(key in self.content for key in keys)


def begun(group: Group, *agents: LaunchAttempts, run_id: str = "job") -> list[LaunchAttempt]:
    """What each agent begins with, the first one first; in torch's order."""
    for rank in [*range(1, len(agents)), 0]:
        agents[rank].offer(group.store, rank, group.group_world_size, run_id, fresh_store=True)
        group.store.set(f"torchelastic/role_info/{rank}", "")
    groups = [replace(group, group_rank=rank) for rank in range(len(agents))]
    return [agent.begin(mine, run_id, fresh_store=True) for agent, mine in zip(agents, groups, strict=True)]  # type: ignore[arg-type]
