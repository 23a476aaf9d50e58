"""The rank's control thread: heartbeats, orders, SIGTERM, and uncoordinated recovery without a controller."""

from __future__ import annotations

import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable

from lastgasp import _clock
from lastgasp.errors import LastgaspError
from lastgasp.events import Fault, FaultKind
from lastgasp.ports import StateSource

from . import arena_files
from . import messages as m
from .answering import Answering
from .cards import WorkerCard
from .guard import Guard
from .hostloss import HostLoss, vanished
from .link import Link
from .mailbox import Mailbox, key_of
from .rank_status import RankStatus, given_up
from .saver import Saver, together
from .signals import TermSignal

log = logging.getLogger("lastgasp")

HEARTBEAT = 0.5
"""Seconds between two Status messages."""
LOOK = 0.001
"""Seconds between two checks of a training thread that must leave its update."""
ANSWER = 15.0
"""Seconds for the controller to answer a report; it takes milliseconds unless its process is stopped."""

FAREWELL = 5.0
"""Seconds for the controller to confirm a Goodbye; until then the end of this process would be a fault."""
RECOVER = 0.05
"""Seconds that the thread pauses after an exception in a callee."""
LISTEN = 1.0
"""Seconds between two looks for other ranks that wait for this one, once the controller is gone."""

Uncoordinated = Callable[[Fault], m.Release]
"""Carries out the recovery without a controller, in a separate thread."""

OnSwitch = Callable[[int, int], int]
"""Turns marks on and off (two masks of `steps.bits`) and returns what is now on; (0, 0) only queries. Runs on the
control thread, so it must not wait."""


