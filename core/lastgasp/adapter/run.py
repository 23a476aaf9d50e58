"""The life cycle of one protected training, from connecting to the last undo; the same for every framework."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lastgasp import _clock
from lastgasp.adapter.alone import claim
from lastgasp.backends import BackendChoice, choose_backend
from lastgasp.config import GaspConfig, check_writable
from lastgasp.deferred_source import DeferredSource
from lastgasp.events import Fault, FaultKind
from lastgasp.exception_origin import cause_of, is_success, may_pass
from lastgasp.gasp.again import LED, Again
from lastgasp.gasp.by_files import gather_saved
from lastgasp.gasp.gathers import GATHER_TIMEOUT
from lastgasp.gasp.messages import Release, encodable
from lastgasp.gasp.rank_status import Released
from lastgasp.gasp.signals import TermSignal
from lastgasp.launch import framework_verdict
from lastgasp.launch.framework_verdict import Verdict
from lastgasp.ports import StateSource, StepLeft
from lastgasp.replicas import Digests
from lastgasp.session import Contact, Session, leave
from lastgasp.steps.attach import Marking
from lastgasp.steps.settings import MarksConfig
from lastgasp.topology import Place

log = logging.getLogger("lastgasp")


def _no_verdict(error: BaseException) -> Verdict | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Framework:
    """What an adapter says about its framework.

    Args:
        name: with its version, as it stands in the files of step marks ("lightning 2.6.1").
        kind_of: whose fault an exception is: that of a peer, this rank's own, an exit, an interrupt.
        verdict_of: what the framework says by an exception that ends a training for good; None for all others. No
            restart follows a verdict, and nothing is saved for it.
        device: this rank's local device number, for the files of step marks.
        versions: of the framework and its parts, for the table of workers.
    """

    name: str
    kind_of: Callable[[BaseException], FaultKind]
    verdict_of: Callable[[BaseException], Verdict | None] = _no_verdict
    device: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)


class Training(Protocol):
    """What an adapter knows about the training that it protects. Bound once the model exists.

    The run calls `digests` and `settle` on the training thread; the engine calls `source` from threads of its own
    (`ports.StateSource` says when).
    """

    @property
    def source(self) -> StateSource:
        """Where a gasp gets the state from."""

    def digests(self) -> Digests:
        """Digests of everything that all replicas have in common. Called before the first step; may be slow."""

    def settle(self, cause: str) -> str:
        """The training thread has raised: bring the state to a step boundary, if that is possible without other ranks.

        A step whose updates are all done is completed (`Session.step_completed`); one whose update has not begun is
        left where it is.

        Args:
            cause: one line about the exception, for notes.

        Returns:
            Why the state is between two steps and must not be saved; empty where it is that of a step.
        """

    def before_exit(self) -> None:
        """This process is about to exit at once, since a peer is gone: close what would lose data (loggers)."""
        return

    def advice(self) -> str:
        """What the user can do so that the next such fault costs nothing, where no step could be saved; or empty."""
        return ""


class AdapterRun:
    """One training of this process. All calls are made on the training thread, in this order.

    1. The constructor connects this rank to its controller; the state is deferred (`bind`).
    2. `CheckpointSelector` chooses what to resume from, by `session.gather`; the framework loads it.
    3. `bind` says where the state is.
    4. `begin` starts the protection: replicas are compared, SIGTERM is taken over.
    5. Per step: `session.progress`, `session.before_update`, `session.step_completed`.
    6. `failed` when anything raised, before or after `begin`; or `close(completed=True)` at a normal end.

    What is put in place on the way (hooks, marks, replaced attributes) is registered with `on_close` and undone in
    reverse order, whatever one of the steps raises.

    Args:
        framework: what the adapter says about it.
        config, marks: what the user asked for.
        place: who this rank is, and which ranks should be its replicas.
        contact: how the controller is reached (`connect`); None for a job of one rank.
        backend: for a framework that drives the other backend itself.

    Attributes:
        session: the engine's.
        source: the state, once `bind` has said where it is.
        begun: `begin` was called.
        alike: all replicas hold the same, as was found when training began.
        alike_before: they did, when the training that is entered again here was begun.
        stays: the session goes on with the next entry of the training: another backend leads, which knows it.
        before_again: called when the training is to be entered again in this process: keeps the state of the step.
            None: it cannot be.

    Raises (constructor):
        ConfigError: a directory that cannot be written.
        ControlError and its kin: the controller refused this rank or is not there.
    """

    def __init__(
        self,
        framework: Framework,
        config: GaspConfig,
        marks: MarksConfig,
        place: Place,
        contact: Contact | None,
        *,
        backend: BackendChoice | None = None,
    ) -> None:
        if not place.incarnation:  # where the training is entered again, it is known to be
            check_writable(config.directory)
        backend = backend or choose_backend()
        if backend.backend != "embedded":  # what another leader repairs is no incarnation of our controller's
            place = replace(place, incarnation=int(os.environ.get(LED) or 0))
        self.framework, self.config = framework, config
        self.source = DeferredSource(place.rank)
        self._term: TermSignal | None = None
        self.begun, self.alike, self.alike_before, self.stays = False, True, False, False
        self.before_again: Callable[[Again], object] | None = None
        self._training: Training | None = None
        self._completed, self._undo, self._release = ExitStack(), ExitStack(), ExitStack()
        marking = Marking(config=marks, framework=framework.name, device=framework.device)
        self.session = Session(config, place, self.source, contact, marking, backend=backend)
        self.source.mark = self.session.mark("save_checkpoint")

    @property
    def place(self) -> Place:
        """Who this rank is; after `begin` with the replicas as they were found to be."""
        return self.session.place

    # -- start ------------------------------------------------------------------------------------

    def gather_saved(self, tag: str, payload: bytes, seconds: float = GATHER_TIMEOUT) -> list[bytes]:
        """As `Session.gather`, for what a periodic checkpoint needs: that goes on once the controller is gone."""
        return gather_saved(self.session, tag, payload, seconds)

    def joins_again(self, place: Place) -> None:
        """As `Session.joins_again`."""
        self.session.joins_again(place)
        self.source.rank = place.rank
        os.environ[LED] = str(place.incarnation)

    def bind(self, training: Training) -> None:
        """The model and its optimizers exist: from here on a fault can be answered."""
        self._training = training
        self.source.inner = training.source

    def on_close(self, undo: Callable[[], object], *, last: bool = False) -> None:
        """Have `undo` called at the end, before those that were registered earlier; what it raises is logged.

        Args:
            last: only after the session is closed, for what its threads still read.
        """
        (self._release if last else self._undo).callback(_guarded, undo)

    def on_completed(self, act: Callable[[], object]) -> None:
        """Have `act` called first at the end of a training that ended well; what it raises is logged."""
        self._completed.callback(_guarded, act)

    def begin(
        self, step: int, durable: int, *, users_handler: Any = None, device: str = "", loaded: bool = True
    ) -> bool:
        """Training starts, or resumes, with `step` completed. All ranks call it together.

        Args:
            durable: the newest step in a committed checkpoint; 0 for none.
            users_handler: the user's own SIGTERM handler, called as well.
            device: of this rank, as the framework writes it.
            loaded: that step was loaded, or is 0; False: all that is known is that the next one is the first.

        Returns:
            Whether all replicas hold the same; ranks that do not are nobody's replicas from here on.
        """
        assert self._training is not None, "bind() comes before begin()"
        self._alone()
        self.session.register(device, self.framework.versions)
        self.alike = self.session.compare_replicas(self._training.digests, self.alike_before)
        self.session.status.entered = True
        self.session.training_started(step, durable, loaded)
        if threading.current_thread() is threading.main_thread():
            self._term = self.session.take_sigterm(users_handler)
        self.begun = True
        return self.alike

    def _alone(self) -> None:
        if self.place.rank:
            return
        holder, release = claim(self.config.directory)
        self.on_close(release, last=True)
        if holder and not self.place.restarted:  # later it may be a rank of this job that has not quite ended
            self.session.note(
                f"another job trains in {self.config.directory} at this moment ({holder}): each of the two removes and "
                "resumes what the other saves. End one of them, or give each a directory of its own"
            )

    def compare_again(self, digests: Callable[[], Digests] | None = None) -> bool:
        """Ranks that were alike may not be so any more: compare them once more. All ranks call it together.

        Args:
            digests: of what may differ by now; default: as when training began.

        Returns:
            False where this has shown that they are not. What was known before says nothing about the cause.
        """
        assert self._training is not None, "bind() comes before"
        if not self.alike:
            return True
        # `digests`: where they cannot be asked, one has just died, and they compare when they are back
        asked = self._training.digests if digests is None else digests
        self.alike = self.session.compare_replicas(asked, alike_before=digests is not None)
        return self.alike

    def enter_again(self, training: Training, step: int, durable: int, users_handler: Any) -> None:
        """After a fault: join with `step`, which `training` holds in memory, before the framework's own is there.

        From here on another fault is answered with that step. `bind` and `begin` follow as at any start. On the main
        thread; arguments as for `begin`.
        """
        self.bind(training)
        self.session.status.entered = False
        self.session.training_started(step, durable=durable)
        self._term = self.session.take_sigterm(users_handler)
        self.begun = True

    # -- end --------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Something raised: have the step saved, where there is one. Returns when `error` is to propagate unchanged.

        Where `before_again` was called the caller lets go of all that belongs to the training, drops its process
        groups, and enters it again.

        An exit with code 0 is a normal end, everywhere. A rank that only saw its peers fail exits here, and does not
        return.

        Raises:
            SystemExit: a recovery ended this rank's training, and there is no launcher.
        """
        if isinstance(error, Released):
            if self._enters_again(error.outcome):
                return
            self._exit(error.outcome)
        verdict = self.framework.verdict_of(error)
        if verdict is not None:
            _give(verdict)
        success = is_success(error)
        if verdict is not None or (success and not self._told_to_end()):
            self.close(completed=True)
            return
        kind: FaultKind = "sigterm" if success else self.framework.kind_of(error)
        if not self.begun:
            self.session.failed_to_start(error, kind)
        else:
            outcome = self._recover(error, kind)
            if self._enters_again(outcome, error if kind == "exception" else None):
                return
            if kind == "peer" and self.place.world_size > 1:
                self._exit(outcome, cause_of(error))
        self.close(completed=False)

    def condemn(self, verdict: Verdict) -> None:
        """The values of all ranks are wrong, which this one knows alone: none saves any, and no restart follows.

        Returns when the others know. `close` follows.
        """
        _give(verdict)
        if self.begun:
            self.session.condemn(verdict.why)
            self.session.fault("exception", verdict.why)

    def _told_to_end(self) -> bool:
        """Whether SIGTERM has come, so that a handler of the user's has ended the training; its step is on no disk."""
        status = self.session.status
        return self.begun and self._term is not None and self._term.seen and status.step > status.durable

    def _recover(self, error: BaseException, kind: FaultKind) -> Release:
        training, status, cause = self._training, self.session.status, cause_of(error)
        assert training is not None
        try:
            between = training.settle(cause)
        except StepLeft:  # it is complete, and this rank has something else to say
            between = ""
        status.broken = f"{cause}: {between}" if between else ""
        status.passing = may_pass(error)
        outcome = self.session.fault(kind, cause)
        if outcome.ending == "gave_up" and (advice := training.advice()):
            log.error("%s", advice)
        return outcome

    def _enters_again(self, outcome: Release, raised: BaseException | None = None) -> bool:
        """Whether the training is entered again in this process; the run is closed then, and its state kept."""
        if outcome.again is None or self.before_again is None:
            return False
        if raised is not None:  # it ends no process, so that nobody else prints it
            log.warning("rank %d raised, and its training is entered again:", self.place.rank, exc_info=raised)
        self.session.leaves_training()
        try:
            self.before_again(outcome.again)
        except BaseException as error:  # the others may not have been able to keep it, either
            if self.stays:  # the leader has yet to notice
                self._exit(self.session.fault("peer", cause_of(error)), cause_of(error))
            self.save_alone(error)
            self.close(completed=False)
            raise
        if self.stays:
            self._let_go()
        else:
            self.close(completed=False)
            self._training = self.before_again = None  # with the model, of which there may not be room for two
        return True

    def _let_go(self) -> None:
        """Undo what belongs to this entry of the training."""
        _, undo, release = (each.pop_all() for each in (self._completed, self._undo, self._release))
        undo.close()
        release.close()

    def save_alone(self, error: BaseException) -> None:
        """Save what this rank holds, without its controller; `error` is why the training is not entered again here."""
        rank, step, now = self.place.rank, self.session.status.step, _clock.wall_ns()
        cause = encodable(cause_of(error))
        self.session.save_alone(Fault(kind="exception", rank=rank, cause=cause, step=step, seen_ns=now))

    def _exit(self, outcome: Release, because: str = "") -> None:
        if self._training is not None:
            _guarded(self._training.before_exit)
        leave(outcome, because)

    def finish(self) -> None:
        """Training ended well: say so, before `close`, where the training may be entered again.

        Where a handler of the user's for SIGTERM has ended it, the step is saved first.

        Raises:
            Released: it is, since a rank had failed before that was known. All ranks are needed for it.
        """
        if self._told_to_end():
            self.session.fault("sigterm", "SIGTERM, and training has ended")
        if self.before_again is not None and self.begun:
            outcome = self.session.goodbye()
            if outcome is not None and outcome.again is not None:
                raise Released(outcome)

    def close(self, *, completed: bool) -> None:
        """Undo everything. Idempotent; never raises.

        Args:
            completed: training ended well, so that the end of this process is not a fault.
        """
        completion, undo, release = (each.pop_all() for each in (self._completed, self._undo, self._release))
        if completed:
            completion.close()
        undo.close()
        _guarded(lambda: self.session.close(completed))
        release.close()


def _give(verdict: Verdict) -> None:
    log.error("%s", verdict)
    framework_verdict.give(verdict)


def _guarded(step: Callable[[], object]) -> None:
    """The session must be closed although a hook could not be taken out: else a good end would count as a failure."""
    try:
        step()
    except Exception:
        log.exception("the end of a run left something behind: %s", getattr(step, "__qualname__", step))
