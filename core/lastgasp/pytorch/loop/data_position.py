"""Passes over data: where the loop stands in them, and how it gets there again.

A *pass* is one iteration of a loader by `session.batches`. The position of a rank is its epoch and, for each pass of
this epoch that counts, how many batches it has given. An earlier pass of the epoch that is over gives nothing when the
epoch is run again; one whose loop body contains the later pass (nested loops) gives its current batch once more.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lastgasp.errors import CheckpointError, UsageError
from lastgasp.pytorch import rng
from lastgasp.pytorch.data import SamplerStart, SamplerTrack, loader_generators, track_sampler, untrack_sampler
from lastgasp.pytorch.loaders import MAP, STATEFUL, STREAM, SkipProgress, kind_of

log = logging.getLogger("lastgasp")


class Row(msgspec.Struct, kw_only=True):
    """One pass in a position.

    Attributes:
        consumed: batches given.
        outer: the loop is in the body of this pass, in which a later one runs.
        over: it gave all it had, or was broken off.
        state: of a stateful loader, pickled.
    """

    kind: str
    consumed: int
    outer: bool = False
    over: bool = False
    state: bytes = b""


class Fixed(msgspec.Struct, kw_only=True):
    """What of a pass changes only when it begins."""

    start: dict[str, Any] = {}
    at_iter: bytes = b""
    at_first: bytes = b""
    generators: list[bytes] = []
    sampler: bytes = b""
    fetch: bytes = b""


class Position(msgspec.Struct, kw_only=True):
    """Where a rank stands.

    Attributes:
        epoch: the epoch, as the user counts it.
        done: passes of it that are over and forgotten.
        rows: the passes after those.
        explicit: epochs are counted by `session.epochs`.
        stale: it was captured with the random state before an update, and the loop usually draws random numbers after.
        extra: digest of the rank's `extra`, which should be the same on all ranks; empty where it is not known.
    """

    version: int = 1
    epoch: int = 0
    done: int = 0
    explicit: bool = False
    rows: list[Row] = []
    stale: bool = False
    extra: bytes = b""


_POSITION = msgspec.msgpack.Decoder(Position)
_FIXED = msgspec.msgpack.Decoder(list[Fixed])


def encode(position: Position, fixed: bytes) -> bytes:
    """Both parts; the second one seldom changes."""
    head = msgspec.msgpack.encode(position)
    return len(head).to_bytes(4, "little") + head + fixed


def position_only(data: bytes) -> bytes:
    """The position of another rank, for one whose own was lost: how many batches, but not under which random state."""
    position, fixed = decode(data)
    for row in position.rows:
        row.state = b""
    return encode(position, msgspec.msgpack.encode([Fixed() for _ in fixed]))


def about(data: bytes) -> tuple[bool, bytes]:
    """`stale` and `extra` of an encoded position; False and empty where there is none."""
    position = decode(data)[0] if data else Position()
    return position.stale, position.extra


def decode(data: bytes) -> tuple[Position, list[Fixed]]:
    """What `encode` made.

    Raises:
        CheckpointError: of another version, or torn.
    """
    try:
        size = int.from_bytes(data[:4], "little")
        position = _POSITION.decode(data[4 : 4 + size])
        fixed = _FIXED.decode(data[4 + size :])
    except msgspec.DecodeError as error:
        raise CheckpointError(f"the data position in the checkpoint cannot be read: {error}") from error
    if position.version != 1:
        raise CheckpointError(f"the data position has version {position.version}, this lastgasp reads 1")
    return position, fixed


@dataclass(eq=False)
class DataPass:
    """One pass over one loader.

    Attributes:
        consumed: batches given.
        over: it has no more.
        broken: the loop has dropped its iterator.
        asking: the loop asks for a batch at this moment.
        fetch: random state before the newest batch was fetched.
        parent: the pass in whose body it began.
    """

    loader: Any
    kind: str
    parent: DataPass | None = None
    consumed: int = 0
    over: bool = False
    broken: bool = False
    asking: bool = False
    fetch: bytes = b""
    inner: Iterator[Any] | None = None
    track: SamplerTrack | None = None
    fixed: Fixed = field(default_factory=Fixed)

    @property
    def forgets_workers(self) -> bool:
        """Random numbers that worker processes of the loader draw are not restored by a resume in the middle."""
        if not getattr(self.loader, "num_workers", 0) or self.kind == STATEFUL:
            return False
        return self.kind == MAP or bool(getattr(self.loader, "persistent_workers", False))

    @property
    def in_body(self) -> bool:
        """It has given a batch and was not asked for the next one yet."""
        return self.consumed > 0 and not (self.over or self.broken or self.asking)


class DataPosition:
    """All passes of a run.

    Args:
        recorder: captures random state.
        sampler: the user's, from `TorchState`.

    Attributes:
        by_hand: the loop tells itself where its steps end; passes that are over are then no part of the position.
    """

    def __init__(self, recorder: rng.RngRecorder, sampler: Any) -> None:
        self._recorder, self._sampler = recorder, sampler
        self.epoch, self.explicit, self.by_hand = 0, False, False
        self._done = 0
        self._passes: list[DataPass] = []
        self._begun = False
        self._tracks: dict[int, tuple[Any, SamplerTrack]] = {}
        self._pending: tuple[Position, list[Fixed]] | None = None
        self._static, self._dirty = b"\x90", True

    # -- position -----------------------------------------------------------------------------------------

    def record(self, stale: bool = False, extra: bytes = b"") -> bytes:
        """The encoded position at the end of a step: the body of the innermost pass is over.

        Args:
            stale, extra: see `Position`.
        """
        innermost = next((p for p in reversed(self._passes) if not p.over), None)
        asking = next((p for p in reversed(self._passes) if p.asking), innermost)
        outer = _parents(asking)
        counted = [p for p in self._passes if asking not in _parents(p) and not (p.over and self.by_hand)]
        if self._dirty or counted != self._passes or any(p.track is not None and p.track.changed for p in counted):
            self._static = _encode_fixed(counted)
            self._dirty = counted != self._passes
        rows = [
            Row(kind=p.kind, consumed=p.consumed, outer=p in outer, over=p.over, state=_state_of(p)) for p in counted
        ]
        done = 0 if self.by_hand else self._done
        own = Position(epoch=self.epoch, done=done, explicit=self.explicit, rows=rows, stale=stale, extra=extra)
        return encode(own, self._static)

    def resume(self, data: bytes, epoch: int) -> None:
        """Begin where `data` says; where it is empty, with `epoch`."""
        self._pending = decode(data) if data else (Position(epoch=epoch), [])
        self.epoch, self.explicit = self._pending[0].epoch, self._pending[0].explicit

    @property
    def nowhere(self) -> bool:
        """A resumed run has no position in any data that it could come to."""
        pending = self._pending
        return pending is not None and not (pending[0].rows or pending[0].done or pending[0].explicit)

    def forget(self) -> bool:
        """A resumed run will not come to its position. Returns whether that was in the middle of a pass."""
        pending, self._pending = self._pending, None
        return pending is not None and any(not row.over for row in pending[0].rows)

    # -- epochs -------------------------------------------------------------------------------------------

    def next_epoch(self, epoch: int) -> bool:
        """`session.epochs` goes on to `epoch`; whether a resumed run stands where it stood now."""
        self.explicit, self.epoch = True, epoch
        self._clear()
        pending = self._pending
        if pending is None or not pending[0].explicit or pending[0].rows or pending[0].done:
            return False
        self._pending = None
        return True

    def _clear(self) -> None:
        self._passes, self._done, self._dirty = [], 0, True

    # -- passes -------------------------------------------------------------------------------------------

    def before_begin(self) -> bool:
        """A pass is about to begin.

        Returns:
            Whether everything before it is over and done, so that the position is the beginning of this pass.
        """
        for one in self._passes:
            one.over = one.over or one.broken
        if self.explicit or not self._begun or not all(one.over for one in self._passes):
            return False
        self.epoch += 1
        self._clear()
        return True

    def nested(self) -> bool:
        """Whether the loop is in the body of a pass."""
        return any(one.in_body for one in self._passes)

    def begin(self, loader: Any, replay: bool = False) -> tuple[DataPass, bool]:
        """A pass begins, after `before_begin`.

        Args:
            replay: a resumed run loads what was consumed again, for the random numbers of its worker processes.

        Returns:
            The pass, and whether a resumed run stands where it stood now.

        Raises:
            UsageError: it is nested in a pass over a loader that cannot give a batch again.
        """
        self._begun = True
        parent = next((p for p in reversed(self._passes) if p.in_body), None)
        if parent is not None:
            if parent.kind == STATEFUL:
                raise UsageError("a loop over s.batches() inside the body of another one whose loader has a state of "
                                 "its own (state_dict): iterate the outer one without s.batches()")  # fmt: skip
            parent.fixed.fetch = parent.fetch
        while self._passes and self._passes[0].over:
            self._passes.pop(0)
            self._done += 1
        kind = kind_of(loader)
        one = DataPass(loader, STREAM if replay and kind == MAP else kind, parent)
        number = self._done + len(self._passes)
        self._passes.append(one)
        self._dirty = True
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self.epoch)
        if self._pending is not None:
            return one, self._begin_resumed(one, number, *self._pending)
        self._begin_anew(one)
        return one, False

    def _begin_resumed(self, one: DataPass, number: int, position: Position, fixed: list[Fixed]) -> bool:
        last = position.done + len(position.rows) - 1
        if number < position.done:
            one.over = True
        elif number <= last:
            self._again(one, position.rows[number - position.done], fixed[number - position.done])
        if number < last:
            return False
        self._pending = None
        if number > last:  # the position is the beginning of this pass
            self._begin_anew(one)
        return True

    def _begin_anew(self, one: DataPass) -> None:
        if one.over:
            return
        if self._sampler is not None and hasattr(self._sampler, "load_state_dict"):
            one.fixed.sampler = pickle.dumps(self._sampler.state_dict())
        if one.kind == MAP:
            one.track = self._track(one.loader)
            one.track.new_epoch()
        elif one.kind == STREAM:
            one.fixed.at_iter = self._recorder.snapshot()
            one.fixed.generators = _generator_states(one.loader)
        one.inner = iter(one.loader)

    def _again(self, one: DataPass, row: Row, fixed: Fixed) -> None:
        """Stand where `row` says."""
        if row.kind != one.kind:
            raise CheckpointError(
                f"the checkpoint was taken with a {row.kind} loader, this one is a {one.kind} loader: the position in "
                "the data cannot be restored. Give the loaders that were used before, in the same order."
            )
        one.fixed, one.consumed, one.over = fixed, row.consumed - row.outer, row.over
        if one.over:
            return
        if fixed.sampler:
            self._sampler.load_state_dict(pickle.loads(fixed.sampler))
        if one.kind == MAP:
            one.track = self._track(one.loader)
            one.track.resume(SamplerStart(**fixed.start), one.consumed)
            one.inner = iter(one.loader)
            one.track.settle()
        elif one.kind == STATEFUL and row.state:
            one.loader.load_state_dict(pickle.loads(row.state))
            one.inner = iter(one.loader)
        else:
            self._replay(one)
        if row.outer and fixed.fetch:
            rng.restore(rng.decode(fixed.fetch))

    def _replay(self, one: DataPass) -> None:
        fixed = one.fixed
        if fixed.at_iter:
            rng.restore(rng.decode(fixed.at_iter))
        _set_generators(one.loader, fixed.generators)
        one.inner = iter(one.loader)
        if fixed.at_first:
            rng.restore(rng.decode(fixed.at_first))
        with SkipProgress(one.consumed) as progress:
            for done, _ in enumerate(progress):
                if next(one.inner, _END) is _END:
                    log.warning(
                        "the data are shorter than they were: %d batches were trained on in this pass, and the loader "
                        "ended after %d. Has the data set changed?",
                        one.consumed,
                        done,
                    )
                    break

    def ask(self, one: DataPass) -> None:
        """The loop asks this pass for a batch: its body is over, and with it every pass that began inside."""
        one.asking = True
        if self._passes[-1:] != [one] and any(p.parent is one for p in self._passes):
            self._passes = [p for p in self._passes if one not in _parents(p)]
            one.fixed.fetch, self._dirty = b"", True

    def fetch(self, one: DataPass) -> Any:
        """The next batch.

        Raises:
            StopIteration: there is none.
        """
        if one.over or one.inner is None:
            raise StopIteration
        one.fetch = self._recorder.snapshot()
        if one.kind == STREAM and not one.fixed.at_first:
            one.fixed.at_first, self._dirty = one.fetch, True
        try:
            batch = next(one.inner)
        except StopIteration:
            one.over = True
            raise
        one.consumed += 1
        return batch

    def _track(self, loader: Any) -> SamplerTrack:
        known = self._tracks.get(id(loader))
        if known is None:
            known = self._tracks[id(loader)] = (loader, track_sampler(loader, self._recorder))
        return known[1]

    def close(self) -> None:
        """Take everything off the loaders. Idempotent."""
        for loader, _ in self._tracks.values():
            untrack_sampler(loader)
        self._tracks.clear()
        for one in self._passes:
            one.inner = None  # with it go the loader's worker processes


_END = object()


def _encode_fixed(passes: list[DataPass]) -> bytes:
    for one in passes:
        if one.track is not None:
            one.track.changed = False
            one.fixed.start = one.track.start.as_dict()
    return msgspec.msgpack.encode([p.fixed for p in passes])


def _parents(one: DataPass | None) -> list[DataPass]:
    found = []
    while one is not None and one.parent is not None:
        one = one.parent
        found.append(one)
    return found


def _generator_states(loader: Any) -> list[bytes]:
    return [bytes(g.get_state().numpy()) for g in loader_generators(loader)]


def _set_generators(loader: Any, states: list[bytes]) -> None:
    for generator, raw in zip(loader_generators(loader) if states else [], states, strict=True):
        generator.set_state(rng.as_tensor(raw))


def _state_of(one: DataPass) -> bytes:
    if one.kind != STATEFUL or one.over:
        return b""
    return pickle.dumps(one.loader.state_dict())  # at once: a loader may give out its live state
