"""Several trainings in one script: what the controller knows of one of them is nothing to the next one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lastgasp import _clock
from lastgasp.events import Fault
from lastgasp.gasp import messages as m
from lastgasp.gasp.actions import RecordPhase
from lastgasp.gasp.again import Again
from lastgasp.gasp.attempt import ENTER, IMPORTS, Attempt
from lastgasp.gasp.incidents import Incidents
from lastgasp.gasp.ladder import Ladder
from lastgasp.gasp.records import RecordWriter
from lastgasp.gasp.repeats import LIMIT, Repeats
from support.switch_job import hello

AGAIN = Again(incarnation=1, step=8, source=0, takers=(1,), lost=(), port=1)
FAULT = Fault(kind="exception", rank=1, cause="RuntimeError: x", step=3, seen_ns=1)


class Job:
    """Two ranks."""

    def __init__(self, incidents: Incidents, directory: Path) -> None:
        self.incidents, self.directory = incidents, directory
        self.join(0)

    @property
    def attempt(self) -> Attempt:
        assert self.incidents.current is not None
        return self.incidents.current

    @property
    def machine(self) -> Ladder:
        assert isinstance(self.attempt.machine, Ladder)
        return self.attempt.machine

    def join(self, incarnation: int, directory: Path | None = None, attempt: int = 0) -> None:
        """Both do, as a new attempt or incarnation, or for a training in another directory."""
        place = str(directory or self.directory)
        self.incidents.begin(hello(0, 2, attempt=attempt, incarnation=incarnation, directory=place))
        self.comes(0, 1)

    def comes(self, *ranks: int) -> None:
        for rank in ranks:
            self.attempt.joined(rank, 0.0, 0)

    def begins(self, step: int, *ranks: int, entered: bool = False) -> None:
        begin = m.Begin(step=step, durable=0, buffer_fd=-1, recovery="retry", entered=entered)
        for rank in ranks or (0, 1):
            self.attempt.heard_step(rank, begin)
            self.machine.said(rank, begin, 0.0)

    def reaches(self, step: int, *ranks: int) -> None:
        status = m.Status(step=step, durable=0, tick=step, phase="data")
        for rank in ranks or (0, 1):
            self.attempt.heard_step(rank, status)
            self.machine.said(rank, status, 0.0)

    def ends(self, *ranks: int) -> None:
        for rank in ranks or (0, 1):
            self.machine.said(rank, m.Goodbye(), 0.0)

    def enters_again(self) -> None:
        """After a fault at step 8, and trains to step 10."""
        self.begins(0)
        self.reaches(8)
        self.machine.again = AGAIN
        self.join(1)
        self.begins(8, entered=True)
        self.reaches(10)

    def answers(self, step: int) -> None:
        for rank in (0, 1):
            said = m.Prepared(recovery=1, step=step, durable=0, usable=True)
            self.machine.said(rank, said, 0.0)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with closing(RecordWriter()) as writer:
        yield Job(Incidents(writer), tmp_path)


def test_a_rank_that_answers_in_a_later_training_has_answered(job: Job) -> None:
    job.enters_again()
    job.ends()
    job.comes(0, 1)
    job.begins(0)
    job.reaches(3)
    job.machine.said(1, m.Report(fault=FAULT, passing=True), 0.0)
    job.answers(3)
    assert job.machine.not_in_place == "the job's launcher cannot do it (it is none of lastgasp)"
    assert job.machine.state == "saving"


def test_why_a_later_training_is_not_entered_again(job: Job) -> None:
    job.enters_again()
    job.ends()
    job.comes(0, 1)
    job.begins(0)
    job.machine.said(1, m.Report(fault=FAULT, passing=True), 0.0)
    job.answers(0)
    assert job.machine.not_in_place == "no step was completed since training began"


def test_what_is_entered_again_waits_for_the_step_that_it_began_with(job: Job) -> None:
    job.enters_again()
    job.machine.said(1, m.Report(fault=FAULT, passing=True), 0.0)
    job.answers(7)
    assert job.machine.state == "preparing", "they answered before they had it"


def test_a_training_without_a_step_is_no_progress(job: Job) -> None:
    job.begins(20)
    job.ends()
    job.comes(0, 1)
    job.begins(0)
    assert not job.attempt.progressed
    job.reaches(1)
    assert job.attempt.progressed


def test_progress_of_an_earlier_training_counts(job: Job) -> None:
    job.begins(0)
    job.reaches(5)
    job.ends()
    job.comes(0, 1)
    job.begins(0)
    assert job.attempt.progressed and not job.attempt.progressed_now
    assert job.attempt.repeats.count == 0, "it has not been ended by an exception"


def test_a_training_begins_once_however_late_the_others_come(job: Job) -> None:
    job.begins(20)
    job.ends(1)
    job.comes(1)
    assert job.attempt.training == 1
    job.begins(0, 1)
    job.reaches(20, 0)
    job.ends(0)
    job.comes(0)
    job.begins(0, 0)
    assert job.attempt.training == 1 and not job.attempt.progressed
    job.reaches(1, 1)
    assert job.attempt.progressed_now
    job.ends(0, 1)
    job.comes(0)
    assert job.attempt.training == 2


def test_a_training_in_another_directory_may_begin_as_late_as_any(job: Job, tmp_path: Path) -> None:
    job.enters_again()
    job.ends()
    job.join(1, tmp_path / "another")
    late = _clock.monotonic() + job.attempt.hello.finish_timeout + ENTER + 1
    assert job.machine.tick(late, 0, frozenset()) == [] and job.machine.state == "running"
    assert job.attempt.training == 1


@pytest.mark.parametrize("directory", ["", "another"])
def test_a_fault_in_a_later_training_is_none_of_the_recovery_before(job: Job, directory: str, tmp_path: Path) -> None:
    job.enters_again()
    job.ends()
    if directory:
        job.join(1, tmp_path / directory)
    else:
        job.comes(0, 1)
    job.begins(0)
    job.machine.said(1, m.Report(fault=FAULT, passing=True), 0.0)
    job.join(0, attempt=1)
    assert job.machine.unwise == ""


@pytest.mark.parametrize("directory", ["", "another"])
def test_only_the_first_training_shows_how_long_a_start_takes(job: Job, directory: str, tmp_path: Path) -> None:
    job.begins(0)
    job.ends()
    if directory:
        job.join(0, tmp_path / directory)
    else:
        job.comes(0, 1)
    job.attempt.took(0, 10 * IMPORTS * ENTER)
    assert job.machine.slow == ""


def test_exceptions_that_the_script_handles_are_none_that_end_its_training_again_and_again(
    job: Job, tmp_path: Path
) -> None:
    """Pruned trials, say; the launcher would stop the job at the next fault of any kind."""
    for trial in range(LIMIT):
        job.begins(0)
        job.machine.faults.append(FAULT)
        job.attempt.note(RecordPhase(phase="detected"))
        job.attempt.note(RecordPhase(phase="released"))
        assert job.attempt.repeats == Repeats(1, FAULT.cause)
        job.join(0, tmp_path / str(trial))
    assert job.attempt.repeats == Repeats() and not job.machine.weary


@pytest.mark.parametrize("later", [True, False])
def test_what_was_held_in_memory_is_not_lost_with_a_later_training(later: bool, job: Job) -> None:
    """A step of the earlier one was, and that has been trained to its end."""
    job.begins(0)
    job.machine.outcome.step = 8
    job.attempt.note(RecordPhase(phase="detected"))
    job.attempt.note(RecordPhase(phase="released"))
    held = job.attempt
    job.enters_again()
    if later:
        job.ends()
        job.comes(0, 1)
        job.begins(0)
        job.incidents.resumed(0)
    job.join(0, attempt=1)
    job.incidents.resumed(0)
    lost = "step 8 was held in memory alone, and went with the processes: the job went on from step 0"
    assert held.notes == ([] if later else [lost])


def saved(job: Job, step: int, before: int = 0) -> Attempt:
    """Or, if `before` is not 0, not: then that one is on disk, and the fault has cost the steps since."""
    job.machine.outcome.ending, job.machine.outcome.step = ("gave_up", None) if before else ("saved", step)
    job.machine.outcome.lost = step - before if before else 0
    job.machine.members[0].durable = before
    job.attempt.note(RecordPhase(phase="detected"))
    job.attempt.note(RecordPhase(phase="released"))
    return job.attempt


@pytest.mark.parametrize("on_disk", [8, 5])
def test_a_restart_that_has_its_checkpoints_elsewhere_says_what_that_costs(
    on_disk: int, job: Job, tmp_path: Path
) -> None:
    """A script whose directory has the time of its start in its name: nothing else in the log would tell."""
    job.begins(0)
    faulty = saved(job, 8, 0 if on_disk == 8 else on_disk)
    job.join(0, tmp_path / "11-20-15", attempt=1)
    for _rank in range(2):
        job.incidents.resumed(0)
    [note] = faulty.notes
    assert note.startswith(f"step {on_disk} was saved in {tmp_path}, but the restarted script has its checkpoints in ")
    assert "went on from step 0" in note
    assert faulty.incident is not None and faulty.incident.steps_lost == 8


@pytest.mark.parametrize("finds", [8, 0])
def test_other_directories_of_a_job_are_no_loss(finds: int, job: Job, tmp_path: Path) -> None:
    """Two trainings with a directory each: after a fault in the second one, the script begins with the first again."""
    job.begins(0)
    job.ends()
    job.join(0, tmp_path / "second")
    job.begins(0)
    faulty = saved(job, 8)
    job.join(0, tmp_path if finds == 0 else tmp_path / "second", attempt=1)
    job.incidents.resumed(finds)
    assert faulty.notes == []


def test_a_controller_in_another_ones_place_counts_the_same_exception_on(tmp_path: Path) -> None:
    """A job of one host has grown, and its launcher has begun another controller, which other hosts can reach."""
    with closing(RecordWriter()) as writer:
        incidents = Incidents(writer)
        incidents.before = Repeats(LIMIT - 1, FAULT.cause)
        job = Job(incidents, tmp_path)
        assert job.machine.weary
        job.begins(0)
        job.machine.faults.append(FAULT)
        job.attempt.note(RecordPhase(phase="detected"))
        job.attempt.note(RecordPhase(phase="released"))
        assert job.attempt.repeats.hopeless


def test_each_fault_counts_where_others_follow_before_a_new_step(job: Job) -> None:
    job.begins(0)
    job.reaches(8)
    faulty = []
    for incarnation in (1, 2):
        job.attempt.note(RecordPhase(phase="detected"))
        job.attempt.note(RecordPhase(phase="released"))
        assert job.attempt.incident is not None
        job.attempt.incident.id = str(incarnation)  # by the millisecond
        faulty.append(job.attempt)
        job.machine.again = AGAIN
        job.join(incarnation)
        job.begins(8, entered=True)
        job.reaches(8)
        job.incidents.reached(8)
    job.reaches(9)
    job.incidents.reached(9)
    phases = [one.incident.phases for one in faulty if one.incident is not None]
    first, second = phases
    assert first.first_step is not None and first.first_step == second.first_step
    tally = job.incidents.tally
    assert (tally.survived, tally.lost_ns) == (2, first.first_step - (first.detected or 0))
