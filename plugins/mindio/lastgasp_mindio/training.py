"""One training of this process on the engine: connect, begin with the first step, answer faults, end."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch

from lastgasp.adapter import (
    AdapterRun,
    BackendChoice,
    ControlError,
    DeadlineExceeded,
    Digests,
    FaultKind,
    Framework,
    ManifestWriter,
    MarksConfig,
    NotSaveable,
    Place,
    StateSource,
    Verdict,
    cause_of,
    place_in_job,
)
from lastgasp.adapter import torch as shared
from lastgasp.adapter.again import Again, Fewer, SigtermBetween
from lastgasp_mindio import elastic, settings
from lastgasp_mindio.again import Repair, Stopper, tell_replacements, told
from lastgasp_mindio.callgroups import CallGroups
from lastgasp_mindio.classify import BAD_DATA, FORCE_STOP, Classifier
from lastgasp_mindio.elastic import Wishes
from lastgasp_mindio.enums import RepairType, ReportState
from lastgasp_mindio.handlers import Handlers
from lastgasp_mindio.notices import say
from lastgasp_mindio.shards import Info, groups_of, replicas_of
from lastgasp_mindio.source import Saver

log = logging.getLogger("lastgasp")

PRECISION = 1
"""Exit code of a job that was stopped for values that are wrong on all ranks."""


class Protection:
    """adapter.Training, and the run that it belongs to. All ranks make it together.

    Args:
        place: who this rank is; infos: what all ranks have handed to `tft_set_optimizer_replica`.
        wishes: which faults may be answered in place.
        seats: the ranks of the complete job that are there, by the engine's numbers; None: all.

    Attributes:
        again: what was agreed on where its training is entered again in this process.

    Raises:
        ControlError and its kin: the controller is not there.
    """

    def __init__(
        self, place: Place, infos: Sequence[Info | None], handlers: Handlers, faults: Classifier, wishes: Wishes,
        seats: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        config, layout = settings.config(), settings.layout()
        framework = Framework(
            name=f"mindio_ttp on torch {torch.__version__}", kind_of=self._kind_of,
            versions={"torch": str(torch.__version__)},
        )  # fmt: skip
        self._infos, self._handlers, self._classifier, self._state = infos, handlers, faults, ReportState.RS_NORMAL
        self.again: Again | None = None
        self._users_handler: Any = None
        self._between: SigtermBetween | None = None
        self._wishes, self._seats = wishes, tuple(range(len(infos))) if seats is None else seats
        self.run = AdapterRun(
            framework, config, MarksConfig.resolve(False), place, shared.connect(place),
            backend=BackendChoice("embedded", "embedded"),
        )  # fmt: skip
        self.run.alike_before = place.incarnation > 0
        writer = ManifestWriter(settings.FORMAT, place, sha256=config.sha256)
        status, groups = self.run.session.status, groups_of(infos)
        self.saver = Saver(
            place.rank, elastic.of_seats(groups, self._seats), self._seats, handlers, config, layout, writer, status,
            call_groups=CallGroups(place.incarnation),
        )  # fmt: skip
        self.run.bind(self)
        self._stopper: Stopper | None = None
        if wishes.dp is not None:
            why = elastic.cannot(groups, wishes, len(infos))
            status.fewer = Fewer(not why)
            if why:
                say(f"the job does not go on with fewer ranks (enable_zit), it restarts: {why}", place.rank)
        if recovery := wishes.recovery or ("fewer" if status.fewer.may else ""):
            status.recovery, self.run.before_again = recovery, self._agreed
            self._stopper = Stopper(self.saver, status.wait_over, lambda: self._state in BAD_DATA)

    # -- adapter.Training -------------------------------------------------------------------------

    @property
    def source(self) -> StateSource:
        """MindIO's handlers."""
        return self.saver

    def digests(self) -> Digests:
        """What the job has stated about its replicas is taken on trust, as by MindIO: nobody else knows its shards."""
        return {"stated by tft_set_optimizer_replica": b"1"}

    def settle(self, cause: str) -> str:
        """The training function has raised; between start and end of an update nothing is consistent."""
        if self._state in BAD_DATA:
            return "this rank's memory has failed"
        return "raised inside the update" if self.run.session.status.inside else ""

    def before_exit(self) -> None:
        """Nothing is open here."""

    def advice(self) -> str:
        """Nothing to say."""
        return ""

    # -- the training thread ----------------------------------------------------------------------

    def begin(self, step: int, durable: int | None = None, loaded: bool = True) -> None:
        """Training begins, or began, with `step` complete, or with the same in this incarnation.

        Args:
            durable: the newest step on disk; None: that step. loaded: as of `AdapterRun.begin`.
        """
        durable = step if durable is None else durable
        if self._users_handler is None:
            self._users_handler = _users_handler()
        if not self.run.begin(step, durable=durable, users_handler=self._users_handler, loaded=loaded):
            self.saver.groups = ()  # their numbers are no longer those of the shards
            log.error("nothing can be saved: the ranks could not be asked when training began")

    def failed(self, error: BaseException) -> None:
        """The training function has raised. As `AdapterRun.failed`: where a peer is gone this does not return."""
        self._state = self._classifier.state_of(error)
        self.saver.parked.set()
        if self._state is ReportState.RS_RETRY:
            self.run.condemn(_wrong_values(cause_of(error)))
            self.close()
        else:
            self.run.failed(error)

    def reported(self, state: ReportState, code: str) -> None:
        """`tft_report_error`: as `failed`, for a training function without the decorator. Returns when it is over."""
        self._state = state
        self.saver.parked.set()
        status, session = self.run.session.status, self.run.session
        if state is ReportState.RS_RETRY:
            self.run.condemn(_wrong_values(f"{state.name} {code}".strip()))
            return
        if state in BAD_DATA:
            status.broken = "this rank's memory has failed"
        elif status.inside:
            status.broken = "reported an error inside the update"
        session.fault("peer" if state is ReportState.RS_NORMAL else "exception", f"{state.name} {code}".strip())

    def close(self) -> None:
        """Training ended well."""
        self.run.close(completed=True)
        if self._stopper is not None:
            self._stopper.close()

    # -- what an exception says -------------------------------------------------------------------

    def _kind_of(self, error: BaseException) -> FaultKind:
        """After a stop the training thread raises because of that, whatever its collective says."""
        if isinstance(error, ControlError | DeadlineExceeded):  # in the recovery: another rank is lost
            return "peer"
        kind = shared.kind_of(error)
        stopped = self.saver.stopped or FORCE_STOP in str(error)
        return "peer" if kind == "exception" and stopped and isinstance(error, RuntimeError) else kind

    # -- recovery in place -----------------------------------------------------------------------

    def _agreed(self, again: Again) -> None:
        """AdapterRun.before_again: this run is about to be closed."""
        self.again = again
        self._between = SigtermBetween(self.run.session.status, self._users_handler)

    def entered_again(self) -> Protection:
        """Stop and clean are over; join the next incarnation, and go through the recovery with all ranks.

        Returns:
            Of that incarnation, whose training has begun.

        Raises:
            BaseException: it failed, which all others know; the step was saved, where that was possible.
        """
        agreed, before, status = self.again, self.run, self.run.session.status
        assert agreed is not None and self._stopper is not None
        again, taken = agreed.for_rank(before.place.rank), before.place.rank in agreed.takers
        seats = elastic.seats_after(self._seats, again)
        place = elastic.place_after(before.place, agreed, elastic.of_seats(groups_of(self._infos), seats))
        limit = before.config.finish_timeout + before.config.save_timeout
        problem, memory = self._stopper.wait_stopped(limit), self._state in BAD_DATA
        self.saver.call_groups.drop()  # only savers have these: a group of the repair handler would have two names
        try:
            if again.rung in ("replace", "grow"):
                tell_replacements(self._infos)
            found = Protection(place, self._infos, self._handlers, self._classifier, self._wishes, seats)
            durable = again.step if again.saved else status.durable
            found._users_handler, found.saver.unclean = self._users_handler, self.saver.unclean
            if self._between is not None:
                self._between.step_aside()
            if not taken:
                found.run.enter_again(found, again.step, durable, self._users_handler)
        except BaseException as error:  # the launcher has died, so that no other rank can join, either
            if not taken:
                before.save_alone(error)
            raise
        finally:
            if self._between is not None:
                self._between.over()
        kind = RepairType.RT_UCE_HIGHLEVEL if memory else RepairType.RT_RECV_REPAIR
        found._repair(again, RepairType.RT_UCE_LOWLEVEL if memory and self.saver.cleaned else kind, durable, problem)
        return found

    @classmethod
    def in_place_of_a_dead_rank(
        cls, again: Again, place: tuple[int, int], handlers: Handlers, faults: Classifier, wishes: Wishes
    ) -> Protection:
        """As `entered_again`, in the new process of a rank that was lost, or was missing."""
        infos = told()
        known = place_in_job(*place, replicas_of(groups_of(infos)), shared.from_rank_0)
        found = cls(known, infos, handlers, faults, wishes)
        found._repair(again, RepairType.RT_RECV_REPAIR, 0, "")
        return found

    def _repair(self, again: Again, kind: RepairType, durable: int, problem: str) -> None:
        status, session, saver = self.run.session.status, self.run.session, self.saver
        if saver.rank in again.takers:
            status.broken = f"this rank has not got its shard of step {again.step} yet"
        saver.parked.set()
        try:
            if problem:
                raise NotSaveable(problem)
            Repair(again, saver, self._handlers, session.gather, kind).run()
            status.broken = ""
            saver.parked.clear()
            self.begin(again.step, durable)
        except BaseException as error:
            self.failed(error)
            raise


def protect(
    place: tuple[int, int], infos: Sequence[Info | None], handlers: Handlers, faults: Classifier, wishes: Wishes
) -> Protection:
    """Of a training that begins. All ranks call it together, after their process group.

    Args:
        place: rank and size, of `tft_init_processor`; infos: as of `exchange.infos_of_all`; wishes: as of `Protection`.

    Raises:
        ValueError: MindIO would save nothing of this job, with the reason.
        ControlError and its kin: the controller is not there.
    """
    known = place_in_job(*place, replicas_of(groups_of(infos)), shared.from_rank_0)
    return Protection(known, infos, handlers, faults, wishes)


def _wrong_values(cause: str) -> Verdict:
    """A precision error: MindIO refuses to dump after one."""
    return Verdict(PRECISION, f"the values are wrong on all ranks, and are not saved ({cause})")


def _users_handler() -> Any:
    users = signal.getsignal(signal.SIGTERM) if threading.current_thread() is threading.main_thread() else None
    return users if callable(users) else None
