"""The rank's side of arenas: reach the one of another rank, read it verified, and have its shard written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

from lastgasp.arena import Arena, DamagedArena, Reading, reading, steps
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
        fewer=status.fewer,
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
            found = {ref.rank: stack.enter_context(_opened(ref, inner, order.step)) for ref in order.arenas}

            def verify() -> None:
                for each in found.values():
                    each.verify()

            payloads = {rank: each.payload for rank, each in found.items()}
            wanted = Wanted(own=order.own, arenas=payloads, common=order.common, verify=verify)
            try:
                result = inner.save_shards(order.step, order.aux, order.reason, wanted)
            except Exception:
                verify()  # damage may be the cause of anything
                raise
    except BadArena:
        if result is not None:
            source.discard(result)
        raise
    return result


def _opened(ref: m.ArenaRef, source: ShardSource, step: int) -> AbstractContextManager[Reading]:
    own = source.arena
    return _reading(ref, step, own.fd if own is not None and own.identity == ref.identity else -1)


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
def read(ref: m.ArenaRef, step: int) -> Iterator[memoryview]:
    """The payload of `step`, verified.

    Raises:
        BadArena: there is none, or not any more; at the end too.
    """
    with _reading(ref, step) as found:
        found.verify()
        yield found.payload


@contextlib.contextmanager
def _reading(ref: m.ArenaRef, step: int, own: int = -1) -> Iterator[Reading]:
    """The same, verified beside the caller, and at the end in any case. `own`: descriptor of it, where it is ours."""
    fd = os.dup(own) if own >= 0 else open_arena(ref)
    try:
        with _named(ref.rank), ExitStack() as stack:
            try:
                found = stack.enter_context(reading(fd, ref.identity, step))
            except OSError as error:
                raise BadArena(ref.rank, str(error)) from error

            def verify() -> None:
                with _named(ref.rank):
                    found.verify()

            yield Reading(found.payload, verify)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _named(rank: int) -> Iterator[None]:
    """Says whose arena it is that is damaged."""
    try:
        yield
    except DamagedArena as error:
        raise BadArena(rank, str(error)) from error
