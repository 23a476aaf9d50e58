"""Where training stands in an `ElasticLoader`: the same for all ranks, whether their number has changed or not."""

from __future__ import annotations

from typing import Any

from lastgasp.errors import CheckpointError
from lastgasp.pytorch.position import ELASTIC, PassStart, register_loader
from lastgasp.pytorch.rng import RngRecorder


class ElasticPosition:
    """By the samples of the epoch that were used; implements `LoaderPosition`. Nothing is drawn again."""

    kind, live, inexact = ELASTIC, True, ""

    def __init__(self, loader: Any, recorder: RngRecorder) -> None:
        self._loader, self.start, self.changed = loader, PassStart(), True

    def begin(self) -> None:
        """The epoch begins."""
        self._loader.offset = 0

    def resume(self, start: PassStart, state: bytes, consumed: int, over: bool = False) -> int | None:
        """The loader begins behind those samples.

        Raises:
            CheckpointError: their number is not known.
        """
        if over:
            return None
        if consumed and not state:
            raise CheckpointError("a pass over an ElasticLoader in the body of another pass cannot be continued there")
        self._loader.offset = int.from_bytes(state, "little")
        return 0

    def first(self) -> None:
        """Nothing depends on it."""

    def seen(self, batch: Any, number: int) -> None:
        """Nothing is compared: each step has a digest."""

    def settle(self, in_turn: bool = False) -> None:
        """It stands there already."""

    def state(self) -> bytes:
        """How many samples of the epoch the steps so far have."""
        return int(self._loader.offset).to_bytes(8, "little")


register_loader("lastgasp.pytorch.elastic.loader:ElasticLoader", ElasticPosition)
