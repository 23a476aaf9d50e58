"""Where this rank stands: written by the training thread on every step, read by the control thread.

The hot path takes no lock. Under the GIL attribute stores are ordered, so the gate is Dekker's scheme: the
training thread first says that it is inside its update and then looks whether it is held; the control
thread first holds and then looks whether the rank is inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lastgasp import _clock, exitcodes
from lastgasp.events import Ending

from .messages import Phase, Release, one_line

_CODES: dict[Ending, int] = {
    "saved": exitcodes.SAVED,
    "nothing_to_save": exitcodes.NOTHING_TO_SAVE,
    "gave_up": exitcodes.GAVE_UP,
    "open": exitcodes.GAVE_UP,
}


class Released(SystemExit):
    """Raised in the training thread at the update gate once a recovery is over: leave with this code."""

    def __init__(self, outcome: Release) -> None:
        super().__init__(exit_code(outcome))
        self.outcome = outcome


def exit_code(outcome: Release) -> int:
    """The documented exit code of an ending."""
    return _CODES[outcome.ending]


class RankStatus:
    """The status word of one rank.

    Attributes:
        step: the newest step that is completed and captured.
        begun: the newest step whose update this rank has begun: `step`, or the one that follows it.
        durable: the newest step that a committed checkpoint holds.
        inside: the state is between two steps (update begun, step not yet ended), as the training thread says.
        unsettled: it is, or may be, as `look` says. The gate does not heed it, so that nobody passes it unseen.
        parked: the training thread waits at the closed gate; only `hold` and the end of the recovery let it go on.
        broken: why the state can never be saved again, empty while it can.
        phase, ticks: for the hang watchdog.
        look: called by the control thread before it reads `step` and `whole` in a recovery. An adapter whose steps
            run where Python cannot stand in their way (a compiled graph) brings `step` and `unsettled` up to date
            there; must not wait.
        all_run: said by `hold`: no rank has stopped, so the training thread will come to the gate by itself.
        since: when `hold` was last called, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.step = 0
        self.begun = 0
        self.durable = 0
        self.inside = self.unsettled = self.at_gate = False
        self.broken = ""
        self.phase: Phase = "start"
        self.ticks = 0
        self.outcome: Release | None = None
        self.look: Callable[[], None] = _up_to_date
        self.all_run = False
        self.since = 0.0
        self._held = False
        self._gate = threading.Condition()
        self._over = threading.Event()
        self._limit = 0.0
        self._target = -1

    # -- training thread --------------------------------------------------------------------------

    def progress(self, phase: Phase) -> None:
        """Any progress at all."""
        self.phase = phase
        self.ticks += 1

    def before_update(self) -> None:
        """The next thing is a change of parameters.

        Raises:
            Released: a recovery took place; the update must not happen.
        """
        if self.inside:
            return  # a further optimizer of the same step: the step can only be finished
        self.inside = True
        self.begun = self.step + 1
        if self._held and self.step >= self._target:
            self._wait_at_gate()

    def step_completed(self, step: int) -> None:
        """`step` is completed and captured."""
        self.step = step
        self.inside = False
        self.ticks += 1

    def _wait_at_gate(self) -> None:
        with self._gate:
            if self.step < self._target and self.outcome is None:
                return  # the target was moved meanwhile
            self.inside, self.begun, self.at_gate = False, self.step, True
            self._gate.wait_for(lambda: self._over.is_set() or not self.at_gate, self._limit)
            if not self.at_gate:
                return  # `hold` has said already that this rank is inside
            self.at_gate = False
        raise Released(self.outcome or given_up("no answer from the controller after the gate was closed"))

    # -- control thread ---------------------------------------------------------------------------

    def hold(self, limit: float, target: int = -1, all_run: bool = False) -> None:
        """Close the gate to updates beyond `target`; the training thread parks there for `limit` seconds at most.

        Where it is parked before the update that makes `target`, it goes on, and is inside when this returns.
        """
        with self._gate:
            self._limit, self._target, self.all_run, self.since = limit, target, all_run, _clock.monotonic()
            self._held = True
            if self.at_gate and self.step < target and self.outcome is None:
                self.inside, self.begun, self.at_gate = True, self.step + 1, False
                self._gate.notify_all()

    def look_again(self) -> str:
        """Bring `step` and `whole` up to date; what the adapter raised, which leaves them unknown, else empty."""
        try:
            self.look()
        except BaseException as error:  # the adapter's; the threads that ask must live
            return f"its state could not be looked at: {one_line(error)}"
        return ""

    @property
    def whole(self) -> bool:
        """The state is that of `step`."""
        return not self.inside and not self.unsettled

    def close(self) -> None:
        """Close a gate that is held for every update: what is said of this rank from now on must stay true."""
        self._target = -1

    @property
    def held(self) -> bool:
        """A recovery is on, or over."""
        return self._held

    def release(self, outcome: Release) -> None:
        """The recovery is over; the first outcome counts."""
        with self._gate:
            if self.outcome is None:
                self.outcome = outcome
            self._held = True
            self._over.set()
            self._gate.notify_all()

    def wait_over(self, seconds: float) -> Release | None:
        """The outcome, or None when it did not come in time."""
        self._over.wait(seconds)
        return self.outcome


def _up_to_date() -> None:
    """The training thread itself keeps `step` and `inside` up to date."""


def given_up(reason: str) -> Release:
    """An outcome for a rank that has to end the recovery by itself."""
    return Release(recovery=0, ending="gave_up", step=-1, path="", reason=reason)
