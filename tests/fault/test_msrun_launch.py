"""`lastgasp run --framework mindspore` with the real msrun: when it holds, restarts and stops, and with which code."""

from __future__ import annotations

import json
import signal
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lastgasp import exitcodes
from lastgasp.events import Incident, decode_incident
from lastgasp.testing.jobs import MARK, Finished, kill_marked, marked
from support.mindspore import place
from support.mindspore.job import Job
from support.waiting import until

TOY = place.HERE / "toy_rank.py"
LIMIT = 300.0
BOTH = [place.MAIN, pytest.param(place.OLD, marks=pytest.mark.full)]

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


def job(folder: Path, *arguments: object, version: str = place.MAIN, ranks: int = 2) -> Job:
    """Toy ranks, whose state goes to `d` in `folder`."""
    words = [str(folder / "d"), *map(str, arguments)]
    return Job(folder=folder, ranks=ranks, launcher="run", version=version, script=TOY, arguments=words)


def finish(started: Job, **variables: str) -> Finished:
    """Run it to its end; nothing of it may be left."""
    done = started.run(variables, timeout=LIMIT)
    assert done.left == (), done.output[-4000:]
    return done


def incidents(folder: Path) -> list[Incident]:
    """All records, oldest first."""
    found = [decode_incident(path.read_bytes()) for path in (folder / "d/incidents").glob("*.json")]
    return sorted(found, key=lambda incident: incident.id)


def told(folder: Path, attempt: int) -> list[dict[str, object]]:
    """What each rank of an attempt wrote about itself."""
    return [json.loads(path.read_text()) for path in sorted((folder / "d").glob(f"rank-*-{attempt}"))]


