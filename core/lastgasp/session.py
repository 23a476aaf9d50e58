"""The object that an adapter holds: the composition root of the resilience of one rank."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from lastgasp import __version__, _clock, exitcodes, logs, narration, variables
from lastgasp.backends import BackendChoice, choose_backend, framework_of_taskd, in_taskd_job
from lastgasp.backends.embedded import EmbeddedBackend
from lastgasp.config import GaspConfig
from lastgasp.errors import ControlError, DeadlineExceeded
from lastgasp.events import Fault, FaultKind
from lastgasp.exception_origin import cause_of
from lastgasp.gasp import imported, leaving
from lastgasp.gasp import messages as m
from lastgasp.gasp.again import Again
from lastgasp.gasp.by_files import ControllerLost
from lastgasp.gasp.gathers import GATHER_TIMEOUT
from lastgasp.gasp.hello import hello_of
from lastgasp.gasp.leaving import FLUSH_LIMIT, Leaving, leave_now
from lastgasp.gasp.link import Link
from lastgasp.gasp.notes import add_note
from lastgasp.gasp.operator import ended_by_all
from lastgasp.gasp.processor import OnSwitch, Processor
from lastgasp.gasp.rank_status import RankStatus, describe, exit_code, given_up, gone_on
from lastgasp.gasp.secret import TOKEN, token_from_environment
from lastgasp.gasp.signin import Entry, sign
from lastgasp.gasp.uncoordinated import Known, called_by, recover_uncoordinated
from lastgasp.jobs.registry import EmbeddedRegistry, WorkerRegistry, card_of_this_process
from lastgasp.ports import RecoveryBackend, Repairs, StateSource
from lastgasp.replicas import Digests, compared_if_possible, computed, needs_comparing
from lastgasp.steps.attach import Marking, Recorder, no_mark, no_step, open_recorder
from lastgasp.steps.recover import recover_orphans
from lastgasp.steps.settings import MarksConfig
from lastgasp.topology import Place, ReplicaGroups

log = logging.getLogger("lastgasp")

LEAVE_GRACE = 10.0
"""Seconds for the training thread to exit on its own once a recovery is over."""
OWN_FAULT_GRACE = 60.0
"""The same for a rank that raised: its own traceback and clean-up come first."""
LEAVE_GRACE_LAUNCHED = 2.0
"""The same where a launcher waits to restart the job."""


@dataclass(frozen=True)
class Contact:
    """How this rank reaches its controller."""

    address: str
    token: str

    @classmethod
    def from_environment(cls) -> Contact | None:
        """Read what a launcher (`LASTGASP_CONTROLLER`, `LASTGASP_TOKEN`) or a user (a file) has set, if anything."""
        address, token = os.environ.get("LASTGASP_CONTROLLER"), os.environ.get(TOKEN)
        if address and not token:
            token = token_from_environment()
        return cls(address, token) if address and token else None


def launched() -> bool:
    """Whether a launcher of lastgasp's restarts this job."""
    return bool(os.environ.get("LASTGASP_LAUNCHER"))


