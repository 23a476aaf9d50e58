"""The position in the training data: recorded at every boundary, restored so that nothing repeats or is skipped.

`lastgasp.pytorch.position` knows the loaders; this module knows when Lightning makes and iterates them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lastgasp.adapter.torch import (
    STATEFUL,
    EpochPosition,
    EpochRecord,
    PassStart,
    decode_epoch,
    is_epoch_record,
    rng,
)
from lastgasp_lightning.compat import Undo, replace_method
from lastgasp_lightning.elastic import ElasticSteps
from lastgasp_lightning.thisfit import ThisFit


class DataPosition:
    """The position of one fit loop. Install before the loaders are made (`setup`).

    `record(k)` returns the encoded position after `k` batches of the epoch; the same object as long as nothing
    changed. `resume(data, epoch, k)` is called before the loaders are made.

    Attributes:
        elastic: what is to be done for an `ElasticLoader`, if there is one.
        anew: the loaders of the epoch that is continued are of other data now.
    """

    def __init__(self, trainer: Any, devices: Any = (), fit: ThisFit | None = None) -> None:
        self._trainer, self._fit, self.elastic = trainer, fit, ElasticSteps(trainer)
        self._rng = rng.RngRecorder(devices)
        self._combined: Any = None
        self._epoch = EpochPosition([], self._rng)
        self._made, self.anew, self._continued = b"", False, False
        self._undo: list[Undo] = []
        self._pending: tuple[EpochRecord, int, int] | None = None
        # The loaders may be made, and iterated, more than once before the boundary.
        self._kept: tuple[EpochRecord, int, int] | None = None
        self.record = self._epoch.record

    # -- life cycle ---------------------------------------------------------------------------------------

    def install(self) -> None:
        """Observe the loaders that the fit loop will make. Idempotent."""
        if not self._undo:
            fit = self._trainer.fit_loop
            self._undo = [
                replace_method(fit, "_load_combined_loader_states", self._wrap_load),
                replace_method(fit._data_source, "dataloader", self._wrap_making),
                replace_method(fit.epoch_loop, "on_run_start", self._wrap_beginning),
            ]

    def uninstall(self) -> None:
        """Undo everything. Idempotent."""
        while self._undo:
            self._undo.pop()()
        self._release()
        self.elastic.release()

    def resume(self, data: bytes, epoch: int, consumed: int) -> None:
        """The first epoch of this run continues epoch `epoch` after `consumed` batches.

        Args:
            data: what `record` returned; empty when nothing is known but the count.

        Raises:
            CheckpointError: the record cannot be read.
        """
        self._pending = self._kept = decoded(data), epoch, consumed

    def _wrap_load(self, original: Callable[[], None]) -> Callable[[], None]:
        def load() -> None:
            if self._pending is None:
                original()
            self._prepare(self._trainer.fit_loop._combined_loader)

        return load

    def _wrap_beginning(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def on_run_start(fetcher: Any) -> None:
            original(fetcher)
            if not self._continued:  # of a checkpoint that is not ours Lightning counts on, and begins with the data
                self._epoch.before = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready

        return on_run_start

    def _wrap_making(self, original: Callable[[], Any]) -> Callable[[], Any]:
        def dataloader() -> Any:
            self._pending = self._pending or self._kept
            # where it is called in each epoch it may draw the epoch's data: in a resume the same ones once more
            if self._trainer.reload_dataloaders_every_n_epochs:
                made = self._pending[0].made if self._pending is not None else b""
                if made:
                    rng.restore(rng.decode(made))
                self._made = made or self._rng.snapshot()
            return original()

        return dataloader

    def _prepare(self, combined: Any) -> None:
        self.elastic.adopt(combined.flattened)
        self._release()
        loaders = combined.flattened
        saved = self._pending[0].data if self._pending is not None else ""
        digest = self._fit.look_at_data(loaders, saved) if self._fit is not None else ""
        self._epoch = EpochPosition(loaders, self._rng, digest, self._made)
        self.anew = bool(saved) and digest != saved
        self.record = self._epoch.record
        # Lightning fetches one batch ahead if it cannot know the length
        unsized = any(sized_len(loader) is None for loader in loaders)
        watching = unsized or self._epoch.watching
        combined.__class__ = _tracked_class(type(combined), watching)
        combined.lastgasp_position = self
        self._combined = combined
        if self._pending is not None:
            self._epoch.require(self._pending[0])
            for loader in loaders:
                _set_sampler_epoch(loader, self._pending[1])

    def _release(self) -> None:
        combined, self._combined = self._combined, None
        if combined is not None:
            self._epoch.close()
            combined.__class__ = type(combined).__mro__[1]
            del combined.lastgasp_position

    @property
    def loaders(self) -> list[Any]:
        """Those of the epoch."""
        return self._epoch.loaders

    @property
    def inexact(self) -> str:
        """Why a resume in the middle of an epoch is not exact; empty if no reason is known."""
        return self._epoch.inexact

    # -- recording ----------------------------------------------------------------------------------------

    def stateful_states(self, data: bytes) -> list[dict[str, Any]]:
        """The states in `data`, as Lightning itself saves them (`combined_loader`)."""
        record = decoded(data)
        return [pickle.loads(s) for kind, s in zip(record.kinds, record.states, strict=True) if kind == STATEFUL and s]

    # -- called by the tracked CombinedLoader --------------------------------------------------------------

    def start(self, combined: Any, begin: Callable[[], Any]) -> Any:
        """`iter(combined)`: an epoch begins, or is continued."""
        pending, self._pending = self._pending, None
        self._continued = pending is not None
        self.elastic.epoch_begins(pending[1] if pending else self._trainer.fit_loop.epoch_progress.current.processed)
        if pending is not None:
            return self._continue(combined, begin, pending[0], pending[2])
        self._epoch.begin()
        out = begin()
        self._epoch.ahead = sized_len(combined) is None
        return out

    def fetch(self, draw: Callable[[Any], Any], combined: Any) -> Any:
        """`next(combined)`."""
        wanted = self._epoch.before_fetch()
        out = draw(combined)
        if wanted:
            self._epoch.fetched(_parts(combined, out[0]))
        return out

    # -- resuming -----------------------------------------------------------------------------------------

    def _continue(self, combined: Any, begin: Callable[[], Any], record: EpochRecord, consumed: int) -> Any:
        self._epoch.resume(record, consumed)
        out = begin()
        self._epoch.ahead = sized_len(combined) is None
        iterator = combined._iterator
        flags = getattr(iterator, "_consumed", None)
        self._epoch.replay([partial(_draw, iterator, i, flags) for i in range(len(self._epoch.loaders))])
        for i, start in enumerate(record.starts):
            if flags is not None and start.start.get("base"):
                flags[i] = True
        iterator._idx = consumed - record.before
        return out

    def settle(self) -> None:
        """Call when the resumed run is at its boundary: samplers that drew nothing yet drop their part."""
        self._kept = None
        self._epoch.settle()


def decoded(data: bytes) -> EpochRecord:
    """A record as it is in a checkpoint; of none, an empty one.

    Raises:
        CheckpointError: it cannot be read.
    """
    if not data:
        return EpochRecord()
    if is_epoch_record(data):
        return decode_epoch(data)
    return _of_version_1(pickle.loads(data))


def _of_version_1(record: dict[str, Any]) -> EpochRecord:
    """Read lastgasp's older format: a pickled dict, with random states once for all streams."""
    rows, generators = record["loaders"], record.get("iter_generators", [])
    started = {"at_iter": record.get("iter", b""), "at_first": record.get("first", b"")}
    return EpochRecord(
        kinds=[row["kind"] for row in rows],
        states=[row["state"] or b"" for row in rows],
        fetch=record.get("fetch", b""),
        data=record.get("data", ""),
        starts=[
            PassStart(start=row["start"] or {}, generators=generators[i] if generators else [], **started)
            for i, row in enumerate(rows)
        ],
    )


