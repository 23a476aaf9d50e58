"""The rank's side of arenas: reach the one of another rank, read it verified, and have its shard written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

from lastgasp.arena import Arena, DamagedArena, steps, verified
from lastgasp.ports import SaveResult, ShardSource, StateSource, Wanted, own_source

from . import messages as m
from .rank_status import RankStatus

_PATH = "/proc/{}/fd/{}"


class BadArena(Exception):
    """The arena of `rank` cannot be used for this step."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"the arena of rank {rank}: {why}")
        self.rank = rank


def arena_of(source: StateSource) -> Arena | None:
    """The arena of a source's rank, if it has one."""
    inner = own_source(source)
    return inner.arena if isinstance(inner, ShardSource) else None


def steps_of(source: StateSource) -> tuple[int, ...]:
    """The steps that the arena of this rank holds."""
    own = arena_of(source)
    return steps(own.fd, own.identity) if own is not None else ()


def begin(status: RankStatus, source: StateSource, together: tuple[tuple[int, ...], ...]) -> m.Begin:
    """What a rank says when its training begins."""
    arena = arena_of(source)
    return m.Begin(
        step=status.step,
        durable=status.durable,
        buffer_fd=source.buffer_fd,
        recovery=status.recovery,
        entered=status.entered,
        from_files=status.from_files,
        elastic=status.elastic,
        together=together,
        arena_fd=arena.fd if arena is not None else -1,
        arena_id=arena.identity if arena is not None else b"",
        buddy=arena is not None and arena.buddy,
    )


def save(source: StateSource, order: m.Save) -> SaveResult:
    """Write what the order names, from live state and from arenas.

    Raises:
        BadArena: of which rank; nothing is left on the disk.
        NotSaveable, OSError: as `StateSource.save`.
    """
    inner = own_source(source)
    if not isinstance(inner, ShardSource):
        return source.save(order.step, order.aux, order.reason)
    result: SaveResult | None = None
    try:
        with getattr(source, "mark", nullcontext()), ExitStack() as stack:
            payloads = {ref.rank: stack.enter_context(_opened(ref, inner, order.step)) for ref in order.arenas}
            wanted = Wanted(own=order.own, arenas=payloads, common=order.common)
            result = inner.save_shards(order.step, order.aux, order.reason, wanted)
    except BadArena:
        if result is not None:
            source.discard(result)
        raise
    return result


def _opened(ref: m.ArenaRef, source: ShardSource, step: int) -> AbstractContextManager[memoryview]:
    own = source.arena
    return read(ref, step, own.fd if own is not None and own.identity == ref.identity else -1)


def open_arena(ref: m.ArenaRef, flags: int = os.O_RDONLY) -> int:
    """A descriptor of another rank's arena.

    Raises:
        BadArena: it cannot be opened.
    """
    try:
        return os.open(_PATH.format(ref.pid, ref.fd), flags | os.O_CLOEXEC)
    except OSError as error:
        raise BadArena(ref.rank, f"cannot be opened: {error}") from error


@contextlib.contextmanager
def read(ref: m.ArenaRef, step: int, own: int = -1) -> Iterator[memoryview]:
    """The payload of `step`, verified.

    Args:
        own: descriptor of that arena, where it is this rank's.

    Raises:
        BadArena: there is none, or not any more; at the end too.
    """
    fd = os.dup(own) if own >= 0 else open_arena(ref)
    try:
        reading = verified(fd, ref.identity, step)
        try:
            payload = reading.__enter__()
        except (DamagedArena, OSError) as error:
            raise BadArena(ref.rank, str(error)) from error
        yield payload
        try:
            reading.__exit__(None, None, None)
        except DamagedArena as error:
            raise BadArena(ref.rank, str(error)) from error
    finally:
        os.close(fd)
