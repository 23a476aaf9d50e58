"""Whether a loop without `s.batches` draws its batches one step ahead, so that a resumed run has lost one."""

from __future__ import annotations

import logging

from lastgasp.pytorch.loop.run import Run

log = logging.getLogger("lastgasp")

_DRAWS = (
    "this loop draws random numbers between Session.open and its first step, and none before a later step: a batch "
    "that is drawn one step ahead, or something else. "
)

AHEAD = (
    f"{_DRAWS}A resumed run draws them anew, so that its batches or random numbers are not those that are due. Draw "
    "the batch of a step in that step, and all else before Session.open"
)
"""Said when such a loop begins."""

LOST = (
    f"{_DRAWS}It has drawn them anew, so that its batches or random numbers are not those that were due. Draw the "
    "batch of a step in that step, and all else before Session.open"
)
"""Note of a resumed run."""

_STEPS = 8
"""After so many steps that draw, each does."""


class DrawnAhead:
    """Compares the random state at the end of `Session.open`, and of steps, with that of the next forward pass.

    An evaluation in between may have drawn, too: nothing is known then.

    Args:
        run: has just begun.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._left = _STEPS
        self._look()

    def _look(self) -> None:
        self._before = self._run.recorder.snapshot_rng()
        self._run.marks.forward_begins = self._forward

    def _forward(self, training: bool) -> None:
        self._run.marks.forward_begins = _nothing
        drew = self._run.recorder.snapshot_rng() != self._before
        if self._left == _STEPS:
            self._left -= 1 if training and drew else _STEPS
        elif training and not drew:
            self._left = 0
            if self._run.resumed is not None:
                self._run.engine.note(LOST)
            elif self._run.rank == 0:
                log.warning(AHEAD)

    def step_over(self) -> None:
        """The loop has reported the end of a step."""
        if 0 < self._left < _STEPS and not self._run.book.gave:
            self._left -= 1
            self._look()


def _nothing(training: bool) -> None:
    """Nobody looks."""
