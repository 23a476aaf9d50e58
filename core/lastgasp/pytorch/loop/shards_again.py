"""A loop whose ranks hold shards of their own, entered again: each begins with its own part of a step, in its arena."""

from __future__ import annotations

from typing import Any

from lastgasp.gasp.again import Again
from lastgasp.pytorch.loop.again_here import LoopAgain
from lastgasp.pytorch.loop.held_parts import HeldParts
from lastgasp.pytorch.loop.parts_again import PartsAgain
from lastgasp.pytorch.sharded.flat import let_go


class ShardsAgain(PartsAgain, LoopAgain):
    """As `LoopAgain`, by the rule of `PartsAgain`."""

    def fill(self) -> bool:
        """As in the base."""
        held = self._held
        if held is None:
            return False
        before = self.before()
        assert before is None or isinstance(before, HeldParts)
        if self.kept is not None:  # as in a new process
            self.kept.enter(self.run.state, self.run.engine.note)
        self.run.shards.enter(held.again, before)
        return True

    def let_go(self, again: Again) -> list[Any]:
        """As in the base."""
        for model in self.run.state.modules.values():
            let_go(model)
        return super().let_go(again)
