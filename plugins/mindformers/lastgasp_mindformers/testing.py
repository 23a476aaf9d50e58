"""Faults inside a real MindSpore loop: fires `lastgasp.testing.faults` at each phase, where `LASTGASP_FAULT` asks.

data: before the gate of a step. forward: behind it, right before the graph runs. after_update: when the graph has
returned, before that is known to anybody. step_end: when the step counts. periodic_save: in MindSpore's
`save_checkpoint` on the training thread, when the file is written and not yet recorded. gasp_save: in the engine.
backward and update are inside the graph, where Python cannot fire; `forward` reaches the peers there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import mindspore

from lastgasp.adapter import Undo, replace_attribute
from lastgasp.adapter.hooks import holders_of
from lastgasp.adapter.testing import FaultKit, install, kit_from_env


class LoopFaults:
    """The faults of one training.

    Args:
        rank: this process's.

    Raises:
        ConfigError: `LASTGASP_FAULT` is malformed.
    """

    def __init__(self, rank: int) -> None:
        self._kit: FaultKit | None = kit_from_env()
        self._step = 0
        self._undo: list[Undo] = []
        if self._kit is not None:
            self._kit.rank = rank
            install(self._kit)
            self._undo = [lambda: install(None), *_watch_saves(self._in_save)]

    def fire(self, phase: str, step: int) -> None:
        """What is due in this phase of the step that turns `step` completed updates into one more."""
        self._step = step
        if self._kit is not None:
            self._kit.fire_at(phase, step)

    def _in_save(self) -> None:
        if self._kit is not None and threading.current_thread() is threading.main_thread():
            self._kit.fire_at("periodic_save", self._step + 1)

    def undo(self) -> None:
        """Disarm. Idempotent."""
        while self._undo:
            self._undo.pop()()


def _watch_saves(fire: Callable[[], None]) -> list[Undo]:
    """In each module that holds the function: MindFormers 1.6.0 has it by its own name, 1.9.0 through MindSpore's."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def saved(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            fire()
            return result

        return saved

    save = mindspore.save_checkpoint
    return [replace_attribute(module, name, make) for module, name in holders_of([save])[id(save)]]
