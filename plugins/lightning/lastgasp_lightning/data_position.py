"""The position in the training data: recorded at every boundary, restored so that nothing repeats or is skipped.

`lastgasp.pytorch.loaders` tells the three kinds of loader; each has its own way back.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lastgasp.pytorch import rng
from lastgasp.pytorch.data import (
    SamplerStart,
    SamplerTrack,
    loader_generators,
    track_sampler,
    untrack_sampler,
)
from lastgasp.pytorch.loaders import MAP, STATEFUL, STREAM, SkipProgress, kind_of
from lastgasp_lightning.compat import Undo, replace_method
from lastgasp_lightning.thisfit import ThisFit

_KEEP = 4


class DataPosition:
    """The position of one fit loop. Install before the loaders are made (`setup`).

    `record(k)` returns the encoded position after `k` batches of the epoch; the same object as long as nothing
    changed. `resume(data, epoch, k)` is called before the loaders are made.
    """

    def __init__(self, trainer: Any, devices: Any = (), fit: ThisFit | None = None) -> None:
        self._trainer, self._fit, self._digest = trainer, fit, ""
        self._rng = rng.RngRecorder(devices)
        self._combined: Any = None
        self._kinds: list[str] = []
        self._tracks: list[SamplerTrack | None] = []
        self._undo: list[Undo] = []
        self._pending: tuple[dict[str, Any], int, int] | None = None
        self._encoded = b""
        self._epoch_part: dict[str, Any] = {}
        self._fetched = 0
        self._before: dict[int, dict[str, Any]] = {}
        self._watching = self._changed = self._dynamic = self._unsized = False

    # -- life cycle ---------------------------------------------------------------------------------------

    def install(self) -> None:
        """Observe the loaders that the fit loop will make. Idempotent."""
        if not self._undo:
            undo = replace_method(self._trainer.fit_loop, "_load_combined_loader_states", self._wrap_load)
            self._undo.append(undo)

    def uninstall(self) -> None:
        """Undo everything. Idempotent."""
        while self._undo:
            self._undo.pop()()
        self._release()

    def resume(self, data: bytes, epoch: int, consumed: int) -> None:
        """The first epoch of this run continues epoch `epoch` after `consumed` batches.

        Args:
            data: what `record` returned; empty when nothing is known but the count.
        """
        self._pending = (pickle.loads(data) if data else {}, epoch, consumed)

    def _wrap_load(self, original: Callable[[], None]) -> Callable[[], None]:
        def load() -> None:
            if self._pending is None:
                original()
            self._prepare(self._trainer.fit_loop._combined_loader)

        return load

    def _prepare(self, combined: Any) -> None:
        self._release()
        self._combined = combined
        loaders = combined.flattened
        self._kinds = [kind_of(loader) for loader in loaders]
        self._tracks = [
            track_sampler(loader, self._rng) if kind == MAP else None
            for loader, kind in zip(loaders, self._kinds, strict=True)
        ]
        self._watching = any(kind != MAP for kind in self._kinds)
        combined.__class__ = _tracked_class(type(combined))
        combined.lastgasp_position = self
        if self._fit is not None:
            saved = self._pending[0].get("data", "") if self._pending is not None else ""
            self._digest = self._fit.look_at_data(loaders, saved)
        if self._pending is not None:
            self._restore_loaders(*self._pending)

    def _release(self) -> None:
        combined, self._combined = self._combined, None
        if combined is None:
            return
        for loader, kind in zip(combined.flattened, self._kinds, strict=True):
            if kind == MAP:
                untrack_sampler(loader)
        combined.__class__ = type(combined).__mro__[1]
        del combined.lastgasp_position

    @property
    def workers(self) -> bool:
        """Whether a loader whose samples are skipped by the sampler draws random numbers in processes of its own."""
        loaders = self._combined.flattened if self._combined is not None else []
        return any(
            kind == MAP and getattr(loader, "num_workers", 0) > 0
            for loader, kind in zip(loaders, self._kinds, strict=True)
        )

    # -- recording ----------------------------------------------------------------------------------------

    def record(self, consumed: int) -> bytes:
        """The encoded position after `consumed` batches of this epoch."""
        if self._dynamic and consumed not in self._before:
            self._note(consumed)
        for track in self._tracks:
            if track is not None and track.changed:
                track.changed = False
                self._changed = True
        if self._changed or self._dynamic:
            self._changed = False
            self._encoded = self._encode(consumed)
        return self._encoded

    def _encode(self, consumed: int) -> bytes:
        fetch = self._before.get(consumed, {})
        states = fetch.get("states", {})
        loaders = [
            {
                "kind": kind,
                "start": track.start.as_dict() if track is not None else None,
                "state": states.get(index),
            }
            for index, (kind, track) in enumerate(zip(self._kinds, self._tracks, strict=True))
        ]
        record = {"version": 1, "loaders": loaders, "data": self._digest, **self._epoch_part}
        if "rng" in fetch:
            record["fetch"] = fetch["rng"]
        return pickle.dumps(record)

    def _note(self, index: int) -> None:
        """Remember what stands before batch `index` is fetched."""
        note: dict[str, Any] = {}
        if self._unsized:
            note["rng"] = self._rng.snapshot()
        if STATEFUL in self._kinds:
            # encoded at once: a loader may give out its live state
            note["states"] = {
                i: pickle.dumps(loader.state_dict())
                for i, loader in enumerate(self._combined.flattened)
                if self._kinds[i] == STATEFUL
            }
        self._before[index] = note
        self._before.pop(index - _KEEP, None)

    def stateful_states(self, data: bytes) -> list[dict[str, Any]]:
        """The states in `data`, as Lightning itself saves them (`combined_loader`)."""
        loaders = pickle.loads(data).get("loaders", []) if data else []
        return [pickle.loads(row["state"]) for row in loaders if row["state"] is not None]

    # -- called by the tracked CombinedLoader --------------------------------------------------------------

    def start(self, combined: Any, begin: Callable[[], Any]) -> Any:
        """`iter(combined)`: an epoch begins, or is continued."""
        pending, self._pending = self._pending, None
        self._fetched = 0
        self._before = {}
        self._changed = True
        if pending is not None:
            return self._continue(combined, begin, *pending)
        for track in self._tracks:
            if track is not None:
                track.new_epoch()
        if STREAM in self._kinds:
            self._epoch_part = {"iter": self._rng.snapshot(), "iter_generators": self._generator_states()}
        return begin()

    def before_fetch(self) -> None:
        """A batch is about to be fetched."""
        if not self._watching:
            return
        index = self._fetched
        self._fetched += 1
        if index == 0:
            self._first_fetch()
        if self._dynamic and index not in self._before:
            self._note(index)

    def _measure(self) -> None:
        self._unsized = sized_len(self._combined) is None
        self._dynamic = STATEFUL in self._kinds or (STREAM in self._kinds and self._unsized)

    def _first_fetch(self) -> None:
        # Lightning fetches one batch ahead when it cannot know the length: then the state before the next
        # fetch is older than the boundary, and is recorded with each batch
        self._measure()
        if STREAM in self._kinds:
            self._epoch_part["first"] = self._rng.snapshot()
            self._changed = True

    # -- resuming -----------------------------------------------------------------------------------------

    def _restore_loaders(self, record: dict[str, Any], epoch: int, consumed: int) -> None:
        rows = record.get("loaders", [])
        if rows and [row["kind"] for row in rows] != self._kinds:
            raise ValueError(
                f"the checkpoint was taken with train loaders of kinds {[r['kind'] for r in rows]}, this run has "
                f"{self._kinds}: the data position cannot be restored. Give the same train loaders as before."
            )
        for index, loader in enumerate(self._combined.flattened):
            _set_sampler_epoch(loader, epoch)
            row = rows[index] if rows else {}
            track = self._tracks[index]
            if track is not None:
                track.resume(SamplerStart(**(row.get("start") or {})), consumed)
            elif row.get("state") is not None:
                loader.load_state_dict(pickle.loads(row["state"]))

    def _continue(self, combined: Any, begin: Callable[[], Any], record: dict[str, Any], _: int, k: int) -> Any:
        if record.get("iter"):
            rng.restore(rng.decode(record["iter"]))
            self._set_generators(record["iter_generators"])
        self._epoch_part = {name: record[name] for name in ("iter", "iter_generators", "first") if name in record}
        out = begin()
        iterator = combined._iterator
        streams = [i for i, kind in enumerate(self._kinds) if kind == STREAM]
        if record.get("first"):
            rng.restore(rng.decode(record["first"]))
        consumed_flags = getattr(iterator, "_consumed", None)
        with SkipProgress(k if streams else 0) as progress:
            for _batch in progress:
                for i in streams:
                    _drop_one(iterator, i, consumed_flags)
        self._mark_cycles(consumed_flags)
        iterator._idx = k
        if record.get("fetch"):
            rng.restore(rng.decode(record["fetch"]))
        self._fetched = k
        self._measure()
        return out

    def settle(self) -> None:
        """Call when the resumed run stands on its boundary: samplers that drew nothing yet drop their part."""
        for track in self._tracks:
            if track is not None:
                track.settle()

    def _mark_cycles(self, flags: list[bool] | None) -> None:
        for i, track in enumerate(self._tracks):
            if flags is not None and track is not None and track.start.base:
                flags[i] = True

    def _generator_states(self) -> list[list[bytes]]:
        return [
            [bytes(g.get_state().numpy()) for g in loader_generators(loader)] if kind == STREAM else []
            for loader, kind in zip(self._combined.flattened, self._kinds, strict=True)
        ]

    def _set_generators(self, states: list[list[bytes]]) -> None:
        for loader, raws in zip(self._combined.flattened, states, strict=True):
            for generator, raw in zip(loader_generators(loader) if raws else [], raws, strict=True):
                generator.set_state(rng.as_tensor(raw))


def _drop_one(iterator: Any, index: int, flags: list[bool] | None) -> None:
    """Throw away the next batch of one loader, as the mode of the CombinedLoader would consume it."""
    try:
        next(iterator.iterators[index])
    except StopIteration:
        if flags is None:
            return
        flags[index] = True
        iterator.iterators[index] = iter(iterator.iterables[index])
        next(iterator.iterators[index])


_classes: dict[type, type] = {}


def _tracked_class(base: type) -> type:
    """A subclass of `base` that reports to `lastgasp_position`: `iter` and `next` look methods up on the type."""
    if base not in _classes:

        def __iter__(self: Any) -> Any:
            return self.lastgasp_position.start(self, lambda: base.__iter__(self))  # type: ignore[attr-defined]

        def __next__(self: Any) -> Any:
            self.lastgasp_position.before_fetch()
            return base.__next__(self)  # type: ignore[attr-defined]

        assert issubclass(base, CombinedLoader)
        _classes[base] = type(base.__name__, (base,), {"__iter__": __iter__, "__next__": __next__})
    return _classes[base]
