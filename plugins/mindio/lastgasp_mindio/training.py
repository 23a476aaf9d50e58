"""One training of this process on the engine: connect, begin with the first step, answer faults, end."""

from __future__ import annotations

import logging
import signal

import torch
import torch.distributed as dist

from lastgasp.adapter import (
    AdapterRun,
    BackendChoice,
    Digests,
    FaultKind,
    Framework,
    ManifestWriter,
    MarksConfig,
    StateSource,
    Verdict,
    cause_of,
    place_in_job,
)
from lastgasp.adapter import torch as shared
from lastgasp_mindio import settings
from lastgasp_mindio.classify import BAD_DATA, FORCE_STOP, Classifier
from lastgasp_mindio.enums import ReportState
from lastgasp_mindio.handlers import Handlers
from lastgasp_mindio.shards import Info, groups_of, replicas_of
from lastgasp_mindio.source import Saver

log = logging.getLogger("lastgasp")

PRECISION = 1
"""Exit code of a job that was stopped for values that are wrong on all ranks."""


class Protection:
    """adapter.Training, and the run that it belongs to. All ranks make it together, after their process group.

    Args:
        rank, world_size: of `tft_init_processor`; info: of `tft_set_optimizer_replica` on this rank.

    Raises:
        ValueError: MindIO would save nothing of this job, with the reason.
        ControlError and its kin: the controller is not there.
    """

    def __init__(self, rank: int, world_size: int, info: Info | None, handlers: Handlers, faults: Classifier) -> None:
        groups = groups_of(_of_all_ranks(info, world_size))
        config, layout = settings.config(), settings.layout()
        place = place_in_job(rank, world_size, replicas_of(groups), shared.from_rank_0)
        framework = Framework(
            name=f"mindio_ttp on torch {torch.__version__}", kind_of=self._kind_of, verdict_of=self._verdict_of,
            versions={"torch": str(torch.__version__)},
        )  # fmt: skip
        self._classifier, self._state = faults, ReportState.RS_NORMAL
        self.run = AdapterRun(
            framework, config, MarksConfig.resolve(False), place, shared.connect(place),
            backend=BackendChoice("embedded", "embedded"),
        )  # fmt: skip
        writer = ManifestWriter(settings.FORMAT, place, sha256=config.sha256)
        self.saver = Saver(rank, groups, handlers, config, layout, writer, self.run.session.status)
        self.run.bind(self)

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

    def begin(self, step: int) -> None:
        """The first step of this run is complete but for this call; training began with `step` of them."""
        users = signal.getsignal(signal.SIGTERM)
        if not self.run.begin(step, durable=step, users_handler=users if callable(users) else None):
            self.saver.groups = ()  # their numbers are no longer those of the shards
            log.error("nothing can be saved: the ranks could not be asked when training began")

    def failed(self, error: BaseException) -> None:
        """The training function has raised. As `AdapterRun.failed`: where a peer is gone this does not return."""
        self._state = self._classifier.state_of(error)
        self.saver.parked.set()
        self.run.failed(error)

    def reported(self, state: ReportState, code: str) -> None:
        """`tft_report_error`: as `failed`, for a training function without the decorator. Returns when it is over."""
        self._state = state
        self.saver.parked.set()
        status, session = self.run.session.status, self.run.session
        if state in BAD_DATA:
            status.broken = "this rank's memory has failed"
        elif status.inside:
            status.broken = "reported an error inside the update"
        session.fault("peer" if state is ReportState.RS_NORMAL else "exception", f"{state.name} {code}".strip())

    def close(self) -> None:
        """Training ended well."""
        self.run.close(completed=True)

    # -- what an exception says -------------------------------------------------------------------

    def _kind_of(self, error: BaseException) -> FaultKind:
        """After a stop the training thread raises because of that, whatever its collective says."""
        kind = shared.kind_of(error)
        stopped = self.saver.stopped or FORCE_STOP in str(error)
        return "peer" if kind == "exception" and stopped and isinstance(error, RuntimeError) else kind

    def _verdict_of(self, error: BaseException) -> Verdict | None:
        """A precision error is in the values of all ranks, so no rank's may be saved."""
        if self._classifier.state_of(error) is not ReportState.RS_RETRY:
            return None
        return Verdict(PRECISION, f"the values are wrong on all ranks, and are not saved ({cause_of(error)})")


def _of_all_ranks(info: Info | None, world_size: int) -> list[Info | None]:
    if world_size == 1:
        return [info]
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("torch.distributed is not initialised")
    found: list[Info | None] = [None] * world_size
    dist.all_gather_object(found, info)
    return found
