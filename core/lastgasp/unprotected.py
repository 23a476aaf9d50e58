"""A worker that registers and marks, and whose state lastgasp does not know.

For scripts that call the registration interface of another system (TaskD's, in `lastgasp-taskd`) and use none of
lastgasp's adapters: their ranks stand in `lastgasp ps`, the switch reaches their marks, and that is all. The end of
such a rank begins no recovery, since nobody could save its state.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lastgasp import logs
from lastgasp.config import GaspConfig
from lastgasp.connect import SINCE, place_in_job
from lastgasp.errors import LastgaspError, NotSaveable
from lastgasp.gasp import messages as m
from lastgasp.gasp import signin
from lastgasp.gasp.cards import UNPROTECTED
from lastgasp.gasp.hello import hello_of
from lastgasp.gasp.link import Link
from lastgasp.gasp.processor import Processor
from lastgasp.gasp.rank_status import RankStatus, given_up
from lastgasp.jobs.registry import card_of_this_process
from lastgasp.ports import SaveResult
from lastgasp.session import Contact, launched
from lastgasp.steps import recorder as recorders
from lastgasp.steps.attach import Marking, open_recorder
from lastgasp.steps.marks import Marks
from lastgasp.steps.places import TASK_VARIABLE
from lastgasp.steps.recorder import StepRecorder
from lastgasp.steps.recover import recover_orphans
from lastgasp.steps.settings import MarksConfig
from lastgasp.topology import Place, data_parallel

log = logging.getLogger("lastgasp")

ORPHANS_LIMIT = 2.0
"""Seconds for the marks of an earlier, killed process."""


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Who registers.

    Attributes:
        rank, world_size: of this process in its job.
        directory: of the files of marks, unless the environment or MindCluster has another place.
        limit_mb: MB that the files of marks of all jobs may take there.
        framework: for readers of the files.
        device: number of this rank's device on its host.
        versions: for `lastgasp ps`.
    """

    rank: int
    world_size: int
    directory: Path
    limit_mb: int
    framework: str = ""
    device: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)


class UnprotectedWorker:
    """From `begin` to `close`; no method raises, and none waits for another rank.

    Attributes:
        recorder: the marks of this rank; None where `LASTGASP_MARKS=0` says so, or before `begin`.
        joined: the launcher's controller knows this rank.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._pid = worker, os.getpid()
        self._status = RankStatus()
        self._processor: Processor | None = None
        self.recorder: StepRecorder | None = None

    @property
    def joined(self) -> bool:
        """As said."""
        return self._processor is not None

    def begin(self) -> None:
        """Register with the launcher's controller, where there is one, and open the marks."""
        logs.set_up()
        worker = self._worker
        place = place_in_job(worker.rank, worker.world_size, data_parallel(worker.world_size), _alone)
        link = self._reach(place)
        self._open_marks(place, link.started_s if link is not None else None)
        if link is None:
            return
        limits = (GaspConfig.finish_timeout, GaspConfig.save_timeout)
        processor = Processor(self._status, _Nothing(worker.rank), link, _nobody, limits, _ignore)
        processor.on_switch = self.recorder.marks.switch if self.recorder is not None else None
        versions = dict(worker.versions) | {UNPROTECTED: "nothing"}
        processor.register(card_of_this_process(worker.rank, "", versions))
        processor.tell(m.Goodbye())  # its end is no fault from here on
        self._processor = processor

    def stepped(self, step: int) -> None:
        """`step` is completed, for `lastgasp ps` and for the launcher, which gives up where no step ever is."""
        first = self._status.ticks == 0
        self._status.step = step
        self._status.ticks += 1
        if first and self._processor is not None:
            self._processor.beat_now()

    def leave(self) -> None:
        """No longer in `lastgasp ps`; the marks go on. Idempotent."""
        processor, self._processor = self._processor, None
        if processor is not None and os.getpid() == self._pid:
            processor.tell(processor.status())  # the last step may be newer than the last heartbeat
            processor.close(goodbye=False)

    def close(self) -> None:
        """The end of the process. Idempotent."""
        if os.getpid() != self._pid:
            return  # a forked child: the connection and the ring are its parent's
        if self.recorder is not None:
            self.recorder.close()
        self.leave()

    def _reach(self, place: Place) -> Link | None:
        try:
            contact = Contact.from_environment()
            if contact is None:
                return None
            config = GaspConfig(directory=self._worker.directory)
            return Link(contact.address, contact.token, hello_of(config, place))
        except (LastgaspError, OSError) as error:
            log.warning("rank %d is not registered: %s", place.rank, error)
            return None

    def _open_marks(self, place: Place, started_s: int | None) -> None:
        worker = self._worker
        try:
            if not launched():
                recover_orphans(ORPHANS_LIMIT)
            config = MarksConfig.resolve(profiling_limit_mb=worker.limit_mb)
            marking = Marking(config=config, framework=worker.framework, device=worker.device)
            self.recorder = open_recorder(marking, place, started_s, worker.directory)
            named = started_s is not None or os.environ.keys() & {SINCE, TASK_VARIABLE}
            if self.recorder is not None and place.rank == 0 and place.world_size > 1 and not named:
                log.warning(
                    "each rank's marks are a task of their own, and lastgasp report compares no ranks; set %s to one "
                    "name on all ranks, or start the job with lastgasp run", TASK_VARIABLE,
                )  # fmt: skip
        except (LastgaspError, OSError) as error:
            log.warning("rank %d: nothing is marked: %s", place.rank, error)


def marks_here() -> Marks | None:
    """The marks of this process, whoever has opened them; None where there are none."""
    return next((one.marks for one in recorders.open_here()), None)


def marks_directory() -> Path | None:
    """Where the marks of this process are written; None where nothing is marked."""
    return next((one.directory for one in recorders.open_here()), None)


def session_here() -> bool:
    """Whether an adapter of lastgasp's protects this process."""
    last = signin.last_here()
    return last is not None and not last.left


class _Nothing:
    """The source of a rank whose state nobody knows."""

    buffer_fd = -1

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def capture(self, step: int) -> bytes:
        """Nothing."""
        return b""

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> SaveResult:
        """Impossible."""
        raise NotSaveable("lastgasp does not know this rank's state")

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str | None:
        """Never called."""
        return None

    def discard(self, result: SaveResult) -> None:
        """Nothing."""


def _nobody(fault: object) -> m.Release:
    """Without a controller nothing is recovered."""
    return given_up("lastgasp does not know this rank's state")


def _ignore(outcome: m.Release) -> None:
    """The process goes on: whatever ended elsewhere, its launcher ends it."""


def _alone(value: object) -> object:
    """A job of no launcher has no name; nobody is asked for one."""
    return value

