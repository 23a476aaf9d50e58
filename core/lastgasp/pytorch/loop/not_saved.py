"""What training changes beside the state of a custom loop: no checkpoint holds it, and each gasp is noted with it."""

from __future__ import annotations

from typing import Any

from lastgasp.pytorch.unsaved import Unsaved, UnsavedData, UnsavedOptimizers


class NotSaved:
    """That of one run: of its modules, its optimizers and what gives its data.

    Args:
        state: the user's, filled.
    """

    def __init__(self, state: Any) -> None:
        modules = state.container if state.engine is None else state.engine.module  # an engine's own counters are saved
        self._modules, self._data = Unsaved(modules), UnsavedData()
        self._optimizers = UnsavedOptimizers(state.optimizers.values(), sharded=state.sharded)
        self._loaders: list[object] = []

    def takes(self, loader: object) -> None:
        """A pass over `loader` begins; what begins behind the first step (an evaluation) is not looked at."""
        if self._data.new:
            self._loaders.append(loader)

    def step_over(self) -> None:
        """A step is complete; behind the first one data are as training begins with them."""
        if self._data.new:
            self._data.look_at(self._loaders)
            self._loaders.clear()

    def notes(self) -> list[str]:
        """What a resumed run lacks. Any thread may ask."""
        return [note for note in (self._modules.note(), self._data.note(), self._optimizers.note()) if note]