class Session:
    """Resilience of one rank, from start-up to the end of training.

    The training thread calls `training_started` once, then per step `progress`, `before_update` before parameters
    change and `step_completed` after the step's state has been captured; `fault` when training ended with an exception;
    `close` at a normal end. All of it is local; only `gather` waits for other ranks.

    A loop marks what it does: `with session.mark("forward"):` (it can be hoisted), `session.step(n)` where `n` begins.

    Args:
        contact: the controller; None for a rank without one (a job of one rank).
        marking: what is marked; None marks nothing.
        backend: for an adapter whose framework drives another backend itself; None: `backends.choose_backend()`.

    Attributes:
        backend: who leads the recoveries, and why (`backends.choose_backend`).
        mark: returns the mark of a name (`steps.marks.Marks.mark`).
        step: ends the previous step and begins the one of this number (`steps.marks.Marks.step`).
        recorder: the step marks of this rank; None where nothing is marked.
        contact: how it reaches its controller; has_controller: it does, or did when it started.
        started_s: when the job's controller started, unix seconds; the same for all ranks and attempts. None without.

    Raises (constructor):
        ControlError and subclasses: the controller refused this rank or is not reachable.
    """

    def __init__(
        self, config: GaspConfig, place: Place, source: StateSource, contact: Contact | None,
        marking: Marking | None = None, *, backend: BackendChoice | None = None,
    ) -> None:  # fmt: skip
        logs.set_up()
        self.config, self.place, self._source = config, place, source
        self.status = RankStatus()
        self._notes: list[str] = []
        self._leaving = Leaving(lambda: contact is not None and ended_by_all(contact.address, contact.token, place))
        self._patience: float | None = LEAVE_GRACE_LAUNCHED if launched() else LEAVE_GRACE
        link = Link(contact.address, contact.token, hello_of(config, place)) if contact else None
        self.contact, self.has_controller = contact, contact is not None
        limits = (config.finish_timeout, config.save_timeout)
        self._processor = Processor(self.status, source, link, self.save_alone, limits, self._schedule_leaving)
        self._sign()
        self.started_s = link.started_s if link is not None else None
        self._processor.called = called_by(config.directory, place, source, self.started_s)
        self.backend = backend or choose_backend()
        self._registry, self._registered = self._open_registry(marking), False
        self._backend = self._open_gasp(contact)
        self._patience = min(self._patience or LEAVE_GRACE, self._backend.grace)
        # The hot path: with the embedded engine these are bound methods of the status word, without a call in between.
        self.progress = self.status.progress
        self.before_update, self.step_completed = self._backend.before_update, self._backend.step_completed
        self._mark(marking)

    def _open_gasp(self, contact: Contact | None) -> RecoveryBackend:
        """Create what leads the recoveries; the only place that loads a backend."""
        limit = self.config.finish_timeout + 2 * self.config.save_timeout + 5
        log.debug("%s", self.backend.describe())
        if self.backend.backend == "embedded" or self.place.world_size == 1:  # MindIO saves nothing of a single rank
            return EmbeddedBackend(self.place.rank, self.status, self._processor, limit)
        from lastgasp.backends.ascend.mindio import Control, MindioBackend

        host = contact.address.rpartition(":")[0] if contact is not None else "127.0.0.1"
        control = Control(self.status, self._processor, self.gather, self.save_alone, host, leave_now)
        return MindioBackend(self.config, self.place, self._source, control)

    def _open_registry(self, marking: Marking | None) -> WorkerRegistry:
        """Create the registry of this worker; in a job of MindCluster's it registers with TaskD as well."""
        own = EmbeddedRegistry(self._processor)
        if not in_taskd_job(self.backend, os.environ):
            return own
        from lastgasp.backends.ascend.taskd import TaskdRegistry

        limit = MarksConfig().limit_mb if marking is None else marking.config.limit_mb
        return TaskdRegistry.open(framework_of_taskd(sys.modules), limit, own)

    def _open_recorder(self, marking: Marking | None) -> Recorder | None:
        """Create the recorder: mstx where MindCluster collects marks, as two writers must not share a directory."""
        if marking is not None and in_taskd_job(self.backend, os.environ):
            from lastgasp.backends.ascend.mstx import open_recorder as open_mstx

            found = open_mstx(framework_of_taskd(sys.modules), marking.config, self.place.rank)
            if found is not None:
                return found
        return open_recorder(marking, self.place, self.started_s, self.config.directory)

    def _mark(self, marking: Marking | None) -> None:
        if not launched():
            recover_orphans(FLUSH_LIMIT)  # of a job that was killed and that only the user restarts
        self.recorder = self._open_recorder(marking)
        self.mark: Callable[[str], AbstractContextManager[None]] = no_mark
        self.step: Callable[[int], None] = no_step
        if self.recorder is not None:
            marks = self.recorder.marks
            self.mark, self.step = marks.mark, marks.step
            self.on_switch(marks.switch)

    # -- start ------------------------------------------------------------------------------------

    def compare_replicas(self, digests: Callable[[], Digests], alike_before: bool = False) -> bool:
        """Find out which ranks are replicas: before `training_started`, once the initial state is loaded.

        All ranks call it together. Ranks whose digests differ are taken out of each other's group: each is then the
        only holder of its shard, and no other rank saves it. Rank 0 logs that, and each incident notes it. If the ranks
        cannot be asked, every rank counts as the only holder. An adapter whose checkpoint has room for one copy of each
        shard must then refuse to save (`replicas.require_alike`), since the others would load that copy.

        Args:
            digests: computes the digests of what all replicas have in common (parameters, optimizer state), without
                what is one rank's (random state, buffers). Not called if no rank should be another's replica.
            alike_before: the ranks were alike when they began with what they hold now, so that nothing has to be
                concluded where they cannot be asked.

        Returns:
            Whether all groups are as the adapter stated. `self.place` has the actual groups.
        """
        replicas = self.place.replicas
        if not needs_comparing(replicas):
            return True
        groups, why = compared_if_possible(self.gather, replicas, computed(digests), alike_before)
        if not why:
            return True
        log.log(logging.WARNING if self.place.rank == 0 else logging.INFO, "%s", why)
        self._regroup(groups, why)
        return False

    def condemn(self, why: str) -> None:
        """The values of all ranks are wrong: from now on none may be saved, by any rank. `fault` follows."""
        self.status.broken = why
        self._regroup(tuple((rank,) for shard in self.place.replicas for rank in shard), why)

    def _regroup(self, groups: ReplicaGroups, why: str) -> None:
        self.place = replace(self.place, replicas=groups)
        self._processor.tell(m.Regroup(replicas=groups, why=why))
        if isinstance(self._backend, Repairs):
            self._backend.regroup(groups)

    def agree(self, resize: m.Resize, seconds: float) -> str:
        """For a job that another backend leads: why the controller will not let these ranks go on so; or empty."""
        return self._processor.agree(resize, seconds)

    def joins_again(self, place: Place) -> None:
        """Another backend leads, and the job goes on in another size: join the controller as the rank of `place`.

        All that go on have agreed on it (`agree`). The processes, their registration and their marks stay.

        Raises:
            ControlError and subclasses, DeadlineExceeded: the controller refused this rank or is not reachable.
        """
        assert self.contact is not None
        link = Link(self.contact.address, self.contact.token, hello_of(self.config, place))
        self.place, self._registered = place, False
        self._processor.joins_again(link)
        if isinstance(self._backend, Repairs):
            self._backend.renumber(place.rank, place.world_size, place.replicas)
        self.status.entered = False
        self._processor.begin()  # the controller may have to have it saved before the training is entered
        self._sign()

    def training_started(self, step: int, durable: int, loaded: bool = True) -> None:
        """Training starts (or resumes) with `step` completed, `durable` of them in a committed checkpoint.

        `loaded`: as of `AdapterRun.begin`.
        """
        self._leaving.renew()
        self.step_completed = self._first_step_completed
        leaving.training_begins()
        self.status.renew()
        self.status.step, self.status.durable = step, durable
        self._backend.training_started()
        if self.place.rank == 0:
            answered = self.status.recovery if launched() and self.backend.backend == "embedded" else None
            log.info("%s", narration.started(__version__, self.place.world_size, self.backend.brief(),
                                             str(self.config.directory), narration.whence(step, loaded), answered))
            variables.warn_of_unknown()
        self.status.progress("data")  # the hang watchdog counts from here, as starting the backend may take minutes
        self.register()

    def register(self, device: str = "", versions: Mapping[str, str] | None = None) -> None:
        """Register this worker with the job's control plane; only the first call counts.

        After the process group is up and before the first step; else `training_started` does it. `device`: as the
        framework writes it (cpu, cuda:0); `versions`: of the framework and its parts, by name.
        """
        if not self._registered:
            self._registered = True
            self._registry.register(card_of_this_process(self.place.rank, device, versions))

    def defer_to_framework(self) -> None:
        """Leave the recoveries to the framework: this rank's end is no longer a fault; `gather` still works."""
        self._processor.goodbye()

    def on_switch(self, switch: OnSwitch | None) -> None:
        """Set the function by which `lastgasp switch` turns marks on and off; None: nothing is marked here."""
        self._processor.on_switch = switch

    def _first_step_completed(self, step: int) -> None:
        """Report the first step at once, because the previous incident waits for it; then use only the hot path."""
        self._backend.step_completed(step)
        self.step_completed = self._backend.step_completed
        self._processor.beat_now()
        imported.report()

    def take_sigterm(self, users: Any = None) -> Any:
        """Take over SIGTERM, on the main thread; `users`: the user's own handler, called as well. Returns it."""
        return self._processor.term.install(users)

    def gather(self, tag: str, payload: bytes, seconds: float = GATHER_TIMEOUT) -> list[bytes]:
        """All-gather over the control connection (ports.Gather); needs no process group.

        Args:
            tag: the same on all ranks; payload: this rank's part; seconds: from the first to the last rank.

        Raises:
            DeadlineExceeded: some rank did not arrive.
            ControlError: a rank is gone or was refused; or the controller was lost.
        """
        if self.place.world_size == 1:
            return [payload]
        if not self.has_controller:
            if "torch" not in sys.modules:
                raise ControlError(f"the ranks cannot agree on {tag!r}: the job has no controller")
            from lastgasp.pytorch.together import all_gather

            return all_gather(tag, payload)
        whole = self._processor.gather(tag, payload, seconds + 30, seconds)
        if whole is None and not self._processor.led:
            raise ControllerLost(f"the controller was lost while the ranks agreed on {tag!r}")
        if whole is None:
            raise DeadlineExceeded(f"all ranks to agree on {tag!r}", seconds, "Look at the slowest rank.")
        if whole.missing:
            raise ControlError(f"the ranks could not agree on {tag!r}: {whole.missing}")
        return list(whole.parts)

    def left(self) -> m.Left | None:
        """What the ranks of the attempt before have left in their arenas, as far as this one's goes; None: not known.

        Before `training_started`; `adapter.arenas.taken_over` uses it.
        """
        return self._processor.left(GATHER_TIMEOUT)

    def auxiliary(self, step: int, seconds: float) -> Mapping[int, bytes]:
        """The auxiliary states of `step` that the controller keeps, by rank; none if it does not answer in time.

        For a job that another backend leads. May be called from any thread.
        """
        kept = self._processor.consult(step, None, seconds)
        return kept.aux if kept is not None else {}

    def drop_left(self) -> None:
        """Not all ranks can use it: have it freed."""
        self._processor.tell(m.DropLeft())

    def note(self, text: str) -> None:
        """Note what people must know about a recovery, such as what could not be restored exactly.

        The text goes into the log, and into the `notes` of its incident: that of the current recovery; after a restart
        the incident that caused it; else the next one, if any. Each text is kept once, however many ranks note it.
        May be called from any thread once the constructor has returned; never raises.

        Args:
            text: one line. Name the rank only if it matters: equal texts of several ranks become one note.
        """
        kept = add_note(self._notes, text)
        if kept and not self._processor.tell(m.Noted(text=kept)):
            log.warning("rank %d: %s", self.place.rank, kept)

    # -- fault ------------------------------------------------------------------------------------

    def fault(self, kind: FaultKind, cause: str) -> m.Release:
        """Training ended with an exception on this rank: have the step saved, and wait for it.

        Returns:
            How the recovery ended. Never raises, never waits for longer than the save's limits.
        """
        if isinstance(self._backend, Repairs) and (repaired := self._backend.goes_on(kind, cause)) is not None:
            return gone_on(repaired)
        if kind != "peer":
            # It may be handled, and its clean-up is worth more than a fast restart; nobody waits for a job's only rank.
            self._patience = OWN_FAULT_GRACE if self.place.world_size > 1 else None
            self._leaving.raised()
        if self._patience is not None:
            self._patience = min(self._patience, self._backend.grace)
        self._backend.fault(kind, cause)
        return self.status.outcome or given_up("the backend reported no outcome")

    def failed_to_start(self, error: BaseException, kind: FaultKind) -> None:
        """Report that `error` ends this rank before `training_started`, for the incident. Does not wait.

        Re-raise the exception afterwards. No effect once training has begun.
        """
        if self.status.phase == "start":
            peer = isinstance(error, ControlError | DeadlineExceeded)
            self._patience = min(OWN_FAULT_GRACE, self._backend.grace)  # the traceback matters more than a fast restart
            self._processor.not_started("peer" if peer else kind, cause_of(error))

    def protect(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `train` so that it is entered again after each fault repaired in place (MindIO's retry)."""
        return self._backend.protect(train) if isinstance(self._backend, Repairs) else train

    def save_alone(self, fault: Fault, aux: Mapping[int, bytes] | None = None) -> m.Release:
        """Save what this rank holds, by the uncoordinated rule, and states of others in `aux`; waits for it."""
        known = Known(self._notes, self.started_s, aux or {})
        hello = hello_of(self.config, self.place)
        return recover_uncoordinated(self.status, self._source, self.place, hello, fault, known)

    def _sign(self, left: bool = False, ending: str = "", step: int = -1) -> None:
        """Inform the launcher of this host, which relies on this alone."""
        rank, pid, directory = self.place.rank, os.getpid(), str(self.config.directory)
        hold = self.config.finish_timeout + 2 * self.config.save_timeout
        sign(Entry(rank=rank, pid=pid, hold=hold, directory=directory, left=left, ending=ending, step=step))

    def _schedule_leaving(self, outcome: m.Release) -> None:
        """End the process even if the training thread is stuck."""
        if outcome.again is not None:
            patience = leaving.limit(self.config.finish_timeout, on_disk=outcome.again.from_files)
            self._leaving.after(patience, partial(self._stuck, outcome.again))
        else:  # a launcher logs it for all ranks
            log.log(logging.DEBUG if launched() else logging.WARNING, "%s", describe(outcome))
            self._sign(ending=outcome.ending, step=outcome.step)
            self._leaving.after(self._patience, partial(exit_code, outcome))

    def _stuck(self, again: Again) -> int:
        """The training thread does not leave its training: what goes on from memory is saved. Returns the exit code."""
        cause = "did not leave its training, which was to be entered again"
        fault = Fault(kind="hang", rank=self.place.rank, cause=cause, step=self.status.step, seen_ns=_clock.wall_ns())
        if again.from_files and self._processor.tell(m.Report(fault=fault)):
            leaving.wait_to_be_replaced()
        log.error("%s", words := leaving.STAYS.format(rank=self.place.rank))
        self.note(words)
        return exitcodes.SAVED if again.from_files or again.saved else exit_code(self.save_alone(fault, again.aux))

    def leaves_training(self) -> None:
        """The training thread is about to leave a training that is entered again: its process is not ended."""
        self._leaving.stays()

    # -- end --------------------------------------------------------------------------------------

    def close(self, goodbye: bool = True) -> None:
        """Release thread, socket and signal; `goodbye` says that training ended well. Idempotent.

        After `goodbye` this process is no longer ended for a recovery, and the controller has usually confirmed that
        its end will be no fault.
        """
        if goodbye:
            self._registry.deregister()
            if self.goodbye() is None:
                self._sign(left=True)
        if self.recorder is not None:
            self.recorder.close()
        self._backend.close()
        self._processor.close(goodbye)

    def goodbye(self) -> m.Release | None:
        """Say that training ended well; `close` follows. Returns how a recovery ended that came before, if one did."""
        self._leaving.stays()
        self._processor.tell(self._processor.status())  # the last step may be newer than the last heartbeat
        self._backend.goodbye()
        return self.status.outcome


def leave(outcome: m.Release, because: str = "") -> NoReturn:
    """Exit after a recovery: at once if a launcher waits to restart the job, else with a message and the exit code.

    Args:
        because: what was raised here because a peer was lost; logged if no step was saved.

    Raises:
        SystemExit: with the exit code of the outcome, if there is no launcher.
    """
    if because:
        log.log(logging.DEBUG if outcome.ending == "saved" else logging.WARNING, "a peer is gone (%s)", because)
    if launched():
        leave_now(exit_code(outcome))
    with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
        print(f"lastgasp: {describe(outcome)}", flush=True)
    raise SystemExit(exit_code(outcome))
