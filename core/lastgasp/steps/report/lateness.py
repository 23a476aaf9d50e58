"""Who came late to the collectives of a step. Needs no common clock: durations of one rank are compared with others'.

A collective ends on all members at about the same time. So the last one to join has the shortest wait, and all others
wait for as long as the last one is late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .robust_stats import slowdown
from .table import Collective

SYNCHRONISING = ("allreduce", "allgather", "reducescatter", "alltoall", "barrier")
"""Operations that no member completes before all have joined, by their names (HCCL's, NCCL's, gloo's) in lower case
without separators. A broadcast's root and a sender may finish early: their short waits mean nothing."""

Members = tuple[int, ...]


def synchronising(operation: str) -> bool:
    """Whether an operation holds all members until the last one has come."""
    text = operation.lower().replace("_", "")
    return any(name in text for name in SYNCHRONISING)


def lateness(step: Mapping[int, Sequence[tuple[Members, Collective]]]) -> dict[int, float]:
    """Seconds by which each rank came later than the others to the collectives of one step; negative for earlier.

    Ranges of one kind and group are matched by their order. Several groups: the one that says most counts, since a
    rank that is late for one is late for the next as well.

    Args:
        step: rank -> its collectives by begin, each with the members of its group (empty: not known).
    """
    matched: dict[tuple[int, Members], dict[int, list[Collective]]] = {}
    for rank, collectives in step.items():
        for members, collective in collectives:
            matched.setdefault((collective[0], members), {}).setdefault(rank, []).append(collective)
    result: dict[int, float] = {}
    for by_rank in matched.values():
        if len(by_rank) > 1:
            for rank, value in _of_group(by_rank).items():
                if abs(value) >= abs(result.get(rank, 0.0)):
                    result[rank] = value
    return result


def _of_group(by_rank: Mapping[int, Sequence[Collective]]) -> dict[int, float]:
    total = dict.fromkeys(by_rank, 0.0)
    for first, last in _clusters(list(by_rank.values())):
        rows = [[by_rank[rank][place][2] for rank in by_rank] for place in range(first, last)]
        for rank, value in zip(by_rank, slowdown(max(rows, key=max)), strict=True):
            total[rank] -= value
    return total


def _clusters(ranks: Sequence[Sequence[Collective]]) -> list[tuple[int, int]]:
    """Collectives that overlap in time on any rank, as DDP's buckets do: a rank that is late is late for all of them,
    and that must count once. First and last (exclusive) place of each cluster."""
    count = min(map(len, ranks))
    result, first = list[tuple[int, int]](), 0
    open_until = [0.0] * len(ranks)
    for place in range(count):
        begins = [collectives[place][1] for collectives in ranks]
        if place and all(begin >= until for begin, until in zip(begins, open_until, strict=True)):
            result.append((first, place))
            first = place
        ends = [collectives[place][1] + collectives[place][2] * 1e9 for collectives in ranks]
        open_until = [max(pair) for pair in zip(open_until, ends, strict=True)]
    if count:
        result.append((first, count))
    return result
