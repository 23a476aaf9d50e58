"""A fit of which each rank holds a part, entered again: each begins with its own part of a step, from its arena."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lastgasp.adapter import ManifestWriter, NotSaveable
from lastgasp.adapter.again import Again, Memory, PartsAgain
from lastgasp.adapter.arenas import Arena
from lastgasp.adapter.sharded import HeldShards, let_go
from lastgasp_lightning.again import LightningAgain, gasp_path
from lastgasp_lightning.checkpoint_io import SHARDED
from lastgasp_lightning.leaving import Restored
from lastgasp_lightning.sharded import META, OWN

_MORE = "more"


class HeldFit(HeldShards):
    """What a rank holds of a step while its fit is entered again.

    Args:
        arena, writer, config: as of `HeldShards`.
        fit: number of the fit in its script.
        more: all that a checkpoint has besides tensors (`Leaving.dumped`).
    """

    layout = SHARDED

    def __init__(self, arena: Arena, writer: ManifestWriter, config: Any, fit: int, more: bytes) -> None:
        super().__init__(arena, writer, config)
        self._fit, self.more = fit, more

    def target(self, step: int) -> Path:
        """As of any gasp of this fit."""
        return gasp_path(self.config.directory, step, self._fit)

    def kept(self, step: int) -> Restored:
        """The small state that was dumped."""
        return Restored.of(step, self.more, {})

    def dump_small(self, kept: Restored) -> dict[str, Any]:
        """Nothing more than that."""
        return {}

    def beside(self, kept: Restored, small: dict[str, Any], aux: Any) -> dict[str, Any]:
        """As of `LightningShards`."""
        checkpoint, record = kept.files(aux)
        return {META: checkpoint, OWN: record}


class LightningPartsAgain(PartsAgain, LightningAgain):
    """As `LightningAgain`, by the rule of `PartsAgain`. What is no tensor goes from a survivor to all new processes."""

    values_of = 2

    def restores(self, selector: Any) -> None:
        """As in the base."""
        selector.entered = self.enter

    def enter(self, load: Callable[[dict[str, Any]], None]) -> frozenset[str] | None:
        """Begin with what was held. All ranks call it together.

        Args:
            load: has Lightning restore from its checkpoint but for tensors.

        Returns:
            The manifests that were there when training began.
        """
        assert self._held is not None
        before, memory = self.before(), self.received()
        assert before is None or isinstance(before, HeldFit)
        present: frozenset[str] | None = self.run.shards.enter(
            load, self._held.again, before, memory.checkpoint[_MORE]
        )
        return present

    def before_dump(self, step: int) -> None:
        """As in the base.

        Raises:
            NotSaveable: plain values cannot be those of that step.
        """
        values = self.steps
        found = values.of(step) if values is not None else None
        if values is not None and (why := found.cannot() if found is not None else f"those of step {step} are gone"):
            raise NotSaveable(f"plain values of the module and of callbacks: {why}")
        super().before_dump(step)

    def beside(self, again: Again, held: Any) -> Memory:
        """Lightning's checkpoint without tensors, and plain values."""
        run = self.run
        durable = again.step if again.saved else run.life.session.status.durable
        # As in the base: another rank than `source` may have to give them.
        values = self.values(gives=bool(again.takers) and run.place.rank == again.source)
        return Memory(again.step, {_MORE: held.more}, durable, held.present, values)

    def let_go(self, again: Again) -> list[Any]:
        """As in the base; FSDP1's wrapper goes at once, as it holds parts."""
        let_go(self.run.trainer.strategy.model)
        super().let_go(again)
        return []
