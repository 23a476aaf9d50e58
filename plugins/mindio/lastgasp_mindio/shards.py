"""MindIO's replica information as the engine's shards. Pure (docs/facts/mindio_tft.md §8).

A group of G ranks with R replicas has G/R shards; the ranks at positions p, p + G/R, ... of the sorted list hold the
same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lastgasp.adapter import ReplicaGroups

Info = Sequence[Mapping[str, Any]]
"""What one rank has handed to `tft_set_optimizer_replica`: one entry for each type of optimizer."""


@dataclass(frozen=True)
class Group:
    """The ranks that hold one optimizer of one type together.

    Args:
        kind: the type; shards: the holders of each shard, in order.
    """

    kind: int
    shards: ReplicaGroups

    @property
    def ranks(self) -> frozenset[int]:
        """All of them."""
        return frozenset(rank for shard in self.shards for rank in shard)


def groups_of(infos: Sequence[Info | None]) -> tuple[Group, ...]:
    """The groups of a job, from what its ranks have reported, by rank.

    Raises:
        ValueError: the reports contradict one another, or a rank has made none; MindIO would save nothing then.
    """
    missing = [rank for rank, info in enumerate(infos) if not info]
    if missing:
        raise ValueError(f"tft_set_optimizer_replica was not called on rank {missing[0]}")
    counts = {len(info) for info in infos if info is not None}
    if len(counts) != 1:
        raise ValueError("the ranks have reported different numbers of optimizer types")
    return tuple(group for kind in range(counts.pop()) for group in _of_type(kind, infos))


def _of_type(kind: int, infos: Sequence[Info | None]) -> list[Group]:
    found: dict[tuple[int, ...], int] = {}
    for info in infos:
        assert info is not None
        ranks, count = tuple(sorted(info[kind]["rank_list"])), int(info[kind]["replica_cnt"])
        if found.setdefault(ranks, count) != count:
            raise ValueError(f"the ranks {ranks} have reported different numbers of replicas")
    members = sorted(rank for ranks in found for rank in ranks)
    if members != list(range(len(infos))):
        raise ValueError(f"the groups of optimizer type {kind} do not hold each rank once: {sorted(found)}")
    return [Group(kind, tuple(ranks[i :: len(ranks) // n] for i in range(len(ranks) // n))) for ranks, n in
            sorted(found.items())]  # fmt: skip


def replicas_of(groups: Sequence[Group]) -> ReplicaGroups:
    """The holders of each shard, those of one group after those of another."""
    return tuple(shard for group in groups for shard in group.shards)


def together_of(groups: Sequence[Group], rank: int) -> dict[int, tuple[int, ...]]:
    """The groups that a rank is in, by their number, with the numbers of their shards in `replicas_of`."""
    found, first = {}, 0
    for number, group in enumerate(groups):
        if rank in group.ranks:
            found[number] = tuple(range(first, first + len(group.shards)))
        first += len(group.shards)
    return found
