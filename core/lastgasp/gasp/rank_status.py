"""The status of this rank: written by the training thread on every step, read by the control thread.

The hot path takes no lock. Under the GIL attribute stores are ordered, so the gate is Dekker's scheme: the
training thread first marks that it is inside its update and then checks whether the gate is closed; the
control thread first closes the gate and then checks whether the rank is inside.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lastgasp import _clock, exitcodes
from lastgasp.events import Ending
from lastgasp.ports import Repaired

from .again import Again
from .going_on import Fewer
from .messages import Phase, Release, one_line

log = logging.getLogger("lastgasp")

_CODES: dict[Ending, int] = {
    "saved": exitcodes.SAVED,
    "nothing_to_save": exitcodes.NOTHING_TO_SAVE,
    "gave_up": exitcodes.GAVE_UP,
    "in_place": exitcodes.GAVE_UP,
    "in_arenas": exitcodes.GAVE_UP,
    "open": exitcodes.GAVE_UP,
}


class Released(SystemExit):
    """Raised in the training thread at the update gate once a recovery is over: exit with this code."""

    def __init__(self, outcome: Release) -> None:
        super().__init__(exit_code(outcome))
        self.outcome = outcome


def describe(outcome: Release) -> str:
    """Describe an outcome in one line for people."""
    if outcome.ending == "saved":
        return f"step {outcome.step} saved to {outcome.path}; start the job again and it resumes from there"
    if outcome.ending == "nothing_to_save":
        return f"nothing to save: {outcome.reason}"
    return f"the step could NOT be saved: {outcome.reason}"


def exit_code(outcome: Release) -> int:
    """Return the documented exit code of an ending."""
    return _CODES[outcome.ending]


class RankStatus:
    """The status word of one rank.

    Attributes:
        step: the newest step that is completed and captured.
        begun: the newest step whose update this rank has begun: `step`, or the one that follows it.
        durable: the newest step that a committed checkpoint holds.
        inside: the state is between two steps (update begun, step not yet completed); set by the training thread.
        unsettled: it is, or may be, according to `look`. Ignored by the gate; only the control thread reads it.
        at_gate: the training thread waits at the closed gate; only `hold` and the end of the recovery let it continue.
        broken: why the state can never be saved again, empty while it can.
        phase, ticks: for the hang watchdog.
        paused: until this monotonic time the training thread waits by the leader's order, or enters its training
            again, which is no hang; 0: it does not.
        look: called by the control thread before it reads `step` and `consistent` in a recovery. An adapter whose steps
            cannot be stopped from Python (a compiled graph) updates `step` and `unsettled` there; must not wait.
        cannot_again: called by the control thread in a recovery: why the training cannot be entered again, or empty.
        doomed: as `cannot_again`, whatever the framework: what would end this process before long.
        ends: called by the control thread in a recovery: this rank's ends of its connections to other hosts.
        all_run: set by `hold`: no rank has stopped, so the training thread will reach the gate normally.
        since: monotonic time of the last call of `hold`.
        recovery: which faults may be answered in place, as `messages.Begin` says it; set before training begins.
        entered: False while the training is about to be entered again.
        from_files: entered again, it begins with the newest checkpoint (`messages.Begin`).
        free: called before the training thread hears that its training is entered again; what it returns is called
            on a thread of its own, and ends what that thread may wait for without end.
        may_go_on: the recovery in progress, if it is one, may be called off: ranks only stop for others to be taken in.
        cut_off: called when ranks are missing from now on whose hosts, with these addresses, may have vanished.
        fewer: whether it may be with fewer ranks then (`messages.Begin`).
        no_fewer: why it cannot, as training itself has shown since; empty where nothing has.
        asked_to_stop: SIGTERM came after it was agreed to enter the training again; the next session is to answer it.
        cut_short: the last step that this rank has not done to its end: it raised behind the update; -1: none.
        passing: the exception that ended the training may not come again in the same step.
    """

    def __init__(self) -> None:
        self.step = 0
        self.begun = 0
        self.durable = 0
        self.inside = self.unsettled = self.at_gate = False
        self.broken = ""
        self.phase: Phase = "start"
        self.ticks = 0
        self.paused = 0.0
        self.outcome: Release | None = None
        self.look: Callable[[], None] = _up_to_date
        self.cannot_again: Callable[[], str] = str
        self.doomed: Callable[[], str] = str
        self.ends: Callable[[], tuple[str, ...]] = tuple
        self.cut_off: Callable[[tuple[str, ...]], None] = lambda addresses: None
        self.free: Callable[[], Callable[[], None]] | None = None
        self.may_go_on = False
        self.all_run = False
        self.since = 0.0
        self.recovery, self.entered, self.passing, self.from_files = "", True, False, False
        self._held = self._at_end = self.asked_to_stop = False
        self.fewer, self.no_fewer, self.cut_short = Fewer(), "", -1
        self._gate = threading.Condition()
        self._over = threading.Event()
        self._limit = 0.0
        self._target = -1

    def found_rigid(self, why: str) -> None:
        """Training has shown why it cannot go on with fewer ranks."""
        self.no_fewer = why

    def beat(self) -> int:
        """`ticks`, for a heartbeat: they go on while the training thread is paused, or waits for a recovery."""
        if self.paused > _clock.monotonic() or self.waits:
            self.ticks += 1
        return self.ticks

    # -- training thread --------------------------------------------------------------------------

    def progress(self, phase: Phase) -> None:
        """Record progress of any kind."""
        self.phase = phase
        self.ticks += 1

    def before_update(self) -> None:
        """Announce that the parameters are about to change.

        Raises:
            Released: a recovery took place; the update must not happen.
        """
        if self.inside:
            return  # a further optimizer of the same step: the step can only be finished
        self.inside = True
        self.begun = self.step + 1
        if self._held and self.step >= self._target:
            self._wait_at_gate()

    def not_yet(self) -> None:
        """Take `before_update` back: the update still waits for a device, and nothing has changed."""
        with self._gate:
            self.inside, self.begun = False, self.step

    def between_steps(self) -> None:
        """Wait while a recovery is on: the training thread is about to write what that may be writing.

        Raises:
            Released: as `before_update`.
        """
        if self.closed and not self.inside:
            self.before_update()
            self.not_yet()

    def step_completed(self, step: int) -> None:
        """`step` is completed and captured."""
        self.step = step
        self.inside = False
        self.ticks += 1

    def _wait_at_gate(self) -> None:
        with self._gate:
            if self.step < self._target and self.outcome is None:
                return  # the target was raised meanwhile
            self.inside, self.begun, self.at_gate = False, self.step, True
            self._gate.wait_for(lambda: self._over.is_set() or not self.at_gate, self._limit)
            if not self.at_gate:
                return  # `hold` has already marked this rank as inside
            self.at_gate = False
        raise Released(self.outcome or given_up("no answer from the controller after the gate was closed"))

    # -- control thread ---------------------------------------------------------------------------

    def hold(self, limit: float, target: int = -1, all_run: bool = False) -> None:
        """Close the gate to updates beyond `target`; the training thread waits there for `limit` seconds at most.

        If it waits before the update that completes `target`, it continues, and is inside when this returns.
        """
        with self._gate:
            self._limit, self._target, self.all_run, self.since = limit, target, all_run, _clock.monotonic()
            self._held = True
            if self.at_gate and self.step < target and self.outcome is None:
                self.inside, self.begun, self.at_gate = True, self.step + 1, False
                self._gate.notify_all()

    def go_on(self) -> None:
        """What the gate was closed for was called off: train on. No effect once a recovery is over."""
        with self._gate:
            if self.outcome is not None:
                return
            self._held, self._target, self.all_run = False, -1, False
            if self.at_gate:
                self.inside, self.begun, self.at_gate = True, self.step + 1, False
            self._gate.notify_all()

    def look_again(self) -> str:
        """Update `step` and `consistent`; return the adapter's error, which leaves them unknown, or an empty string."""
        try:
            self.look()
        except BaseException as error:  # raised by the adapter; the calling threads must survive it
            return f"its state could not be looked at: {one_line(error)}"
        return ""

    def why_not_again(self) -> str:
        """Why its training cannot be entered again now; empty where it can, or may not in any case."""
        try:
            return self.cannot_again() or self.doomed()
        except Exception as error:  # raised by the adapter; the calling threads must survive it
            return f"it is not known whether it can be entered again: {one_line(error)}"

    def ends_of_connections(self) -> tuple[str, ...]:
        """What `ends` finds; nothing where it fails."""
        try:
            return self.ends()
        except Exception:
            log.debug("the connections of this process could not be looked at", exc_info=True)
            return ()

    @property
    def consistent(self) -> bool:
        """The state is that of `step`."""
        return not self.inside and not self.unsettled

    def close(self) -> None:
        """Close the gate for every update: what is reported about this rank from now on must stay true."""
        self._target = -1

    @property
    def closed(self) -> bool:
        """The next update would wait at the gate."""
        return self._held and self.step >= self._target

    @property
    def waits(self) -> bool:
        """The training thread waits at the gate, or at the end of its training, for a recovery to be over."""
        return self.at_gate or self._at_end

    @property
    def held(self) -> bool:
        """Whether a recovery is in progress or over."""
        return self._held

    def release(self, outcome: Release) -> None:
        """End the recovery; the first outcome counts."""
        with self._gate:
            if self.outcome is None:
                self.outcome = outcome
            self._held = True
            self._over.set()
            self._gate.notify_all()

    def renew(self) -> None:
        """The training was entered again: forget the recovery in place before. One that ends the job stays."""
        with self._gate:
            if self.outcome is not None and self.outcome.again is not None:
                self.outcome, self._held = None, False
                self._over.clear()

    def wait_held(self, seconds: float) -> Release | None:
        """As `wait_over`, but only as long as the gate is closed."""
        with self._gate:
            self._at_end = True
            self._gate.wait_for(lambda: self._over.is_set() or not self._held, seconds)
            self._at_end = False
        return self.outcome

    def wait_over(self, seconds: float) -> Release | None:
        """Wait for the outcome; None if it did not arrive in time."""
        self._over.wait(seconds)
        return self.outcome


def _up_to_date() -> None:
    """Default of `look`: the training thread itself keeps `step` and `inside` up to date."""


def gone_on(repaired: Repaired) -> Release:
    """The outcome of a recovery in place that another backend has led."""
    source = max(repaired.source, 0)  # below 0 all would begin with files
    again = Again(
        incarnation=repaired.number, step=repaired.step, source=source, takers=repaired.takers, lost=repaired.lost,
        port=0, members=repaired.members,
    )  # fmt: skip
    return Release(recovery=0, ending="in_place", step=repaired.step, path="", reason="", again=again)


def given_up(reason: str) -> Release:
    """The outcome of a rank that ends the recovery without the controller."""
    return Release(recovery=0, ending="gave_up", step=-1, path="", reason=reason)
