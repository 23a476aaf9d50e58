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
from lastgasp.session import Session


@dataclass(frozen=True)
class Taken:
    """What this rank's predecessor has left.

    Attributes:
        step: the step; durable: the newest one on disk.
        payload: what was copied into the arena, verified. Valid inside of the `with` block.
    """

    step: int
    durable: int
    payload: memoryview


class _Said(msgspec.Struct, frozen=True, array_like=True):
    step: int
    why: str


@contextlib.contextmanager
def taken_over(
    session: Session, arena: Arena | None, why_not: Callable[[memoryview], str]
) -> Iterator[Taken | None]:
    """What all ranks can go on with, or None; then they begin with files. All ranks enter it together.

    Where the block ends well the arena goes on with the memory that was left, so that at each moment it holds that
    step or a newer one. What a block raises ends the rank: its state may be half of one step and half of another.

    Args:
        session: before `training_started`.
        arena: this rank's, still empty; None where it has none.
        why_not: looks at a payload, and says why it is none for this training; empty if it is one.

    Raises:
        ControlError, DeadlineExceeded: the ranks could not agree.
        BadArena: the memory has changed meanwhile.
    """
    if arena is None or not session.place.attempt or not session.has_controller:
        yield None
        return
    with ExitStack() as stack:
        left, payload, why = session.left(), memoryview(b""), ""
        step = left.step if left is not None else -1
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
        yield Taken(step, left.durable, payload)
        fd = open_arena(left.arena, os.O_RDWR)
        try:
            arena.adopt(fd, left.arena.identity, step)
        except (DamagedArena, OSError) as error:
            os.close(fd)
            raise BadArena(left.arena.rank, str(error)) from error
