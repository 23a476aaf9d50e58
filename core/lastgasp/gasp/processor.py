"""The rank's control thread: heartbeats, orders, SIGTERM; and the recovery alone when nobody leads."""

from __future__ import annotations

import logging
import math
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from lastgasp import _clock
from lastgasp.errors import LastgaspError, Moved
from lastgasp.events import Fault, FaultKind
from lastgasp.ports import SaveResult, StateSource

from . import messages as m
from .alone import capture_or_nothing
from .cards import WorkerCard
from .link import Link
from .signals import TermSignal
from .stand import Stand, given_up

log = logging.getLogger("lastgasp")

HEARTBEAT = 0.5
"""Seconds between two Status messages."""
LOOK = 0.001
"""Seconds between two looks at a training thread that must leave its update."""
REACH = 1.0
"""Seconds that a rank gets to complete a step that another one has completed already."""
PATIENCE = 0.8
"""Of `finish_timeout`: the same where no rank has stopped, so that it will come to that step's end by itself."""
ANSWER = 15.0
"""Seconds that the controller gets to answer a report; it answers in milliseconds, unless it is stopped."""

Alone = Callable[[Fault], m.Release]
"""Carry out the recovery without a controller; runs on a thread of its own."""

OnSwitch = Callable[[int, int], int]
"""Turn marks on and off (two masks of `steps.bits`); returns what is on now. With (0, 0) it only tells. Runs on the
control thread, so it must not wait."""


@dataclass
class _Pending:
    """A Prepare that waits for the training thread to leave its update."""

    recovery: int
    deadline: float
    target: int
    reach_by: float


