"""The lines that a person reads while a job runs."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lastgasp import logs
from lastgasp.events import Fault, FaultKind, Incident, Phases
from lastgasp.narration import Tally, event, started, whence


def fault(kind: FaultKind, rank: int = 0, cause: str = "", step: int = 33) -> Fault:
    """One of a rank that had completed step 33."""
    return Fault(kind=kind, rank=rank, cause=cause, step=step, seen_ns=0)


def incident(*faults: Fault, **more: object) -> Incident:
    """Of two ranks."""
    fields = {"id": "1", "job": "j", "attempt": 0, "world_size": 2, "faults": list(faults)} | more
    return Incident(**fields)  # type: ignore[arg-type]


SAVED = {"ending": "saved", "step_saved": 33, "savers": [1], "steps_lost": 0}


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            incident(
                fault("killed", cause="its process is exiting (killed by SIGKILL)"),
                fault("peer", 1, "RuntimeError: Connection closed by peer"),
                phases=Phases(fault=1_000_000, committed=32_000_000),
                **SAVED,
            ),
            "rank 0 was killed (SIGKILL) in step 34; step 33 saved by rank 1 in 31 ms",
        ),
        (
            incident(
                fault("exception", 1, "ValueError: no such file"), ending="gave_up", reason="no holder", steps_lost=2
            ),
            "rank 1 raised ValueError: no such file in step 34; the step could NOT be saved: no holder, 2 steps lost",
        ),
        (
            incident(fault("sigterm"), fault("sigterm", 1), ending="nothing_to_save", reason="step 33 is on disk"),
            "all ranks were asked to stop (SIGTERM); step 33 is on disk",
        ),
        (
            incident(fault("exit", cause="process 7 died (exited with code 3)"), **(SAVED | {"savers": [0, 1]})),
            "rank 0 in step 34 ended in the middle of training (exited with code 3); step 33 saved by 2 ranks",
        ),
        (
            incident(
                fault("exit", 1, cause="process 7 died (exited with code 1)", step=-1),
                ending="nothing_to_save",
                reason="training had not begun",
            ),
            "rank 1 ended while it was starting (exited with code 1); training had not begun",
        ),
        (
            incident(
                fault("exception", cause="RuntimeError: size mismatch for weight", step=-1),
                ending="nothing_to_save",
                reason="training had not begun",
            ),
            "rank 0 raised an exception while it was starting (RuntimeError: size mismatch for weight); "
            "training had not begun",
        ),
        (
            incident(fault("killed", cause="killed by SIGKILL", step=30), **SAVED),
            "rank 0 was killed (SIGKILL), last heard of in step 31; step 33 saved by rank 1",
        ),
        (
            incident(fault("exception", cause="ValueError: x", step=30), **SAVED),
            "rank 0 raised ValueError: x in step 31; step 33 saved by rank 1",
        ),
        (
            incident(fault("killed", 1, cause="on hb: its connection closed, killed by SIGKILL"), **SAVED),
            "rank 1 on hb was killed (SIGKILL) in step 34; step 33 saved by rank 1",
        ),
        (
            incident(fault("lost", 1, cause="on hb: its connection broke: timed out"), **SAVED),
            "rank 1 on hb in step 34 was lost with its host or link (its connection broke: timed out); "
            "step 33 saved by rank 1",
        ),
        (incident(), "a fault that left no trace; the recovery has not ended"),
    ],
)
def test_an_event_is_one_line(record: Incident, line: str) -> None:
    assert event(record) == line


def test_many_faults_and_long_causes_are_still_one_line() -> None:
    record = incident(*[fault("killed", rank, "x" * 1000) for rank in range(5)], world_size=8, **SAVED)
    line = event(record)
    assert line.count("x" * 200 + "...") == 3 and "x" * 201 not in line and ", and 2 more; " in line


def test_the_start_line_says_from_what() -> None:
    assert started("1.0", 1, "embedded engine", "/c", whence(0, True)).endswith(
        "1 rank, embedded engine; checkpoints in /c; starts from scratch"
    )
    assert started("1.0", 8, "ascend engine", "/c", whence(7, True)).endswith(
        "8 ranks, ascend engine; checkpoints in /c; resumes from step 7"
    )
    assert (whence(9, False), whence(0, False)) == ("its first step is 10", "its first step is 1")


@pytest.mark.parametrize(("recovery", "said"), [("", "restart"), ("auto", "auto"), ("save", "save")])
def test_the_start_line_says_how_faults_are_answered(recovery: str, said: str) -> None:
    line = started("1.0", 2, "embedded engine", "/c", whence(0, True), recovery)
    assert line.endswith(f"starts from scratch; recovery={said}")


def test_ranks_that_are_taken_in_are_no_fault() -> None:
    phases = Phases(detected=1_000_000_000, first_step=2_000_000_000)
    record = incident(ending="in_place", rung="grow", step_saved=8, steps_lost=0, phases=phases)
    assert event(record) == "step 8 is held in memory; ranks that were missing are taken in, all other processes stay"
    tally = Tally()
    tally.went_on(record)
    assert tally.summary("done") == "done at step 0; 0 faults survived"


def test_a_fault_is_survived_once_a_step_was_completed_after_it() -> None:
    tally, record = Tally(), incident(fault("killed"), phases=Phases(fault=1_000_000_000))
    tally.reached(33)
    tally.went_on(record)
    assert tally.summary("stopped") == "stopped at step 33; 0 faults survived"
    record.phases.first_step = 3_500_000_000
    for _ in range(2):
        tally.went_on(record)
    tally.reached(40)
    assert tally.summary("done") == "done at step 40; 1 fault survived, 2.5 s lost to them"


@contextmanager
def unconfigured() -> Iterator[logging.Logger]:
    """lastgasp's own logger, as a program that has not configured logging finds it. Not a fixture: while a test's body
    runs, pytest has handlers of its own at the root."""
    found, root = logging.getLogger("lastgasp"), logging.getLogger()
    before = found.level, found.handlers[:], root.handlers[:]
    found.handlers[:], root.handlers[:] = [], []
    found.setLevel(logging.NOTSET)
    try:
        yield found
    finally:
        found.handlers[:], root.handlers[:] = before[1:]
        found.setLevel(before[0])


def test_lines_have_time_and_rank_where_nobody_has_configured_logging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with unconfigured() as logger:
        logs.set_up()
        logs.set_up()
        logging.getLogger("lastgasp.controller").info("step saved")
        logger.debug("too much")
    line = capsys.readouterr().err
    assert line.startswith("[lastgasp ") and line.endswith(" rank 3] step saved\n") and line.count("\n") == 1


def test_a_program_that_configured_logging_gets_the_records_and_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where they do it later than lastgasp."""
    stream = io.StringIO()
    with unconfigured() as logger:
        logs.set_up()
        logging.getLogger().addHandler(logging.StreamHandler(stream))
        logger.info("step saved")
    assert (stream.getvalue(), capsys.readouterr().err) == ("step saved\n", "")


def test_an_invalid_value_is_reported_and_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LASTGASP_LOG", "verbose")
    with unconfigured():
        logs.set_up()
    assert "LASTGASP_LOG=verbose is not known and counts as normal; allowed: quiet, normal" in capsys.readouterr().err


def test_json_lines_can_be_parsed() -> None:
    code = "import logging\nfrom lastgasp import logs\nlogs.set_up()\nlogging.getLogger('lastgasp').info('a \"b\"')"
    env = {"LASTGASP_LOG": "json", "PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=90, check=True)
    assert json.loads(done.stderr) | {"time": 0} == {
        "time": 0, "level": "info", "logger": "lastgasp", "rank": None, "message": 'a "b"',
    }  # fmt: skip
