"""Loaders that Lightning Fabric has set up."""

from __future__ import annotations

import pickle
from typing import Any

from lastgasp.pytorch.position.generators import OwnGenerators
from lastgasp.pytorch.position.loaders import StreamPosition, makers
from lastgasp.pytorch.position.protocol import PassStart
from lastgasp.pytorch.position.registry import register_loader
from lastgasp.pytorch.rng import RngRecorder


class FabricPosition(StreamPosition):
    """A loader of `Fabric.setup_dataloaders`, which counts its passes, and has the sampler shuffle by that number.

    It is iterated again.
    """

    live = True

    def __init__(self, loader: Any, recorder: RngRecorder) -> None:
        super().__init__(loader, recorder)
        self._own = OwnGenerators(makers(loader._dataloader), recorder.used)
        self._number = 0

    def begin(self) -> None:
        """Remember the number of this pass, too."""
        super().begin()
        self.start.generators = []  # they are among its own
        self._number = self.loader._num_iter_calls
        self.start.counters = pickle.dumps(self._number)

    def resume(self, start: PassStart, state: bytes, consumed: int, over: bool = False) -> int | None:
        """Count as the loader did when the pass began, or when it was over."""
        number, own = pickle.loads(state) if state else (0, b"")
        self._number = pickle.loads(start.counters) if start.counters else number
        self.loader._num_iter_calls = self._number + over
        return super().resume(start, own, consumed, over)

    def state(self) -> bytes:
        """The number of this pass, and the generators."""
        return pickle.dumps((self._number, super().state()))


for _package in ("lightning.fabric", "lightning_fabric"):
    register_loader(f"{_package}.wrappers:_FabricDataLoader", FabricPosition)
