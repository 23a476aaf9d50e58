"""What a job has learned about its recoveries in place: which of them would cost it more time than a restart."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from lastgasp.events import Fault, FaultKind
from lastgasp.gasp import messages as m
from lastgasp.gasp.again import Again
from lastgasp.gasp.attempt import ENTER, IMPORTS, Attempt
from lastgasp.gasp.incidents import NOBODY, Incidents
from lastgasp.gasp.ladder import Ladder
from lastgasp.gasp.process_monitor import ProcessMonitor
from lastgasp.gasp.records import RecordWriter
from support.switch_job import hello


def ladder(attempt: Attempt) -> Ladder:
    """Its machine."""
    assert isinstance(attempt.machine, Ladder)
    return attempt.machine


@pytest.mark.parametrize(
    ("incarnation", "kind", "reached", "unwise"),
    [
        pytest.param(1, "hang", 7, "rank 1 hung in an earlier recovery in place of this job", id="hung"),
        pytest.param(1, "exception", 7, "", id="raised"),
        pytest.param(1, "hang", 8, "", id="hung later"),
        pytest.param(0, "hang", 7, "", id="hung before any"),
        pytest.param(1, "killed", 7, "", id="killed"),
    ],
)
def test_one_that_led_to_no_step_is_the_last(
    incarnation: int, kind: FaultKind, reached: int, unwise: str, tmp_path: Path
) -> None:
    with closing(RecordWriter()) as writer:
        incidents = Incidents(writer)
        found = incidents.begin(hello(0, 2, attempt=0, directory=str(tmp_path)))
        if incarnation:
            found = entered(incidents, found)
        ended(found, kind, reached)
        for attempt in (1, 2):
            found = incidents.begin(hello(0, 2, attempt=attempt, directory=str(tmp_path)))
            assert ladder(found).unwise == unwise


@pytest.mark.parametrize("between", [7, 8], ids=["twice in a row", "a good one in between"])
def test_what_raises_again_is_given_a_second_chance(between: int, tmp_path: Path) -> None:
    """The file server of the first time is back a minute later."""
    with closing(RecordWriter()) as writer:
        incidents = Incidents(writer)
        for attempt in range(2):
            found = incidents.begin(hello(0, 2, attempt=2 * attempt, directory=str(tmp_path)))
            assert ladder(found).unwise == ""
            ended(entered(incidents, found), "exception", 7)
            found = incidents.begin(hello(0, 2, attempt=2 * attempt + 1, directory=str(tmp_path)))
            if attempt == 0:
                ended(found, "killed", 9)
                ended(entered(incidents, found), "killed", between)
        twice = "in the last two recoveries in place of this job a rank raised an exception"
        assert ladder(found).unwise == (twice if between == 7 else "")


def entered(incidents: Incidents, before: Attempt) -> Attempt:
    """The next incarnation."""
    ladder(before).again = Again(incarnation=1, step=7, source=0, takers=(1,), lost=(), port=1)
    return incidents.begin(msgspec.structs.replace(before.hello, incarnation=1))


def ended(found: Attempt, kind: FaultKind, reached: int) -> None:
    """It has begun with step 7, came so far, and rank 1 failed."""
    found.heard_step(0, m.Begin(step=7, durable=0, buffer_fd=-1))
    found.heard_step(0, m.Status(step=reached, durable=0, tick=1, phase="data"))
    ladder(found).faults.append(Fault(kind=kind, rank=1, cause="", step=7, seen_ns=1))


def test_one_from_which_no_rank_came_back_is_the_last(tmp_path: Path) -> None:
    with closing(RecordWriter()) as writer:
        incidents = Incidents(writer)
        found = incidents.begin(hello(0, 2, attempt=0, directory=str(tmp_path)))
        ladder(found).again = Again(incarnation=1, step=7, source=0, takers=(1,), lost=(1,), port=1)
        assert ladder(incidents.begin(hello(0, 2, attempt=0, incarnation=1, directory=str(tmp_path)))).unwise == ""
        failed = incidents.current
        assert failed is not None
        ladder(failed).again = ladder(found).again
        why = "no rank came back in an earlier recovery in place of this job"
        assert ladder(incidents.begin(hello(0, 2, attempt=1, directory=str(tmp_path)))).unwise == why
        assert (found.notes, failed.notes) == ([], [NOBODY]), "its record said in_place, and nothing else"


@pytest.mark.parametrize("between", [7, 8], ids=["no step", "a step in between"])
def test_ranks_that_are_killed_before_there_is_a_step_are_replaced_once(between: int, tmp_path: Path) -> None:
    with closing(RecordWriter()) as writer:
        incidents = Incidents(writer)
        found = incidents.begin(hello(0, 2, attempt=0, directory=str(tmp_path)))
        ended(found, "killed", 7)
        found = entered(incidents, found)
        assert not ladder(found).in_vain, "training had begun with that step, and was not entered again"
        ended(found, "killed", between)
        ladder(found).again = Again(incarnation=2, step=7, source=0, takers=(1,), lost=(), port=1)
        found = incidents.begin(msgspec.structs.replace(found.hello, incarnation=2))
        assert ladder(found).in_vain == (between == 7)


def test_after_a_rank_that_did_not_leave_its_training_nothing_is_answered_in_place(tmp_path: Path) -> None:
    with closing(RecordWriter()) as writer:
        incidents = Incidents(writer)
        found = incidents.begin(hello(0, 2, attempt=0, directory=str(tmp_path)))
        ladder(found).stayed = (1,)
        for _ in range(2):
            found = entered(incidents, found)
            assert ladder(found).unwise == "rank 1 hung in an earlier recovery in place of this job"


def test_a_new_process_that_would_start_for_too_long_is_known_until_the_restart(tmp_path: Path) -> None:
    with closing(RecordWriter()) as writer:
        incidents = Incidents(writer)
        first = incidents.begin(hello(0, 2, attempt=0, directory=str(tmp_path)))
        limit = first.hello.finish_timeout + ENTER
        first.took(1, IMPORTS * limit)
        assert ladder(first).slow == ""
        first.took(0, IMPORTS * limit + 1)
        took = f"rank 0 took {IMPORTS * limit + 1:.0f} s from its start until it trained"
        why = f"{took}, and a new process has {limit:.0f} s"
        assert ladder(first).slow == why
        again = incidents.begin(hello(0, 2, attempt=0, incarnation=1, directory=str(tmp_path)))
        again.took(1, 9000.0)  # it has trained before
        assert ladder(again).slow == why
        assert ladder(incidents.begin(hello(0, 2, attempt=1, directory=str(tmp_path)))).slow == ""


def test_the_age_of_a_process() -> None:
    watch = ProcessMonitor(lambda rank, pid, evidence, at: None)
    with closing(watch):
        watch.watch(0, os.getpid())
        watch.watch(1, 1)
        assert 0 < watch.age(0) <= watch.age(1)
        assert watch.age(2) == 0.0
