"""The state of a MindSpore training, as known from its callbacks and the counters in the graph."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from lastgasp.adapter import RankStatus
from lastgasp.adapter import clock as _clock
from lastgasp_mindformers.aux_state import AuxRecorder, Numbers
from lastgasp_mindformers.frozen import Frozen

log = logging.getLogger("lastgasp")

SETTLE = 0.05
"""Seconds that a rank in the graph gets to complete a step whose gradients it may have already."""
PATIENCE = 0.8
"""Of `finish_timeout`: how long to wait for a graph whose ranks are all still running."""
_SILENT_STEPS = 8


class Counters(Protocol):
    """Shows from any thread how far the graph is (`gate.UpdateGate`)."""

    seen: bool
    """The counters are known to move."""

    def read(self) -> tuple[int, int]:
        """Updates begun and ended."""

    def undo(self) -> None:
        """Put the optimizer back as it was."""


class MindSporeState:
    """Order: the gate before the graph is compiled; `begin`; per step `step_begin` and `step_end` on the training
    thread; `settle` when it raised. `look` is the control thread's.

    Attributes:
        keep: copies a step that the training thread has completed, with its auxiliary state, before that is told.

    Args:
        gate: the counters in the graph; None where there are none.
        aux: captures the auxiliary state.
        status: the status word of this rank.
        before_update: called before the graph of a step; may raise, and then it does not run.
        step_completed: called as soon as a step is complete and captured.
        finish: seconds that a rank gets to leave its update.
        readable: whether another thread can read parameters while the graph runs: on a CPU; not on a device whose
            stream waits for a collective.
    """

    def __init__(
        self,
        gate: Counters | None,
        aux: AuxRecorder,
        status: RankStatus,
        *,
        before_update: Callable[[], None],
        step_completed: Callable[[int], None],
        finish: float,
        readable: bool = True,
    ) -> None:
        self.gate, self.aux = gate, aux
        self.frozen = Frozen(aux.frozen if gate is not None and readable else {}, aux.accumulated, aux.still)
        self._status, self._finish, self._readable = status, finish, readable
        self._before_update, self._step_completed = before_update, step_completed
        self._done = threading.RLock()
        self._base = 0
        self._in_graph = self._saving = self._taken = False
        self._next = self.numbers = Numbers(step=0, epoch=1, within=0)
        self._silent, self._rejected = 0, ""
        self.keep: Callable[[Numbers, bytes], None] | None = None

    # -- training thread --------------------------------------------------------------------------

    def begin(self, numbers: Numbers) -> None:
        """Training starts or resumes with these steps completed."""
        self.numbers = numbers
        self._base = self._ended()
        self.aux.capture(numbers)
        self._status.look = self.look

    def step_begin(self, coming: Numbers) -> None:
        """The graph of the step that makes `coming` is next.

        Raises:
            Released: a recovery took place; it must not run.
        """
        self._next = coming
        self._in_graph = True  # before the gate is checked: whoever closes it afterwards must see this
        try:
            self._before_update()
        except BaseException:
            self._in_graph = False
            raise
        self._status.inside = False

    def step_end(self, numbers: Numbers, saves: bool = False) -> None:
        """The graph has returned, and everything in it has happened.

        Args:
            saves: the framework's own callbacks are next, and one of them may save this step. A gasp of the same step
                has the same name: it waits for `others_end`, or MindSpore would remove its files, or put its own in
                their place, under a manifest that does not fit them.

        Raises:
            Released: a gasp of this step, or of the one before, has begun.
        """
        with self._done:
            self._complete(numbers, self.keep)
            self._in_graph, self._saving = False, saves and not self._taken
        self.stop_if_taken(saves)

    def capture_again(self) -> None:
        """Other callbacks have seen the end of the step: what they have changed and drawn is part of it."""
        with self._done:
            self.aux.capture(self.numbers)

    def others_begin(self) -> None:
        """As `step_end` with `saves`, once more when training has ended. Raises Released."""
        with self._done:
            self._saving = not self._taken
        self.stop_if_taken(True)

    def stop_if_taken(self, saves: bool) -> None:
        """Wait if `look` has reported a state as complete that this thread was still working on.

        Raises:
            Released: the recovery is over.
        """
        if self._taken:
            self._before_update()
            self._taken, self._saving = False, saves  # ordered to complete the next step
            self._status.inside = False

    def others_end(self) -> None:
        """They are over, or one of them has raised."""
        self._saving = False

    def reject(self) -> None:
        """The framework wants the step that has just ended to be done again: it must not be saved."""
        self._rejected = f"step {self.numbers.step} is to be done again"

    def settle(self) -> str:
        """The training thread has raised: why the state is not that of a complete step; empty if it is."""
        if not self._in_graph:
            return self._rejected
        counters = self._counters()
        if counters is None:
            return "raised inside the step, and it is unknown whether its update had begun"
        began, ended = counters
        if began != ended:
            return "raised inside the update, so the state is between two steps"
        if ended != self._base:
            self._complete(self._next)
        self._in_graph = self._status.inside = False
        return ""

    def _complete(self, numbers: Numbers, keep: Callable[[Numbers, bytes], None] | None = None) -> None:
        with self._done:
            if numbers.step <= self.numbers.step:
                return
            ended = self._ended()
            self._notice(ended)
            self.aux.capture(numbers, *([partial(keep, numbers)] if keep is not None else ()))
            self.numbers, self._base = numbers, ended  # in this order: `stands_on` reads them the other way round
            self._step_completed(numbers.step)

    def _notice(self, ended: int) -> None:
        """Warn once if the counters are in no graph: the network was compiled too early."""
        if self.gate is None or self.gate.seen:
            return
        self._silent += 1
        if self._silent == _SILENT_STEPS:
            log.warning(
                "the optimizer's counters do not move after %d steps: it was compiled before lastgasp was there, "
                "so a rank that is killed in the middle of a step costs that step; make LastGasp before Model.build",
                self._silent,
            )

    def _ended(self) -> int:
        return self.gate.read()[1] if self.gate is not None else 0

    # -- any thread -------------------------------------------------------------------------------

    def _counters(self) -> tuple[int, int] | None:
        """Updates begun and ended; None where that is unknown."""
        if self.gate is None or not self._readable:
            return None
        counters = self.gate.read()
        return counters if self.gate.seen else None

    def look(self) -> None:
        """Update the rank's status in a recovery. Called every millisecond, never waits."""
        if not self._done.acquire(blocking=False):
            self._status.unsettled = True  # the training thread completes its step in this moment
            return
        try:
            self._status.unsettled = not self._is_whole()
        finally:
            self._done.release()

    def _is_whole(self) -> bool:
        status = self._status
        waited = _clock.monotonic() - status.since  # in this recovery, and since the last order how far to go
        coming = self._next  # before the counters: the training thread may complete it, and reach the next one
        if status.at_gate:
            return True
        if not self._in_graph:
            self._taken = self._taken or (self._saving and waited >= self._finish * PATIENCE)
            return self._taken or not self._saving
        counters = self._counters()
        if counters is None or counters[0] != counters[1]:
            return False
        # It may never complete: a peer's gradients may be missing, or those of a collective after the update.
        if waited < (self._finish * PATIENCE if status.all_run else SETTLE):
            return False
        if counters[1] != self._base:
            self._complete(coming)
        self._taken = True
        return True

    def stands_on(self, step: int) -> str:
        """Why the parameters are not those of `step` right now; empty where they are.

        The training thread may complete a step between any two lines, so the step is looked at first and last.
        """
        base = self._base
        why = self._not_on(step)
        if why or not self._in_graph or self._status.at_gate:
            return why or self._not_on(step)
        counters = self._counters()
        if counters is None:
            return f"it is unknown whether the update after step {step} has begun"
        if counters != (base, base):
            return f"the update after step {step} has begun"
        return ""

    def ahead(self) -> str:
        """Why what was read in the graph of a step may be of that step already; empty where it is not."""
        if not self._in_graph or self._status.at_gate or self.numbers.step >= self._next.step:
            return ""
        changed = self.frozen.changed()
        return f"the graph may have changed {changed} already, which the optimizer does not train" if changed else ""

    def _not_on(self, step: int) -> str:
        current = self.numbers.step
        return "" if current == step else f"this rank is at step {current}, not at {step}"