class Processor:
    """One daemon thread per rank.

    Args:
        stand: the status word, shared with the training thread.
        source: where the state lives.
        link: the control connection, or None where this rank is on its own.
        term: SIGTERM, once the adapter has installed it.
        alone: what to do when there is no controller.
        after_release: called once when the outcome is known, on this thread.

    Attributes:
        on_switch: what carries out a switch of the marks; None (at first) where nothing is marked.
        led_elsewhere: who leads the recoveries of this job, where the controller does not: it is told each fault that
            this thread sees (SIGTERM), and must not wait.
    """

    def __init__(
        self,
        stand: Stand,
        source: StateSource,
        link: Link | None,
        alone: Alone,
        limits: tuple[float, float],
        after_release: Callable[[m.Release], None],
    ) -> None:
        self._stand, self._source, self._link, self._alone = stand, source, link, alone
        self._finish, self._save_limit = limits
        self._after_release = after_release
        self.term = TermSignal()
        self._poke_r, self._poke_w = socket.socketpair()
        self._closed = False
        self._reported: Fault | None = None
        self._raised = False
        self._target = -1
        self._answer_by = math.inf
        self._alone_begun = threading.Lock()
        self._pending: _Pending | None = None
        self._results: dict[int, SaveResult] = {}
        self._void: set[int] = set()
        self._gathers: dict[str, m.Gathered] = {}
        self._gathered = threading.Condition()
        self._next_beat = 0.0
        self.on_switch: OnSwitch | None = None
        self.led_elsewhere: Callable[[Fault], None] | None = None
        self._consulted: dict[int, m.Consulted] = {}
        self._left = False
        self._thread = threading.Thread(target=self._run, name="lastgasp-control", daemon=True)
        self._thread.start()

    # -- called by the training thread ------------------------------------------------------------

    @property
    def led(self) -> bool:
        """A controller is connected."""
        return self._link is not None

    def begin(self) -> None:
        """Tell where training begins; from now on this rank's death costs steps."""
        stand, box = self._stand, self._source.box
        self._try_send(m.Begin(step=stand.step, durable=stand.durable, box=box))

    def register(self, card: WorkerCard) -> None:
        """Tell who this worker is; of no effect where no controller is connected."""
        self._try_send(m.Register(card=card))

    def beat_now(self) -> None:
        """Send a Status with the next turn of the thread, not half a second later."""
        self._next_beat = 0.0
        self._poke_w.send(b"b")

    def report(self, fault: Fault) -> None:
        """Something went wrong on this rank: tell the controller, or act alone."""
        self._raised = self._raised or fault.kind != "sigterm"
        if self._stand.outcome is not None or self._reported is not None:
            return
        self._reported = fault
        if self.led_elsewhere is not None:
            self._try_send(m.Report(fault=fault))  # for the record
            self.led_elsewhere(fault)
        elif self._try_send(m.Report(fault=fault)):
            self._answer_by = _clock.monotonic() + ANSWER
        else:
            self._begin_alone(fault)

    def gather(self, tag: str, payload: bytes, seconds: float) -> m.Gathered | None:
        """Send a part and wait for the whole; None when it did not come in time or the link broke."""
        if not self._try_send(m.GatherPart(tag=tag, payload=payload)):
            return None
        with self._gathered:
            self._gathered.wait_for(lambda: tag in self._gathers or self._link is None, seconds)
            return self._gathers.pop(tag, None)

    def tell(self, message: m.Message) -> bool:
        """Say something that needs no answer; False where no controller is connected."""
        return self._try_send(message)

    def consult(self, step: int, saved: m.Saved | None, seconds: float) -> m.Consulted | None:
        """What the controller keeps of `step`, after it has kept `saved`; None when it does not answer in time."""
        with self._gathered:
            self._consulted.pop(step, None)
        if not self._try_send(m.Consult(step=step, saved=saved)):
            return None
        with self._gathered:
            self._gathered.wait_for(lambda: step in self._consulted or self._link is None, seconds)
            return self._consulted.pop(step, None)

    def goodbye(self) -> None:
        """Tell the controller that training ended, so that leaving is no fault; once."""
        if self._left or self._closed:
            return
        if self._stand.held:  # a peer failed behind the last step, and this rank may be the one that saves it
            self._stand.wait_over(self._finish + 2 * self._save_limit)
        self._left = True
        self._try_send(m.Goodbye())

    def close(self, goodbye: bool) -> None:
        """End the thread; `goodbye` tells the controller that this is no fault."""
        if self._closed:
            return
        if goodbye:
            self.goodbye()
        self._closed = True
        self._poke_w.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        if self._link is not None:
            self._link.close()
        self.term.uninstall()
        self.term.close()
        self._poke_r.close()
        self._poke_w.close()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._link is not None and self._link.unread:
            self._receive(self._link)  # a recovery is on, or over
        while not self._closed:
            link = self._link
            readable = self._wait(link)
            if self._closed:
                return
            if self._poke_r.fileno() in readable:
                self._poke_r.recv(4096)
            if self.term.fileno() in readable and self.term.came():
                self._terminate()
            if link is not None and link.fileno() in readable:
                self._receive(link)
            if not self._stand.held and _clock.monotonic() > self._answer_by:
                self._lose_controller(f"it has not answered in {ANSWER:g} s")
            self._answer_prepare()
            self._beat()

    def _wait(self, link: Link | None) -> set[int]:
        poll = select.poll()  # select() ends at descriptor 1023, and training jobs open more
        for end in (link, self.term, self._poke_r):
            if end is not None and (number := end.fileno()) >= 0:  # another thread may close it meanwhile
                poll.register(number, select.POLLIN)
        seconds = LOOK if self._pending else HEARTBEAT / 2
        return {ready for ready, _ in poll.poll(seconds * 1000)}

    def _receive(self, link: Link) -> None:
        try:
            messages = link.receive()
        except (OSError, EOFError, LastgaspError) as error:
            self._lose_controller(str(error))
            return
        for message in messages:
            self._obey(message)

    def _obey(self, message: m.FromController) -> None:
        if isinstance(message, m.Gathered):
            with self._gathered:
                self._gathers[message.tag] = message
                self._gathered.notify_all()
        elif isinstance(message, m.Consulted):
            with self._gathered:
                self._consulted[message.step] = message
                self._gathered.notify_all()
        elif isinstance(message, m.Prepare):
            self._hold(message)
            self._prepare(message.recovery, message.target)
        elif isinstance(message, m.Save):
            self._spawn("save", lambda: self._save(message))
        elif isinstance(message, m.Commit):
            self._spawn("commit", lambda: self._commit(message))
        elif isinstance(message, m.Discard):
            self._discard(message.plan)
        elif isinstance(message, m.Release):
            self.over(message)
        elif isinstance(message, m.SwitchOrder):
            self._switch(message)

    def _hold(self, order: m.Prepare) -> None:
        stand, all_run = self._stand, all(fault.kind == "sigterm" for fault in order.faults)
        stand.hold(self._finish + 2 * self._save_limit, order.target, all_run)
        self._target = order.target
        if all_run and stand.begun > max(order.target, stand.step):
            self._try_send(m.Entered(recovery=order.recovery, step=stand.begun))

    def _prepare(self, recovery: int, target: int) -> None:
        now, reach = _clock.monotonic(), self._finish * PATIENCE if self._stand.all_run else REACH
        self._pending = _Pending(recovery, now + self._finish, target, now + reach)

    def _switch(self, order: m.SwitchOrder) -> None:
        if self.on_switch is None:
            why = "nothing is marked on this rank, so nothing can be switched (LASTGASP_MARKS, marks=)"
            self._try_send(m.Switched(order=order.order, mask=-1, why=why))
            return
        try:
            answer = m.Switched(order=order.order, mask=self.on_switch(order.on, order.off))
        except Exception as error:  # this thread must live: it leads the recovery
            log.exception("the marks could not be switched")
            answer = m.Switched(order=order.order, mask=-1, why=m.one_line(error))
        self._try_send(answer)

    def _marks(self) -> int:
        try:
            return -1 if self.on_switch is None else self.on_switch(0, 0)
        except Exception:
            log.debug("the marks do not tell what is on", exc_info=True)
            return -1

    def _answer_prepare(self) -> None:
        pending, stand = self._pending, self._stand
        if pending is None:
            return
        stand.look()
        late = _clock.monotonic() >= pending.deadline
        if not stand.whole and not stand.broken and not late:
            return
        if stand.step < pending.target:
            # A thread that has raised will not complete another step.
            if self._raised or _clock.monotonic() >= pending.reach_by:
                pending.target = -1
                stand.close()  # and look again: what is told must stay true
            return
        self._pending = None
        why = stand.broken or ("" if stand.whole else f"still inside its update after {self._finish:g} s")
        small = b"" if why or self._on_controllers_host() else capture_or_nothing(self._source, stand.step)
        answer = m.Prepared(
            recovery=pending.recovery,
            step=stand.step,
            durable=stand.durable,
            usable=not why,
            why=why,
            small=small,
            target=self._target,
        )
        self._try_send(answer)

    def _on_controllers_host(self) -> bool:
        return self._link is not None and self._link.shares_host

    def _beat(self) -> None:
        now, _stand = _clock.monotonic(), self._stand
        if self._link is None or now < self._next_beat:
            return
        self._next_beat = now + HEARTBEAT
        self._try_send(self.status())

    def status(self) -> m.Status:
        """Where this rank stands."""
        stand = self._stand
        return m.Status(
            step=stand.step, durable=stand.durable, tick=stand.ticks, phase=stand.phase, marks=self._marks()
        )

    # -- saving -----------------------------------------------------------------------------------

    @staticmethod
    def _spawn(name: str, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=f"lastgasp-{name}", daemon=True).start()

    def _save(self, order: m.Save) -> None:
        try:
            result = self._source.save(order.step, order.small, order.reason)
        except Moved as moved:
            log.warning("%s", moved)
            self._prepare(order.recovery, order.step + 1)  # the controller asks everybody again when it hears this
            return
        except BaseException as error:  # a SystemExit of a user's hook, too: the controller must hear it
            log.exception("the save of step %d failed", order.step)
            self._try_send(m.SaveFailed(recovery=order.recovery, plan=order.plan, why=m.one_line(error)))
            return
        self._results[order.plan] = result
        if order.plan in self._void:  # it took too long, and another holder saves by now
            self._discard(order.plan)
            return
        self._try_send(
            m.Saved(
                recovery=order.recovery,
                plan=order.plan,
                path=result.path,
                nbytes=result.nbytes,
                first_byte_ns=result.first_byte_ns,
                part=result.part,
            )
        )

    def _commit(self, order: m.Commit) -> None:
        try:
            self._source.publish(self._results.pop(order.plan), order.parts)
        except BaseException as error:  # as in _save
            log.exception("the checkpoint could not be published")
            self._try_send(m.SaveFailed(recovery=order.recovery, plan=order.plan, why=m.one_line(error)))
            return
        self._try_send(m.Committed(recovery=order.recovery, plan=order.plan))

    def _discard(self, plan: int) -> None:
        self._void.add(plan)
        result = self._results.pop(plan, None)
        if result is not None:
            self._source.discard(result)

    # -- without a controller ---------------------------------------------------------------------

    def _terminate(self) -> None:
        if self._stand.outcome is not None:
            self._after_release(self._stand.outcome)  # told to stop again, and there is nothing left to do
            return
        self.report(self._fault_here("sigterm", "told to stop by SIGTERM"))

    def _fault_here(self, kind: FaultKind, cause: str) -> Fault:
        step, now = self._stand.step, _clock.wall_ns()
        return Fault(kind=kind, rank=self._source.rank, cause=cause, step=step, seen_ns=now)

    def _lose_controller(self, why: str) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        link.close()
        with self._gathered:
            self._gathered.notify_all()
        if self._stand.outcome is not None or self._closed or self.led_elsewhere is not None:
            return
        log.warning(
            "rank %d lost the controller (%s): training goes on; after a fault this rank saves by the same rule, "
            "on its own, and a hung peer is no longer noticed",
            self._source.rank,
            why,
        )
        if self._reported is not None or self._stand.held:
            self._begin_alone(self._reported or self._fault_here("lost", f"the controller: {why}"))

    def _begin_alone(self, fault: Fault) -> None:
        if not self._alone_begun.acquire(blocking=False):
            return
        self._stand.hold(self._finish + 2 * self._save_limit)
        self._spawn("alone", lambda: self._carry_alone(fault))

    def _carry_alone(self, fault: Fault) -> None:
        try:
            outcome = self._alone(fault)
        except BaseException as error:  # the training thread waits for an outcome, whatever it is
            log.exception("the recovery failed")
            outcome = given_up(m.one_line(error))
        self.over(outcome)

    def over(self, outcome: m.Release) -> None:
        """The recovery ended. It is told first: the training thread may be about to end the process."""
        self._pending = None
        try:
            self._after_release(outcome)
        finally:
            self._stand.release(outcome)

    def _try_send(self, message: m.Message) -> bool:
        link = self._link
        if link is None:
            return False
        try:
            link.send(message)
        except OSError as error:
            if not self._closed:
                self._lose_controller(str(error))
            return False
        return True
