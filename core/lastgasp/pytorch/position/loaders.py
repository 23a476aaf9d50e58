"""What torch and Python have: map-style loaders, loaders with a state of their own, and everything else."""

from __future__ import annotations

import io
import logging
import pickle
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from lastgasp.pytorch import rng
from lastgasp.pytorch.position.compared import compared, those_of
from lastgasp.pytorch.position.generators import OWN, OwnGenerators
from lastgasp.pytorch.position.protocol import CHANGED, MAP, STATEFUL, STREAM, UNORDERED, WORKERS, PassStart
from lastgasp.pytorch.position.samplers import SamplerStart, index_sampler, loader_generators, track_sampler
from lastgasp.pytorch.statedigest import digest, leaves

log = logging.getLogger("lastgasp")


@runtime_checkable
class Stateful(Protocol):
    """Knows its own position."""

    def state_dict(self) -> Any:
        """That position."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Go there."""


def is_stateful(subject: Any) -> bool:
    """Whether a loader or a dataset has `state_dict` and `load_state_dict`."""
    return isinstance(subject, Stateful)


def is_map(loader: Any) -> bool:
    """Whether `loader` is a DataLoader over a map-style dataset, iterated as torch does it."""
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return bool(plain and loader._dataset_kind == _DatasetKind.Map)


class MapPosition:
    """A map-style DataLoader: its sampler is begun again under the random state of then, and skips what was consumed.

    No data is loaded for it. See `lastgasp.pytorch.position.samplers`.
    """

    kind = MAP

    def __init__(self, loader: Any, recorder: rng.RngRecorder) -> None:
        self._loader = loader
        self.track = track_sampler(loader, recorder)
        self._own = OwnGenerators(makers(loader), recorder.used)

    @property
    def live(self) -> bool:
        """Batches are made with generators that the user's objects hold."""
        return bool(self._own)

    @property
    def changed(self) -> bool:
        """`start` is another one."""
        return self.track.changed

    @changed.setter
    def changed(self, value: bool) -> None:
        self.track.changed = value

    @property
    def inexact(self) -> str:
        """By workers that draw random numbers, and by a sampler that does not repeat itself."""
        workers = getattr(self._loader, "num_workers", 0) > 0
        return unordered(self._loader) or self.track.inexact or (OWN if self._own.lost else WORKERS if workers else "")

    @property
    def start(self) -> PassStart:
        """How the sampler's iteration began."""
        return PassStart(start=self.track.start.as_dict())

    def begin(self) -> None:
        """A pass begins."""
        self._own.look()
        self.track.new_epoch()

    def resume(self, start: PassStart, state: bytes, consumed: int, over: bool = False) -> int | None:
        """The sampler skips; nothing is drawn from the loader."""
        if over:
            self._own.restore(state, unused=True)
            return None
        self.track.resume(SamplerStart(**start.start), consumed)
        if not self._loader.num_workers:  # they have drawn ahead
            self.track.skipped = lambda: self._own.restore(state)
        return 0

    def first(self) -> None:
        """The sampler itself notices."""

    def seen(self, batch: Any, number: int) -> None:
        """The sampler has seen its indices."""

    def settle(self, in_turn: bool = False) -> None:
        """Skip now, if nothing was drawn yet."""
        self.track.settle()

    def state(self) -> bytes:
        """Where the generators stand."""
        return self._own.states()


class StreamPosition:
    """Any iterable: it is iterated again under the random state of then, and what was consumed is thrown away.

    Exact where the loader gives the same again. One whose order depends on random numbers that are drawn in turn with
    the model's own does not; that batches are other ones is noticed.
    """

    kind: str = STREAM

    def __init__(self, loader: Any, recorder: rng.RngRecorder) -> None:
        self.loader, self._recorder = loader, recorder
        self.start, self.changed = PassStart(), True
        self.differs = self._later = self._again = False
        self._own = OwnGenerators(makers(loader) if type(self) is StreamPosition else [], recorder.used)

    @property
    def live(self) -> bool:
        """The loader, or what it makes its batches with, holds random generators."""
        return bool(self._own)

    @property
    def inexact(self) -> str:
        """By workers that live on from pass to pass, and by a loader that does not repeat itself."""
        workers = getattr(self.loader, "num_workers", 0) and getattr(self.loader, "persistent_workers", False)
        changed = CHANGED if self.differs or self._later else ""  # as batches out of order do
        return unordered(self.loader) or changed or (OWN if self._own.lost else WORKERS if workers else "")

    def begin(self) -> None:
        """Remember the random state."""
        self._own.look()
        states = [bytes(g.get_state().numpy()) for g in loader_generators(self.loader)]
        self.start, self.changed = PassStart(at_iter=self._recorder.snapshot(), generators=states), True
        self.start.own = self._own.states()
        self._again = self.differs = self._later = False

    def resume(self, start: PassStart, state: bytes, consumed: int, over: bool = False) -> int | None:
        """All consumed batches are to be drawn again."""
        if over:
            self._own.restore(state, unused=True)
            return None
        self.restore(start, consumed)
        self._again = consumed > 0
        return consumed

    def restore(self, start: PassStart, consumed: int) -> None:
        """Let the iteration begin under the random state under which that of `start` began."""
        self.start, self.changed = start, True
        self._again = self.differs = self._later = False
        start.digest, start.digests = start.digest if consumed else b"", those_of(start.digests, consumed)
        if start.at_iter:
            rng.restore(rng.decode(start.at_iter))
        generators = loader_generators(self.loader) if start.generators else []
        for generator, raw in zip(generators, start.generators, strict=True):
            generator.set_state(rng.as_tensor(raw))
        self._own.restore(start.own)

    def first(self) -> None:
        """Remember the random state, or restore it for what is drawn again."""
        if not self.start.at_first:
            self.start.at_first, self.changed = self._recorder.snapshot(), True
        elif self._again:
            rng.restore(rng.decode(self.start.at_first))

    def seen(self, batch: Any, number: int) -> None:
        """Remember a digest of it, or compare that of one that was drawn again."""
        same = compared(self.start, _digest(batch), number)
        self.changed = self.changed or same is None
        if same is False and self._again:
            self.differs, self._later = self.differs or number == 1, True

    def settle(self, in_turn: bool = False) -> None:
        """What was consumed is thrown away; where it has drawn random numbers, it may only be augmented otherwise."""
        self._again, self._later = False, self._later and not in_turn

    def state(self) -> bytes:
        """Where the generators stand."""
        return self._own.states()


