"""Our shards as MindIO's replica info (docs/facts/mindio_tft.md §8)."""

from __future__ import annotations

from typing import Any

from lastgasp.errors import ConfigError
from lastgasp.topology import Place, ReplicaGroups

_REMEDY = "Set LASTGASP_BACKEND=embedded, which saves such a job."


def replica_info(place: Place) -> list[dict[str, Any]]:
    """This rank's entry: one optimizer type, whose groups are our shards.

    In a group as large as its number of replicas every rank holds everything, so MindIO orders the lowest usable
    holder of each shard to save, alone: just what a StateSource expects. (Its own pairing by position inside one
    larger group is not needed, and MindSpore mode refuses it.)

    Raises:
        ConfigError: shards that MindIO cannot describe: groups of different sizes, or a rank in two or in none.
    """
    check_groups(place.replicas, place.world_size)
    group = group_of(place)
    return [{"rank_list": list(group), "replica_cnt": len(group), "replica_shift": 0}]


def group_of(place: Place) -> tuple[int, ...]:
    """The ranks that hold this rank's shard, in MindIO's order; also its data parallel group."""
    return tuple(sorted(next(group for group in place.replicas if place.rank in group)))


def check_groups(replicas: ReplicaGroups, world_size: int) -> None:
    """Refuse what would end without a dump.

    Raises:
        ConfigError: with what is wrong.
    """
    sizes = {len(group) for group in replicas}
    if len(sizes) != 1:
        raise ConfigError("replicas", replicas, "the same number of holders for every shard", _REMEDY)
    ranks = sorted(rank for group in replicas for rank in group)
    if ranks != list(range(world_size)):
        raise ConfigError("replicas", replicas, "exactly one shard on each rank", _REMEDY)