def _parts(combined: Any, batch: Any) -> list[Any]:
    """What each loader gave for a batch; None if that cannot be determined from a nested collection of them."""
    loaders, count = combined.iterables, len(combined.flattened)
    if not isinstance(loaders, dict | list | tuple):
        return [batch]
    if type(batch) is not type(loaders) or len(batch) != count or combined._mode == "sequential":
        return [None] * count
    return list(batch.values() if isinstance(batch, dict) else batch)


def _draw(iterator: Any, index: int, flags: list[bool] | None) -> Any:
    """The next batch of one loader, as the mode of the CombinedLoader would consume it; None where it has no more."""
    try:
        return next(iterator.iterators[index])
    except StopIteration:
        if flags is None:
            return None
        flags[index] = True
        iterator.iterators[index] = iter(iterator.iterables[index])
        return next(iterator.iterators[index])


_classes: dict[tuple[type, bool], type] = {}


def _tracked_class(base: type, watching: bool) -> type:
    """A subclass of `base` that reports to `lastgasp_position`: `iter` and `next` look methods up on the type.

    Args:
        watching: each `next` as well, which has a cost per batch.
    """
    if (base, watching) not in _classes:
        _classes[base, watching] = _make_tracked(base, watching)
    return _classes[base, watching]


def _make_tracked(base: type, watching: bool) -> type:
    def __iter__(self: Any) -> Any:
        return self.lastgasp_position.start(self, lambda: base.__iter__(self))  # type: ignore[attr-defined]

    def __next__(self: Any) -> Any:
        return self.lastgasp_position.fetch(base.__next__, self)  # type: ignore[attr-defined]

    assert issubclass(base, CombinedLoader)
    return type(base.__name__, (base,), {"__iter__": __iter__, **({"__next__": __next__} if watching else {})})
