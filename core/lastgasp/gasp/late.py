"""Ranks that do not come to a recovery in place, and when the others go on without them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from lastgasp.events import Fault

from .again import Again
from .members import Member

REPLACED = "rank {rank} does not leave its training: it gets a new process"
NOT_REPLACED = "rank {rank} does not leave its training, and gets no new process: {why}"
LATE = "has not taken part in the recovery in place in time"


def late_ranks(
    world_size: int, entered: Collection[int], members: Mapping[int, Member], holders: Collection[int]
) -> list[int]:
    """Who is to blame for it that not all have entered.

    Those that have not joined; where some of them hold the step themselves these alone, as new processes join only once
    all are there. Where all have joined it is not known.
    """
    late = [rank for rank in range(world_size) if rank not in entered]
    missing = [rank for rank in late if rank not in members]
    return [rank for rank in missing if rank in holders] or missing or late


def only_late(faults: Iterable[Fault], members: Mapping[int, Member], holders: Collection[int]) -> bool:
    """Whether nothing else is wrong than that survivors have not begun. New processes would be late again."""
    found = {fault.rank for fault in faults if fault.kind != "peer"}
    return bool(found) and all(rank in holders and not (rank in members and members[rank].begun) for rank in found)


def only_killed(faults: Iterable[Fault]) -> bool:
    """Whether all that has happened is that ranks have died."""
    found = {fault.kind for fault in faults if fault.kind != "peer"}
    return bool(found) and found <= {"killed", "lost"}


def also_lost(again: Again | None, fault: Fault) -> Again | None:
    """The same order where one more rank gets a new process, as it does not leave its training; None: that cannot be.

    All begin with files, so nobody needs what it holds, and nobody has met it in the next incarnation yet.
    """
    if again is None or not again.from_files or again.members or fault.kind != "hang" or fault.rank in again.lost:
        return None
    return msgspec.structs.replace(again, lost=tuple(sorted((*again.lost, fault.rank))))


def holders_of(step: int, here: Collection[int], members: Mapping[int, Member], *, alike: bool) -> list[int]:
    """Who enters again with what it holds of that step; the others take it from one of them.

    alike: all hold the same. Who has not done the step to its end, which may be more than its update, takes it then.
    """
    held = [rank for rank in sorted(here) if members[rank].holds(step)]
    whole = [rank for rank in held if (answer := members[rank].prepared) is not None and not answer.cut_short]
    return whole if alike and whole else held


def may_come(
    shard: Iterable[int], here: Collection[int], members: Mapping[int, Member], holders: Collection[int]
) -> bool:
    """Whether none of these ranks has said yet that it holds the step of this incarnation, and some still may."""
    if any(rank in here and members[rank].begun for rank in shard):
        return False
    return any(rank in holders and (rank not in members or members[rank].here) for rank in shard)
