"""The position in an epoch of a framework that iterates its loaders itself, and perhaps fetches ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from lastgasp.errors import CheckpointError
from lastgasp.pytorch import rng
from lastgasp.pytorch.position.compared import is_compared
from lastgasp.pytorch.position.protocol import DESCRIBED, IN_TURN, MAP, LoaderPosition, PassStart
from lastgasp.pytorch.position.records import EpochRecord, encode_epoch
from lastgasp.pytorch.position.registry import position_of
from lastgasp.pytorch.position.samplers import untrack_sampler
from lastgasp.pytorch.position.skipping import SkipProgress

_KEEP = 4
"""Batches that a framework may have fetched ahead of the one that it trains on."""

_NOTHING: tuple[list[bytes], bytes] = [], b""


class EpochPosition:
    """Where one rank stands in an epoch over `loaders`. Only the thread that trains calls it, in this order:

    1. `begin`, or `resume` for the epoch in which a checkpoint was taken; then the framework iterates the loaders.
    2. After `resume`, `replay` with a function for each loader that draws its next batch; later `settle`, on the
       boundary. The caller then restores the random state of the boundary.
    3. `before_fetch` right before each batch is fetched, and `fetched` with those that are compared.
    4. `record` at each boundary, with the number of batches consumed: bytes for `decode_epoch`, the same object as long
       as nothing has changed.
    5. `close`, at the end.

    Args:
        loaders: of the epoch.
        recorder: captures random state.
        data: fingerprint of the data, recorded with the position; made: as in `EpochRecord`.

    Attributes:
        ahead: the framework may fetch batches before those before them are consumed, and draws random numbers for them;
            to be set before the first batch is fetched.
        watching: `before_fetch` is to be called.
        before: see `EpochRecord`; to be set after `begin` where it is not 0. It is in the numbers of consumed batches.
    """

    def __init__(self, loaders: Sequence[Any], recorder: rng.RngRecorder, data: str = "", made: bytes = b"") -> None:
        self.loaders, self._rng, self._data, self._made = list(loaders), recorder, data, made
        self.positions: list[LoaderPosition] = [position_of(loader, recorder) for loader in loaders]
        self.kinds = [position.kind for position in self.positions]
        self.ahead, self.before = False, 0
        self._live = self._any_live()
        self.watching = self._live or any(kind != MAP for kind in self.kinds)
        self._before: dict[int, tuple[list[bytes], bytes]] = {}
        self._starts, self._encoded, self._fetch = b"", b"", b""
        self._again: list[int] = []
        self._untouched: list[tuple[LoaderPosition, PassStart, bytes]] = []
        self._restart(0)

    @property
    def inexact(self) -> str:
        """Why a resume in the middle of the epoch is not exact; empty where nothing is known against it."""
        reasons = (position.inexact for position in self.positions)
        return next(filter(None, reasons), IN_TURN if self._in_turn else "")

    # -- an epoch -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """An epoch begins; the loaders are about to be iterated."""
        for position, start, state in self._untouched:  # nothing was left of the epoch that was resumed
            position.resume(start, state, self._count, over=True)
        self._restart(0)
        self.before = 0
        for position in self.positions:
            position.begin()

    def resume(self, record: EpochRecord, consumed: int) -> None:
        """An epoch is continued after `consumed` batches; the loaders are about to be iterated.

        Raises:
            CheckpointError: see `require`.
        """
        self.require(record)
        self.before = record.before
        consumed -= record.before
        self._restart(consumed)
        self._fetch = record.fetch
        count = len(self.kinds)
        starts = record.starts or [PassStart() for _ in range(count)]
        rows = list(zip(self.positions, starts, record.states or [b""] * count, strict=True))
        self._again = [position.resume(start, state, consumed) or 0 for position, start, state in rows]
        self._untouched = rows

    def require(self, record: EpochRecord) -> None:
        """Refuse what was recorded with other loaders.

        Raises:
            CheckpointError: the record is of loaders of other kinds.
        """
        if record.kinds and record.kinds != self.kinds:
            before, now = (" and ".join(DESCRIBED.get(kind, kind) for kind in kinds) or "no loader"
                           for kinds in (record.kinds, self.kinds))  # fmt: skip
            raise CheckpointError(
                f"the checkpoint was saved while training read {before}, and this run has {now}: where it stood in the "
                "data cannot be found. Give the same kinds of train loaders as before."
            )

    def replay(self, draws: Sequence[Callable[[], Any]]) -> None:
        """Throw away what was consumed, batch by batch over all loaders that have to be drawn again."""
        drawn = [i for i, count in enumerate(self._again) if count]
        for i in drawn:
            self.positions[i].first()
        with SkipProgress(max(self._again, default=0), self._rng) as progress:
            for number in progress:
                for i in drawn:
                    batch = draws[i]()
                    if is_compared(number + 1) and batch is not None:
                        self.positions[i].seen(batch, number + 1)
        self._in_turn = progress.in_turn
        if self._fetch:
            rng.restore(rng.decode(self._fetch))

    def settle(self) -> None:
        """The resumed run is at its boundary."""
        for position in self.positions:
            position.settle(self._in_turn)

    def _restart(self, consumed: int) -> None:
        self._count, self._before, self._old, self._in_turn = consumed, {}, True, False
        self._again, self._untouched, self._fetch, self._looks = [], [], b"", 2

    def _any_live(self) -> bool:
        return any(position.live for position in self.positions)

    def before_fetch(self) -> bool:
        """A batch is about to be fetched.

        Returns:
            Whether `fetched` wants it.
        """
        if not (self.watching or self.ahead):
            return False
        index = self._count
        self._count += 1
        self._untouched = []
        if index == 0:
            for position in self.positions:
                position.first()
        if (self.ahead or self._live) and index not in self._before:
            self._note(index)
        return is_compared(self._count)

    def fetched(self, batches: Sequence[Any]) -> None:
        """What was fetched last of each loader, as the loaders gave it; None where it is not known."""
        for position, batch in zip(self.positions, batches, strict=True):
            if batch is not None:
                position.seen(batch, self._count)

    # -- recording ----------------------------------------------------------------------------------------

    def record(self, consumed: int) -> bytes:
        """The encoded position after `consumed` batches of this epoch. A microsecond where nothing has changed."""
        for position in self.positions:
            if position.changed:
                position.changed = False
                self._old = True
        if self._old:
            self._starts = msgspec.msgpack.encode([position.start for position in self.positions])
        if self._looks:  # some make their generators for the first batch
            self._looks, self._live = self._looks - 1, self._any_live()
        dynamic = self.ahead or self._live
        consumed -= self.before
        if dynamic and consumed not in self._before:
            self._note(consumed)
        if self._old or dynamic:
            self._old = False
            states, fetch = self._before.get(consumed, _NOTHING)
            states = states or [b""] * len(self.kinds)
            head = EpochRecord(kinds=self.kinds, states=states, fetch=fetch, data=self._data, made=self._made)
            head.before = self.before
            self._encoded = encode_epoch(head, self._starts)
        return self._encoded

    def _note(self, index: int) -> None:
        """Remember what stands before batch `index` is fetched."""
        states = [position.state() for position in self.positions] if self._live else []
        self._before[index] = states, self._rng.snapshot() if self.ahead else b""
        self._before.pop(index - _KEEP, None)

    def close(self) -> None:
        """Remove everything from the loaders. Idempotent."""
        for loader in self.loaders:
            untrack_sampler(loader)
