"""Going on with fewer ranks, and with all of them again: what is said, and whether MindIO's handlers could. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from .again import NEW, Again
from .going_on import Fewer
from .members import Member

GROWN = "{new} of {all} ranks were missing, and have new processes: training goes on with all of them"
FEWER = "the job trains with fewer ranks, where no fault is answered in place"
UNSAVED = "; the step could not be saved before ({why})"
NOT_GROWN = "ranks that are missing are not taken in: the step with which all would begin could not be saved ({why})"


def cannot_share(ranks: Iterable[int], fewer: Mapping[int, Fewer], number: int) -> str:
    """Why these ranks cannot train as `number` ranks, where their job began with more; empty if they can.

    Args:
        fewer: what they have said about it.
    """
    for rank in ranks:
        said = fewer.get(rank, Fewer())
        if not said.may:
            return said.why or f"rank {rank} does not train with an ElasticLoader"
        if said.parts % number:
            return f"{said.parts} micro-batches cannot be shared evenly by {number} ranks"
    return ""


def noticed(ranks: Iterable[int], members: Mapping[int, Member]) -> str:
    """Why these ranks cannot train as fewer, as one of them has found out since its training began; else empty."""
    found = (members[rank].prepared for rank in ranks)
    return next((one.no_fewer for one in found if one is not None and one.no_fewer), "")


def cannot_grow(caps: Collection[str], asked: bool, replicas: bool, *, by_handlers: bool) -> str:
    """Why nobody can be taken in; empty where they can.

    Args:
        caps: the ranks' `Begin.recovery`; asked: all may train with fewer; replicas: they hold the same state.
        by_handlers: as of `by_handlers_cannot`.
    """
    allowed = ("auto", "replace", "retry", "fewer") if by_handlers else ("auto", "replace")
    if len(caps) != 1 or not set(caps) <= {*allowed}:
        return "not every rank can be entered again with new ones"
    if not replicas and not by_handlers:
        return "the ranks do not all hold the same state"
    if asked:
        return ""
    return f"not every rank {'has asked for it (enable_zit)' if by_handlers else 'trains with an ElasticLoader'}"


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


def shrunk(lost: tuple[int, ...], why: str, left: int, total: int) -> str:
    """What is noted where `left` of `total` ranks go on; `why` the others could not get new processes."""
    return f"{named(lost)} could not get new processes ({why}): training goes on with {left} of {total} ranks"


def fewest(replicas: Iterable[Collection[int]], takers: Collection[int]) -> int:
    """How many ranks hold the shard that the fewest hold, where the `takers` hold none."""
    return min(len({*shard} - {*takers}) for shard in replicas)


def named(ranks: tuple[int, ...]) -> str:
    """These ranks, in words."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def vanished(again: Again, address: Callable[[int], str]) -> tuple[str, ...]:
    """The addresses where no rank is left that goes on."""
    here = {address(rank) for rank in again.members}
    return tuple(sorted({address(rank) for rank in again.lost} - here - {""})) if again.members else ()
