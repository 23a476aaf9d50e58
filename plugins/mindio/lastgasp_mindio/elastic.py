"""Elastic training (zit): whether ranks may be missing, and by which numbers all know each other then.

MindIO's handlers know a rank by its number in the complete job for ever. The engine counts those that are there, so a
rank's number there is its place among the *seats* that are taken. Pure (docs/facts/mindio_tft.md §7.4).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from lastgasp.adapter import Place
from lastgasp.adapter.again import Again
from lastgasp_mindio.shards import Group, replicas_of

HANDLERS = ("zit_downgrade_rebuild", "zit_upgrade_rebuild", "zit_upgrade_repair", "zit_upgrade_rollback")
DOWN = '{"scale-in-strategy": "DP"}'
UP = '{"scale-out-strategy": "DP"}'
"""What ClusterD has MindIO tell the handlers; MindSpeed-LLM's refuse anything else."""
_OWN = ("RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class Wishes:
    """Which faults may be answered in place.

    Attributes:
        recovery: as `RankStatus.recovery`, without elastic training.
        dp: the ranks with which this one trains in data parallel, where elastic training was asked for; else None.
    """

    recovery: str = ""
    dp: tuple[int, ...] | None = None


def missing(handlers: Container[str]) -> str:
    """The first handler without which ranks cannot be missing; empty where all are registered."""
    return next((name for name in ("stop", "clean", *HANDLERS) if name not in handlers), "")


def cannot(groups: Sequence[Group], wishes: Wishes, world: int) -> str:
    """Why a job does not go on with fewer ranks; empty where it may.

    MindIO isolates each rank that shares a data parallel index with a lost one. Only where every rank holds its part of
    the complete model is that nobody but the lost rank itself.
    """
    if any(len(group.ranks) != world for group in groups) or (wishes.dp and len(wishes.dp) != world):
        return "the model is split over ranks, and those that share its parts with a lost one would have to be ended"
    return ""


def of_seats(groups: Sequence[Group], seats: Sequence[int]) -> tuple[Group, ...]:
    """The groups of the complete job as far as their ranks are there, by the engine's numbers."""
    number = {seat: rank for rank, seat in enumerate(seats)}
    return tuple(
        Group(one.kind, tuple(tuple(number[rank] for rank in shard if rank in number) for shard in one.shards))
        for one in groups
    )


def seats_after(seats: Sequence[int], again: Again) -> tuple[int, ...]:
    """Which seats are taken from a recovery on. The engine takes in all missing ranks of such a job, or none."""
    if not again.members:
        return tuple(seats)
    if again.rung == "grow":
        return tuple(range(len(again.members)))
    return tuple(seats[before] for before in again.members)


def place_after(place: Place, again: Again, groups: Sequence[Group]) -> Place:
    """The place of a rank that goes on; `groups` are those of the seats that are taken then."""
    place = replace(place, incarnation=again.incarnation)
    if not again.members:
        return place
    return replace(
        place, rank=again.numbers[place.rank], world_size=len(again.members), replicas=replicas_of(groups)
    )


def environment(again: Again) -> dict[str, str]:
    """What torch and lastgasp read from now on; this rank and the size of its job stay those of the complete one."""
    return {name: value for name, value in again.environment.items() if name not in _OWN}


def returning(again: Again) -> list[int]:
    """The ranks that were missing, and are there again."""
    return sorted(set(range(len(again.members))) - set(again.numbers.values()))