class StatefulPosition(StreamPosition):
    """A loader with `state_dict` and `load_state_dict`, which knows its own position.

    It is iterated under the random state under which the pass began: some go forward by drawing again.
    """

    kind, live = STATEFUL, True
    _told = False

    def resume(self, start: PassStart, state: bytes, consumed: int, over: bool = False) -> int | None:
        """Load its state; where that is not known, draw again."""
        if not state:
            return super().resume(start, state, consumed, over)
        if not over:  # else no iteration begins here, and random state stays as it is
            self.restore(start, consumed)
        self.load(pickle.loads(state), over)
        return None if over else 0

    def load(self, state: Any, over: bool) -> None:
        """Give the loader its state."""
        self.loader.load_state_dict(state)

    @property
    def inexact(self) -> str:
        """What it does with its workers is its own affair."""
        return CHANGED if self.differs or self._later else ""

    def state(self) -> bytes:
        """Its state, encoded at once: a loader may give out its live state. Where it has none yet, it draws again."""
        try:
            return encoded(self.loader.state_dict())
        except Exception as error:  # a dataset of the user's may set in `__iter__` what it saves
            if not self._told:
                self._told = True
                why = f"{type(self.loader).__name__}.state_dict: {type(error).__name__}: {error}"
                log.warning("the data loader cannot say where it stands (%s): a resume would iterate it again", why)
            return b""


def unordered(loader: Any) -> str:
    """Why the first batches of a pass need not be those that were trained on; empty where they are."""
    plain = isinstance(loader, DataLoader) and loader.num_workers > 1
    return UNORDERED if plain and not getattr(loader, "in_order", True) else ""


def makers(loader: Any) -> list[Any]:
    """What the batches of `loader` are made with in this process."""
    if not isinstance(loader, DataLoader):
        return [loader]
    ours = [] if loader.num_workers else [loader.dataset, loader.collate_fn]
    return [index_sampler(loader), loader.generator, *ours]


def start_workers(loader: Any) -> None:
    """Start persistent workers, as they ran already where training had iterated this loader before.

    Their start takes a random number of the process, and only the first pass over the loader starts them: restore the
    random state behind it.
    """
    loader = getattr(loader, "base_dataloader", loader)  # accelerate's
    if isinstance(loader, DataLoader) and loader.num_workers and loader.persistent_workers and not runs_workers(loader):
        DataLoader.__iter__(loader)


def runs_workers(loader: Any) -> bool:
    """Whether this loader has started workers that live on."""
    return getattr(getattr(loader, "base_dataloader", loader), "_iterator", None) is not None


def encoded(state: Any) -> bytes:
    """`state` as `pickle.loads` reads it; tensors without torch's storages, whose pickling takes milliseconds."""
    out = io.BytesIO()
    pickler = pickle.Pickler(out)
    pickler.dispatch_table = {torch.Tensor: _reduced}
    pickler.dump(state)
    return out.getvalue()


def _reduced(tensor: torch.Tensor) -> Any:
    if tensor.device.type != "cpu" or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
    return rng.as_tensor, (bytes(tensor.numpy()),)  # the state of a generator


def _digest(batch: Any) -> bytes:
    """Of tensors and plain values in host memory: no device is waited for here."""
    try:
        host = [leaf for leaf in leaves(batch) if not isinstance(leaf, torch.Tensor) or leaf.device.type == "cpu"]
        return digest(host)
    except Exception:  # a user's own kind of tensor; nothing is compared then
        return b""
