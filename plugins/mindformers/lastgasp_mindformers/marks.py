"""Marks of the loop: steps and the time between them, unless MindFormers marks them itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lastgasp.adapter import Session
from lastgasp.adapter.marks import no_mark, no_step


class LoopMarks:
    """Marks `dataloader` from the end of a step to the begin of the next, and each step with the fetch of its data.

    With libmspti preloaded MindFormers' MFLossMonitor marks the steps and MindSpore the data loader and its saves
    (docs/facts/mindformers.md §6); lastgasp's marks would then be a second series.

    Args:
        session: of this rank.
    """

    def __init__(self, session: Session) -> None:
        self._step, self._data = session.step, session.mark("dataloader")
        self._open = False
        self._coming = -1

    def begin(self, callbacks: Sequence[Any]) -> None:
        """Training starts."""
        if marked_elsewhere(callbacks, os.environ.get("LD_PRELOAD", "")):
            self._step, self._data = no_step, no_mark("dataloader")
        self._enter()

    def step_begin(self, number: int) -> None:
        """The data is there."""
        self._leave()
        if number != self._coming:  # the first one, or one after a gap
            self._coming = number
            self._step(number)

    def step_end(self) -> None:
        """The next batch, and with it the next step, begins; one that never ends is not written."""
        self._coming += 1
        self._step(self._coming)
        self._enter()

    def _enter(self) -> None:
        if not self._open:
            self._open = True
            self._data.__enter__()

    def _leave(self) -> None:
        if self._open:
            self._open = False
            self._data.__exit__(None, None, None)


def marked_elsewhere(callbacks: Sequence[Any], preloaded: str) -> bool:
    """MindFormers marks the steps of this training."""
    return "libmspti.so" in preloaded and any(type(callback).__name__ == "MFLossMonitor" for callback in callbacks)