class Processor:
    """One daemon thread per rank.

    Args:
        status: the status word, shared with the training thread.
        source: where the state lives.
        link: the control connection, or None without a controller.
        term: SIGTERM, once the adapter has installed it.
        uncoordinated: recovers without a controller.
        after_release: called once when the outcome is known, on this thread.

    Attributes:
        on_switch: carries out a switch of the marks; None initially, and where nothing is marked.
        called: whether other ranks wait for this one's part of the state, of whose fault no controller tells any more;
            it may wait for a disk. None where no rank needs another one to save.
        led_elsewhere: called with each fault seen by this thread (SIGTERM) where another backend leads the
            recoveries; must not wait.
    """

    def __init__(
        self,
        status: RankStatus,
        source: StateSource,
        link: Link | None,
        uncoordinated: Uncoordinated,
        limits: tuple[float, float],
        after_release: Callable[[m.Release], None],
    ) -> None:
        self._status, self._source, self._link, self._uncoordinated = status, source, link, uncoordinated
        self._finish, self._save_limit = limits
        self._after_release = after_release
        self.term = TermSignal()
        self._poke_r, self._poke_w = socket.socketpair()
        self._closed, self._ended = False, threading.Event()
        self._reported: Fault | None = None
        self._answer_by = math.inf
        self._uncoordinated_begun = threading.Lock()
        self._answering = Answering(status, source, self._finish, self._try_send)
        self._saver = Saver(source, self._try_send, self._moved)
        self._mail = Mailbox()
        self._next_beat = 0.0
        self.on_switch: OnSwitch | None = None
        self.called: Callable[[], bool] | None = None
        self.led_elsewhere: Callable[[Fault], None] | None = None
        self._left = False
        self._guard = Guard(log)
        self._host = HostLoss()
        self._enter_by = math.inf
        self._thread = threading.Thread(target=self._run, name="lastgasp-control", daemon=True)
        self._thread.start()

    # -- called by the training thread ------------------------------------------------------------

    @property
    def led(self) -> bool:
        """Whether a controller is connected."""
        return self._link is not None

    def begin(self) -> None:
        """Report the step at which training begins; from now on this rank's death costs steps."""
        self._try_send(arena_files.begin(self._status, self._source, together(self._source)))

    def register(self, card: WorkerCard) -> None:
        """Report who this worker is; no effect without a controller."""
        self._try_send(m.Register(card=card))

    def beat_now(self) -> None:
        """Send a Status in the next turn of the thread instead of half a second later."""
        self._next_beat = 0.0
        self._poke_w.send(b"b")

    def report(self, fault: Fault) -> None:
        """Report a fault of this rank to the controller, or recover without one."""
        self._answering.raised = self._answering.raised or fault.kind != "sigterm"
        if self._status.outcome is not None or self._reported is not None:
            if fault.kind == "exception" and self._reported is None:
                self._try_send(m.Report(fault=fault))  # all have raised, which the script may handle
            return
        self._reported = fault
        if self.led_elsewhere is not None:
            self._try_send(m.Report(fault=fault))  # for the record
            self.led_elsewhere(fault)
        elif self._try_send(m.Report(fault=fault, passing=self._status.passing)):
            self._answer_by = _clock.monotonic() + ANSWER
        else:
            self._begin_uncoordinated(fault)

    def not_started(self, kind: FaultKind, cause: str) -> None:
        """Report that training cannot begin on this rank; the controller decides what follows."""
        now = _clock.wall_ns()
        self._try_send(m.Report(fault=Fault(
            kind=kind, rank=self._source.rank, cause=m.encodable(cause), step=-1, seen_ns=now)))  # fmt: skip

    def gather(self, tag: str, payload: bytes, seconds: float, all_s: float = 0.0) -> m.Gathered | None:
        """Send a part and wait for all parts; None if they did not arrive in time or the link broke.

        Args:
            seconds: how long this rank waits; all_s: how long the controller waits for all, if that is more than usual.
        """
        if not self._try_send(m.GatherPart(tag=tag, payload=payload, seconds=all_s)):
            return None
        answer = self._mail.take(("gathered", tag), seconds)
        return answer if isinstance(answer, m.Gathered) else None

    def tell(self, message: m.Message) -> bool:
        """Send a message that needs no answer; return False without a controller."""
        return self._try_send(message)

    def consult(self, step: int, saved: m.Saved | None, seconds: float) -> m.Consulted | None:
        """Fetch what the controller keeps of `step`, after storing `saved`; None if it does not answer in time."""
        self._mail.drop(("consulted", step))
        if not self._try_send(m.Consult(step=step, saved=saved)):
            return None
        answer = self._mail.take(("consulted", step), seconds)
        return answer if isinstance(answer, m.Consulted) else None

    def agree(self, resize: m.Resize, seconds: float) -> str:
        """Tell the controller who goes on. Returns why it does not let them join again as that; empty if it does."""
        answer = self._mail.take(("resize", resize.incarnation), seconds) if self._try_send(resize) else None
        return answer.why if isinstance(answer, m.ResizeNoted) else "the controller does not answer"

    def joins_again(self, link: Link) -> None:
        """From now on the controller is reached by `link`, which knows this rank by its new number."""
        before, self._link, self._mail = self._link, link, Mailbox()
        if before is not None:
            before.close()
        self._poke_w.send(b"l")

    def left(self, seconds: float) -> m.Left | None:
        """Ask what this rank's predecessor has left in its arena; None if the controller does not answer in time."""
        answer = self._mail.take(("left", 0), seconds) if self._try_send(m.AskLeft()) else None
        return answer if isinstance(answer, m.Left) else None

    def goodbye(self) -> None:
        """Report, once, that training ended, so that this process's exit is not a fault.

        Returns when the controller has confirmed it, or after a few seconds without confirmation.
        """
        if self._left or self._closed:
            return
        # Where a peer failed after the last step this rank may be its saver; and it may have to enter that step again.
        outcome = self._status.wait_held(self._finish + 2 * self._save_limit) if self._status.held else None
        if outcome is not None and outcome.again is not None:
            return
        self._left = True
        if not self._try_send(m.Goodbye()) or threading.current_thread() is self._thread:
            return
        if self._mail.take(("farewell", 0), FAREWELL) is None and self._link is not None:
            log.warning("rank %d: the controller has not confirmed the end of training in %g s", self._source.rank,
                        FAREWELL)  # fmt: skip

    def close(self, goodbye: bool) -> None:
        """End the thread; `goodbye` reports that this is not a fault."""
        if self._closed:
            return
        if goodbye:
            self.goodbye()
        self._closed = True
        self._ended.set()
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
        """Keep running whatever the callees raise: this thread enforces deadlines and handles SIGTERM."""
        link = self._link
        if link is not None and link.unread:
            with self._guard("reading the controller's first words"):
                self._receive(link)  # a recovery is in progress, or over
        while not self._closed:
            failures = self._guard.count
            with self._guard("a turn of the control thread"):
                self._turn()
            if self._guard.count > failures and not self._closed:
                time.sleep(RECOVER)

    def _turn(self) -> None:
        link = self._link
        readable = self._wait(link)
        if self._closed:
            return
        if self._poke_r.fileno() in readable:
            self._poke_r.recv(4096)
        with self._guard("SIGTERM"):
            if self.term.fileno() in readable and self.term.came():
                self._terminate()
        with self._guard("an order of the controller"):
            if link is not None and (link.fileno() in readable or link.unread):
                self._receive(link)
            if not self._status.held and _clock.monotonic() > self._answer_by:
                self._lose_controller(f"it has not answered in {ANSWER:g} s")
        with self._guard("the answer to the controller"):
            self._answering.look(link is not None and link.shares_host)
        with self._guard("the heartbeat"):
            self._beat()
            if (cause := self._stranded(_clock.monotonic())) and not self._status.held:
                self._begin_uncoordinated(self._fault_here("lost", cause))

    def _wait(self, link: Link | None) -> set[int]:
        poll = select.poll()  # select() is limited to descriptors below 1024, and training jobs open more
        for end in (link, self.term, self._poke_r):
            if end is not None and (number := end.fileno()) >= 0:  # another thread may close it meanwhile
                poll.register(number, select.POLLIN)
        seconds = LOOK if self._answering.waits else HEARTBEAT / 2
        return {ready for ready, _ in poll.poll(seconds * 1000)}

    def _receive(self, link: Link) -> None:
        try:
            messages = link.receive()
        except (OSError, EOFError, LastgaspError) as error:
            if link is self._link:
                self._lose_controller(str(error), vanished(error))
            return
        for message in messages:
            with self._guard(f"the order {type(message).__name__}"):
                self._obey(message)

    def _obey(self, message: m.FromController) -> None:
        if (key := key_of(message)) is not None:
            self._mail.put(key, message)
        elif isinstance(message, m.Prepare):
            self._answering.take(message, self._finish + 2 * self._save_limit)
        elif isinstance(message, m.Save):
            self._spawn("save", lambda: self._saver.save(message))
        elif isinstance(message, m.Commit):
            self._spawn("commit", lambda: self._saver.commit(message))
        elif isinstance(message, m.Discard):
            self._saver.discard(message.recovery, message.plan)
        elif isinstance(message, m.Release):
            self.over(message)
        elif isinstance(message, m.SwitchOrder):
            self._switch(message)

    def _switch(self, order: m.SwitchOrder) -> None:
        if self.on_switch is None:
            why = "nothing is marked on this rank, so nothing can be switched (LASTGASP_MARKS, marks=)"
            self._try_send(m.Switched(order=order.order, mask=-1, why=why))
            return
        try:
            answer = m.Switched(order=order.order, mask=self.on_switch(order.on, order.off))
        except Exception as error:  # this thread must survive: it carries out the recovery
            log.exception("the marks could not be switched")
            answer = m.Switched(order=order.order, mask=-1, why=m.one_line(error))
        self._try_send(answer)

    def _marks(self) -> int:
        try:
            return -1 if self.on_switch is None else self.on_switch(0, 0)
        except Exception:
            log.debug("the marks do not say what is on", exc_info=True)
            return -1

    def _beat(self) -> None:
        now = _clock.monotonic()
        if self._link is None or now < self._next_beat:
            return
        self._next_beat = now + HEARTBEAT
        self._try_send(self.status())

    def status(self) -> m.Status:
        """This rank's heartbeat."""
        status = self._status
        return m.Status(
            step=status.step, durable=status.durable, tick=status.beat(), phase=status.phase, marks=self._marks()
        )

    # -- saving -----------------------------------------------------------------------------------

    @staticmethod
    def _spawn(name: str, target: Callable[[], None], *, here: bool = True) -> None:
        """On a thread of its own; where none can be had (a limit of processes), on this one if that may be `here`."""
        try:
            threading.Thread(target=target, name=f"lastgasp-{name}", daemon=True).start()
        except RuntimeError as error:
            log.warning("%s is %s: %s", name, "done by the control thread" if here else "left out", error)
            if here:
                target()

    def _moved(self, order: m.Save) -> None:
        """The state has advanced while it was saved: report it, and the controller asks all ranks again."""
        self._answering.expect(order.recovery, order.step + 1)

    # -- without a controller ---------------------------------------------------------------------

    def _terminate(self) -> None:
        if (outcome := self._status.outcome) is not None:
            if outcome.again is not None:
                self._status.asked_to_stop = True
            else:
                self._after_release(outcome)  # a second SIGTERM: there is nothing left to do
            return
        self.report(self._fault_here("sigterm", "asked to stop by SIGTERM"))

    def _fault_here(self, kind: FaultKind, cause: str) -> Fault:
        step, now = self._status.step, _clock.wall_ns()
        return Fault(kind=kind, rank=self._source.rank, cause=cause, step=step, seen_ns=now)

    def _lose_controller(self, why: str, host_lost: bool = False) -> None:
        link, self._link = self._link, None
        if link is None:
            return
        link.close()
        self._mail.close()
        if self._status.outcome is not None or self._closed or self.led_elsewhere is not None:
            return
        log.warning(
            "rank %d lost the controller (%s): training continues; after a fault this rank saves by the same rule, "
            "on its own or with those that hold what it lacks; a hung peer is no longer noticed. To have that again, "
            "stop the job (SIGTERM saves the step) and start it again",
            self._source.rank,
            why,
        )
        if host_lost:
            self._host.lost()
        if not self._status.entered:
            self._enter_by = _clock.monotonic() + self._finish
        if self._reported is not None or self._status.held:
            self._begin_uncoordinated(self._reported or self._fault_here("lost", f"the controller: {why}"))
        elif self.called is not None:
            self._spawn("listen", self._listen, here=False)

    def _listen(self) -> None:
        """Without a controller: until this rank ends, or others wait for it."""
        while self.called is not None and not self._ended.wait(LISTEN):
            if self._left or self._status.outcome is not None:
                return
            if self.called():
                cause = "another rank has failed, and waits for this one's part of the state"
                self._begin_uncoordinated(self._fault_here("peer", cause))
                return

    def _stranded(self, now: float) -> str:
        """Why the training thread would wait in vain for what was lost together with the controller; empty if not."""
        if self._host.look(self._status.ticks, now):
            return "the controller's host has vanished, and this rank has made no progress since"
        if now < self._enter_by:
            return ""
        self._enter_by = math.inf  # the store in which ranks meet was the launcher's
        late = f"the controller is gone, and training was not entered again within {self._finish:g} s"
        return "" if self._status.entered else late

    def _begin_uncoordinated(self, fault: Fault) -> None:
        if not self._uncoordinated_begun.acquire(blocking=False):
            return
        self._status.may_go_on = False
        self._status.hold(self._finish + 2 * self._save_limit)
        self._spawn("alone", lambda: self._carry_uncoordinated(fault))

    def _carry_uncoordinated(self, fault: Fault) -> None:
        try:
            outcome = self._uncoordinated(fault)
        except BaseException as error:  # the training thread waits for an outcome of any kind
            log.exception("the recovery failed")
            outcome = given_up(m.one_line(error))
        self.over(outcome)

    def over(self, outcome: m.Release) -> None:
        """The recovery ended. Notify first: the training thread may be about to end the process."""
        self._answering.drop()
        free = self._status.free
        freed = free() if free is not None and outcome.again is not None else None
        try:
            self._after_release(outcome)
        finally:
            self._status.release(outcome)
            if outcome.again is not None and (gone := outcome.again.vanished):
                self._spawn("cut", lambda: self._status.cut_off(gone))
            if freed is not None:
                self._spawn("free", freed, here=False)

    def _try_send(self, message: m.Message) -> bool:
        link = self._link
        if link is None:
            return False
        try:
            link.send(message)
        except OSError as error:
            if not self._closed and link is self._link:
                self._lose_controller(str(error), vanished(error))
            return False
        return True
