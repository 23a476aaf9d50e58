"""What training changes beside the state of a custom loop: no checkpoint holds it, and each gasp is noted with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lastgasp.pytorch.held_gradients import HeldGradients
from lastgasp.pytorch.loop.kept_objects import KeptObjects
from lastgasp.pytorch.loop.parts import ddp_of, under_join
from lastgasp.pytorch.loop.unlike import AddedGroups, MadeBuffers
from lastgasp.pytorch.unsaved import (
    LeftGradients,
    Unsaved,
    UnsavedData,
    UnsavedOptimizers,
    note_on_hooks,
)

UNEVEN = (
    "under torch's Join ranks may be at different numbers of steps, each with an optimizer state of its own: a resume "
    "has that of one rank, and ranks may get batches again or miss some"
)


class NotSaved:
    """That of one run: of its modules, its optimizers and what gives its data.

    Args:
        state: the user's, filled.
        kept: of a training that may be entered again.
        note: reports what people must know (`Session.note`).
    """

    def __init__(
        self, state: Any, kept: KeptObjects | None = None, note: Callable[[str], object] | None = None
    ) -> None:
        modules = state.container if state.engine is None else state.engine.module  # an engine's own counters are saved
        self._modules, self._data = Unsaved(modules), UnsavedData()
        if kept is not None:
            kept.begun = self._modules.since(kept.begun, kept.same(state))
        self._optimizers = UnsavedOptimizers(state.optimizers.values(), state.containers, sharded=state.sharded)
        self._gradients = LeftGradients(modules, state.optimizers.values()) if state.engine is None else None
        trained = state.optimizers.values() if state.engine is None else ()
        self._held = HeldGradients(modules.named_parameters(), trained)
        self.backward_begins, self.remove = self._held.backward_begins, self._held.remove
        self._loaders: list[object] = []
        self._made = MadeBuffers(state.container) if state.engine is None else None
        self._added = AddedGroups(state.optimizers.values() if state.engine is None else ())
        self._note = note
        self._state = state
        self._hooks = note_on_hooks(map(ddp_of, state.models.values()))

    def takes(self, loader: object) -> None:
        """A pass over `loader` begins; what begins behind the first step (an evaluation) is not looked at."""
        if self._data.new:
            self._loaders.append(loader)

    def step_over(self) -> None:
        """A step is complete; behind the first one data are as training begins with them."""
        if self._gradients is not None:
            self._gradients.step_over()
        self._held.step_over()
        if self._note is not None and (added := self._added.new()):
            self._note(added)
        if self._data.new:
            self._data.look_at(self._loaders)
            self._loaders.clear()
            if self._note is not None and self._made is not None and (made := self._made.note()):
                self._note(made)

    def notes(self) -> list[str]:
        """What a resumed run lacks. Any thread may ask."""
        uneven = UNEVEN if under_join(self._state) else ""
        made = "" if self._made is None else self._made.note()
        left = "" if self._gradients is None else self._gradients.note()
        found = [self._modules.note(), self._data.note(), self._optimizers.note(), self._hooks, uneven, made, left]
        found += [self._added.note(), self._held.note()]
        return [note for note in found if note]
