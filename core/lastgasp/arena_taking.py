"""A job that is restarted, or entered again, goes on with what is in its ranks' arenas, which launchers keep."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from lastgasp.arena import Arena, DamagedArena
from lastgasp.errors import ControlError
from lastgasp.gasp.arena_files import BadArena, open_arena, read
from lastgasp.gasp.messages import ArenaRef
from lastgasp.session import Session


@dataclass(frozen=True)
class Taken:
    """What this rank's predecessor has left.

    Attributes:
        step: the step; durable: the newest one on disk.
        payload: what was copied into the arena, verified. Valid inside of the `with` block.
        arena: where it is.
        aux: the predecessor's auxiliary state, where it is the arena of a replica, which has its own; empty if unknown.
    """

    step: int
    durable: int
    payload: memoryview
    arena: ArenaRef
    aux: bytes = b""


class _Said(msgspec.Struct, frozen=True, array_like=True):
    step: int
    why: str


@contextlib.contextmanager
def left_by_all(
    session: Session, why_not: Callable[[memoryview], str], *, newer: bool = False
) -> Iterator[Taken | None]:
    """What all ranks can use of what was left, or None; then it is freed. All ranks enter it together.

    Args:
        session: before `training_started`.
        why_not: looks at a payload, and says why it is none for this training; empty if it is one.
        newer: a step that is on disk, too, is taken from there.

    Raises:
        ControlError, DeadlineExceeded: the ranks could not agree.
        BadArena: the memory has changed meanwhile.
    """
    if not session.place.attempt or not session.has_controller:
        yield None
        return
    with ExitStack() as stack:
        left, payload, why = session.left(), memoryview(b""), ""
        step = left.step if left is not None and left.step >= left.durable + newer else -1
        if left is not None and step >= 0:
            try:
                payload = stack.enter_context(read(left.arena, step))
                why = why_not(payload)
            except BadArena as error:
                why = str(error)
        said = [msgspec.json.decode(part, type=_Said)
                for part in session.gather("arenas/left", msgspec.json.encode(_Said(step, why)))]  # fmt: skip
        refusals = sorted({one.why for one in said if one.why})
        if left is None or step < 0 or refusals or len({one.step for one in said}) > 1:
            session.drop_left()
            if refusals:
                session.note(f"step {step} was left in arenas, but training cannot begin with it ({refusals[0]})")
            yield None
            return
        yield Taken(step, left.durable, payload, left.arena)


@contextlib.contextmanager
def taken_over(
    session: Session, arena: Arena | None, why_not: Callable[[memoryview], str], *, newer: bool = False
) -> Iterator[Taken | None]:
    """What all ranks can go on with, or None; then they begin with files. All ranks enter it together.

    Where the block ends well the arena goes on with the memory that was left, so that at each moment it holds that
    step or a newer one. What a block raises ends the rank: its state may be half of one step and half of another.

    Args:
        session, why_not, newer: as for `left_by_all`.
        arena: this rank's, still empty; None where it has none.

    Raises:
        ControlError, DeadlineExceeded, BadArena: as `left_by_all`.
    """
    if arena is None:
        yield None
        return
    with left_by_all(session, why_not, newer=newer) as taken:
        yield taken
        if taken is not None:
            _adopt(arena, taken)


def _adopt(arena: Arena, taken: Taken) -> None:
    fd = open_arena(taken.arena, os.O_RDWR)
    try:
        arena.adopt(fd, taken.arena.identity, taken.step)
    except (DamagedArena, OSError) as error:
        os.close(fd)
        raise BadArena(taken.arena.rank, str(error)) from error


class Known(msgspec.Struct, frozen=True):
    """What a rank that stays in its process knows of the checkpoints, and a new one does not.

    Attributes:
        durable: the newest step on disk.
        present: the manifests that were there when training began; None where that is not known.
        aux: auxiliary states of ranks that begin with a replica's arena.
    """

    durable: int = 0
    present: frozenset[str] | None = None
    aux: dict[int, bytes] = {}


class _Entering(msgspec.Struct, frozen=True, array_like=True):
    why: str
    known: Known | None


@contextlib.contextmanager
def taken_by_all(
    session: Session, arena: Arena, there: ArenaRef, step: int, why_not: Callable[[memoryview], str],
    *, known: Known | None,
) -> Iterator[tuple[Taken, frozenset[str] | None]]:  # fmt: skip
    """What a rank that enters its training again begins with: what `there` holds of `step`. All enter it together.

    With `Known.present` of those that stayed.

    Where the block ends well `arena`, still empty, goes on with that memory, unless it is a replica's.

    Args:
        there: this rank's own, that of the dead process whose place it takes, or of a replica.
        why_not: as for `left_by_all`.
        known: None in a new process.

    Raises:
        BadArena: it does not hold that step, or is damaged, or of another training.
        ControlError, DeadlineExceeded: another rank cannot begin, or the ranks could not agree.
    """
    with ExitStack() as stack:
        payload, bad = memoryview(b""), None
        try:
            payload = stack.enter_context(read(there, step))
            if why := why_not(payload):
                bad = BadArena(there.rank, why)
        except BadArena as error:
            bad = error
        own = _Entering("" if bad is None else str(bad), known)
        parts = session.gather("arenas/again", msgspec.json.encode(own))
        if bad is not None:
            raise bad
        said = [msgspec.json.decode(part, type=_Entering) for part in parts]
        for rank, one in enumerate(said):
            if one.why:
                raise ControlError(f"rank {rank} cannot enter its training again: {one.why}")
        stayed = [one.known for one in said if one.known is not None]
        rank = session.place.rank
        own_aux = next((one.aux[rank] for one in stayed if rank in one.aux), b"")
        taken = Taken(step, max((one.durable for one in stayed), default=0), payload, there, own_aux)
        yield taken, next((one.present for one in stayed), None)
    if there.rank == rank:
        _adopt(arena, taken)
