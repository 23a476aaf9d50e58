"""Going on with fewer ranks, and with all of them again: what is said, and whether MindIO's handlers could. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from .again import NEW, Again

SHRUNK = "{lost} could not get new processes ({why}): training goes on with {left} of {all} ranks"
GROWN = "{new} of {all} ranks were missing, and have new processes: training goes on with all of them"
FEWER = "the job trains with fewer ranks, where no fault is answered in place"
UNSAVED = "; the step could not be saved before ({why})"


def by_leader(leader: str, again: Again, world_size: int) -> str:
    """What is noted where another leader has decided it."""
    size, new = len(again.members), again.members.count(NEW)
    if new:
        return f"{leader} takes in {new} of {size} ranks, which were missing: training goes on with all of them"
    return f"{leader} goes on without {named(again.lost)}: training goes on with {size} of {world_size} ranks"


def by_handlers_cannot(members: tuple[int, ...], takers: tuple[int, ...], elastic: Collection[int], host: str) -> str:
    """Why `members` cannot go on alone by MindIO's handlers, which hand over no shard then; empty if they can.

    docs/facts/mindio_tft.md §7.4.

    Args:
        takers: ranks that do not hold the step.
        elastic: those that have asked for it.
        host: where the ranks would meet, if the job has several hosts.
    """
    if rigid := [rank for rank in members if rank not in elastic]:
        return f"rank {rigid[0]} has not asked for it (enable_zit)"
    if host:
        return "it has several hosts"
    if 0 not in members:
        return "rank 0 is lost"
    behind = [rank for rank in takers if rank in members]
    return f"rank {behind[0]} does not hold the step" if behind else ""


def named(ranks: tuple[int, ...]) -> str:
    """These ranks, in words."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def vanished(again: Again, address: Callable[[int], str]) -> tuple[str, ...]:
    """The addresses where no rank is left that goes on."""
    here = {address(rank) for rank in again.members}
    return tuple(sorted({address(rank) for rank in again.lost} - here - {""})) if again.members else ()
