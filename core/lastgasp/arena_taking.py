"""A restarted job goes on with what its ranks have left in their arenas, which its launchers have kept."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from lastgasp.arena import Arena, DamagedArena
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
    """

    step: int
    durable: int
    payload: memoryview
    arena: ArenaRef


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
        if taken is None:
            return
        fd = open_arena(taken.arena, os.O_RDWR)
        try:
            arena.adopt(fd, taken.arena.identity, taken.step)
        except (DamagedArena, OSError) as error:
            os.close(fd)
            raise BadArena(taken.arena.rank, str(error)) from error
