"""All-gathers of one attempt over the control connections: the parts that have come, and who has not come. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from . import messages as m

GATHER_TIMEOUT = 300.0
"""Seconds within which all ranks must join a gather, including the start-up of the slowest one."""


@dataclass
class GatherState:
    """The parts of one all-gather received so far."""

    since: float
    parts: dict[int, bytes] = field(default_factory=dict)
    limit: float = 0.0

    def expired(self, now: float) -> bool:
        """Whether the time for all ranks to come is over."""
        return now >= self.since + self.limit


class Gathers(dict[str, GatherState]):
    """Those that are not complete, by their tags."""

    def put(self, rank: int, part: m.GatherPart, world_size: int, now: float) -> m.Gathered | None:
        """Store one part; return all parts when it was the last one."""
        state = self.setdefault(part.tag, GatherState(since=now))
        state.parts[rank], state.limit = part.payload, max(state.limit, part.seconds or GATHER_TIMEOUT)
        if len(state.parts) < world_size:
            return None
        del self[part.tag]
        return m.Gathered(tag=part.tag, parts=tuple(state.parts[r] for r in sorted(state.parts)))

    def failed(self, now: float, why: str, lost: Mapping[int, str], world_size: int) -> list[tuple[int, m.Gathered]]:
        """Answers for those that cannot complete: all of them if `why` is given, else those that have expired or that
        wait for a rank that has ended (`lost`: how)."""
        answers = []
        for tag, state in list(self.items()):
            text = why or _never(state, lost)
            if not text and not state.expired(now):
                continue
            del self[tag]
            missing = sorted(set(range(world_size)) - set(state.parts))
            text = text or f"ranks {missing} did not arrive within {state.limit:g} s"
            answer = m.Gathered(tag=tag, parts=(), missing=text)
            answers += [(rank, answer) for rank in state.parts]
        return answers

    def absent(self, now: float, world_size: int) -> frozenset[int]:
        """For whom all that have come to an expired one have waited in vain."""
        expired = [state for state in self.values() if state.expired(now)]
        return frozenset(range(world_size) if expired else ()).difference(*(state.parts for state in expired))


def _never(state: GatherState, lost: Mapping[int, str]) -> str:
    """Why some rank will never join (its process or its training ended); empty while all still may."""
    rank = min((rank for rank in lost if rank not in state.parts), default=None) if lost else None
    return "" if rank is None else f"rank {rank} {lost[rank]}"