@contextmanager
def running(started: Job, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job that the test does things to; afterwards no process of it is left."""
    mark = uuid.uuid4().hex
    started.prepare()
    environ = started.environment() | variables | {MARK: mark}
    with (started.folder / "log").open("wb") as log:
        process = subprocess.Popen(started.command(), env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield process
        until(lambda: not list(marked(MARK, mark)), "no process left")
    finally:
        kill_marked(MARK, mark)
        process.wait()


# -- restart ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", BOTH)
def test_survivors_save_all_restart_and_a_job_that_always_fails_is_stopped(tmp_path: Path, version: str) -> None:
    done = finish(job(tmp_path, "die", 3, version=version))
    assert done.returncode == exitcodes.NO_PROGRESS, done.output[-4000:]
    assert "lastgasp: stopped: 3 restarts in a row completed no new step" in done.output
    assert [len(told(tmp_path, attempt)) for attempt in range(5)] == [2, 2, 2, 2, 0]
    first = incidents(tmp_path)[0]
    assert (first.ending, first.step_saved, first.faults[0].rank) == ("saved", 3, 1)
    controllers = {rank["LASTGASP_CONTROLLER"] for attempt in range(4) for rank in told(tmp_path, attempt)}
    assert len(controllers) == 1 and None not in controllers
    assert {rank["LASTGASP_LAUNCHER"] for rank in told(tmp_path, 0)} == {"run"}
    logs = sorted(path.name for path in (tmp_path / "msrun").glob("worker_*"))
    assert logs == [f"worker_{rank}.attempt{attempt}.log" for rank in (0, 1) for attempt in range(4)]
    assert done.output.count("rank 0 runs") == 4, "the logs are shown to their end"


def test_a_job_that_asks_for_no_restart_ends_with_the_save(tmp_path: Path) -> None:
    done = finish(job(tmp_path, "die", 3), LASTGASP_RECOVERY="save")
    assert done.returncode == exitcodes.SAVED, done.output[-4000:]
    assert "as recovery=save asks" in done.output
    [incident] = incidents(tmp_path)
    assert (incident.ending, incident.step_saved, incident.not_in_place) == ("saved", 3, "recovery=save")
    assert not told(tmp_path, 1)


@pytest.mark.full
def test_the_hold_is_as_long_as_the_save(tmp_path: Path) -> None:
    """msrun itself would kill the survivor about a second after the first failure."""
    done = finish(job(tmp_path, "die", 2), TOY_OPTIONS='{"save_seconds": 3.0}')
    assert done.returncode == exitcodes.NO_PROGRESS, done.output[-4000:]
    first = incidents(tmp_path)[0]
    assert (first.ending, first.step_saved, first.savers) == ("saved", 2, [0])


@pytest.mark.full
def test_a_script_that_cannot_even_start_is_stopped_and_its_traceback_shown(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import no_such_module_at_all\n")
    done = finish(Job(folder=tmp_path, launcher="run", script=script))
    assert done.returncode == exitcodes.NO_PROGRESS, done.output[-4000:]
    assert done.output.count("No module named 'no_such_module_at_all'") >= 2, "one in each attempt"


def test_a_rank_that_refuses_is_not_started_again(tmp_path: Path) -> None:
    script = tmp_path / "refuses.py"
    script.write_text("from lastgasp.errors import ConfigError\nraise ConfigError('a', 1, '2', 'Do that.')\n")
    done = finish(Job(folder=tmp_path, launcher="run", script=script))
    assert done.returncode == exitcodes.REFUSED, done.output[-4000:]
    assert "a=1 is not allowed: expected 2. Do that." in done.output
    assert done.output.count("Start worker") == 2


@pytest.mark.full
def test_a_scheduler_that_has_died_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/scheduler-ends").touch()
    done = finish(job(tmp_path, "die", 1))
    assert done.returncode == exitcodes.NO_PROGRESS, done.output[-4000:]
    assert len(list((tmp_path / "d").glob("scheduler-[0-9]*"))) >= 2


CRASHES = """
import os, signal, sys, time
from pathlib import Path
folder, rank, attempt = Path(sys.argv[1]), os.environ.get("RANK_ID"), os.environ.get("LASTGASP_ATTEMPT")
if os.environ["MS_ROLE"] == "MS_SCHED":
    (folder / f"scheduler-{os.getpid()}").touch()
    while not (folder / "over").exists():
        time.sleep(0.02)
elif rank == "1":
    (folder / f"one-{os.getpid()}").touch()
elif attempt == "1":
    until = time.monotonic() + 60
    while len(list(folder.glob("scheduler-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    (folder / "over").touch()
else:
    while not (list(folder.glob("one-*")) and list(folder.glob("scheduler-*"))):
        time.sleep(0.02)
    [other] = folder.glob("one-*")
    stat = Path("/proc", other.name[4:], "stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.full
def test_a_scheduler_that_a_rank_has_left_is_not_the_next_attempts(tmp_path: Path) -> None:
    """Rank 0 crashes when training is over and rank 1 has ended: the scheduler is about to end, too."""
    script, folder = tmp_path / "crashes.py", tmp_path / "d"
    script.write_text(CRASHES)
    folder.mkdir()
    done = finish(Job(folder=tmp_path, launcher="run", script=script, arguments=[str(folder)]))
    assert done.returncode == 0, done.output[-4000:]
    assert "rank 0 killed by SIGSEGV" in done.output
    assert len(list(folder.glob("scheduler-*"))) == 2


# -- end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_job_that_ends_well_ends_with_0(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/scheduler-ends").touch()
    done = finish(job(tmp_path, "train", 3, ranks=ranks))
    assert done.returncode == 0, done.output[-4000:]
    assert len(told(tmp_path, 0)) == ranks and not told(tmp_path, 1)
    assert sorted(path.name for path in (tmp_path / "msrun").glob("worker_*")) == [
        f"worker_{rank}.log" for rank in range(ranks)
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_told_to_stop_the_job_saves_and_says_so(tmp_path: Path, number: signal.Signals) -> None:
    with running(job(tmp_path, "stuck", 4)) as process:
        until(lambda: len(list((tmp_path / "d").glob("stepped-*-0"))) == 2, "both ranks have stepped")
        process.send_signal(number)  # `env` has become the launcher
        assert process.wait(LIMIT) == exitcodes.SAVED, (tmp_path / "log").read_text()[-4000:]
    assert [(i.ending, i.step_saved) for i in incidents(tmp_path)] == [("saved", 4)]
    assert not told(tmp_path, 1)


@pytest.mark.full
def test_a_graceful_exit_is_asked_for_by_reset_json(tmp_path: Path) -> None:
    reset = tmp_path / "reset.json"
    with running(job(tmp_path, "stuck", 2), LASTGASP_RESET_FILE=str(reset)) as process:
        until(lambda: len(list((tmp_path / "d").glob("stepped-*-0"))) == 2, "both ranks have stepped")
        reset.write_text('{"GracefulExit": 1}')
        assert process.wait(LIMIT) == exitcodes.SAVED, (tmp_path / "log").read_text()[-4000:]
