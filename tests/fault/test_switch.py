"""The switch and `ps` on real ranks over real connections: acknowledged, as asked, and in no recovery's way."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lastgasp import exitcodes
from lastgasp.errors import ControlError
from lastgasp.gasp import messages as m
from lastgasp.gasp.operator import OperatorLink
from lastgasp.gasp.rundir import JobFile, running_jobs
from lastgasp.gasp.serve import Endpoint, start_detached
from lastgasp.steps import bits
from lastgasp.steps.bits import ALL, COMM, DEFAULT_ON
from lastgasp.steps.recover import recover_orphans
from lastgasp.testing.jobs import run_job
from support import taskd_reader
from support.engine_job import ToyJob
from support.taskd_reader import Row
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.fault

SWITCHES = 200
WORLD = 4
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A runtime directory of the test's own, a switch file that is not there, and a directory for checkpoints."""
    (tmp_path / "job").mkdir()
    monkeypatch.setenv("LASTGASP_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("LASTGASP_SWITCH_FILE", str(tmp_path / "switch"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MINDX_TASK_ID", raising=False)
    monkeypatch.setattr("lastgasp.gasp.operator.MARGIN", PATIENCE)
    yield
    recover_orphans(PATIENCE)  # as a launcher does for the ranks that were killed


def lastgasp(*arguments: str, code: int = 0) -> dict[str, Any]:
    """The command as a process of its own, with --json."""
    command = [sys.executable, "-m", "lastgasp", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == code, (done.stdout, done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def operator(job: ToyJob) -> OperatorLink:
    """Connect to the job's controller."""
    assert job.endpoint is not None
    return OperatorLink(job.endpoint.address, job.endpoint.token, PATIENCE)


def announced(endpoint: Endpoint, job: str = "") -> JobFile:
    """The file of this controller, once it is there, with this job's name."""

    def found() -> list[JobFile]:
        return [file for file in running_jobs() if (file.address, file.job) == (endpoint.address, job)]

    until(lambda: len(found()) == 1 == len(running_jobs()), f"the file of job {job!r}")
    return found()[0]


# -- 200 switches ----------------------------------------------------------------------------------


@dataclass
class Book:
    """What was asked, and for each rank and bit the spans of time (monotonic ns) in which it was off for certain."""

    masks: list[int]
    since: dict[tuple[int, int], int] = field(default_factory=dict)
    off: dict[tuple[int, int], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))

    def asked(self, ranks: list[int], on: int, now: int) -> None:
        """From now on bits of `on` may be on again."""
        for rank in ranks:
            for bit in (bit for bit in bits.SHORT.values() if on & bit):
                begin = self.since.pop((rank, bit), None)
                if begin is not None:
                    self.off[rank, bit].append((begin, now))

    def acknowledged(self, ranks: list[int], on: int, off: int, now: int) -> None:
        """By now it is done."""
        for rank in ranks:
            self.masks[rank] = (self.masks[rank] | on) & ~off
            for bit in (bit for bit in bits.SHORT.values() if off & bit):
                self.since.setdefault((rank, bit), now)


def switch_at_random(job: ToyJob, book: Book, dice: random.Random) -> None:
    """200 times: some bits on, some off, on some ranks or all of them; a new connection every tenth time."""
    link = operator(job)
    for number in range(SWITCHES):
        if number % 10 == 9:
            link.close()
            link = operator(job)
        on = dice.randint(0, ALL)
        off = dice.randint(0, ALL) & ~on
        if not on | off:
            off = ALL
        chosen = None if dice.random() < 0.5 else dice.sample(range(WORLD), dice.randint(1, WORLD))
        ranks = sorted(chosen) if chosen is not None else list(range(WORLD))
        book.asked(ranks, on, time.monotonic_ns())
        done = link.switch(chosen, on, off, wait=PATIENCE)
        book.acknowledged(ranks, on, off, time.monotonic_ns())
        assert [(one.rank, one.why) for one in done.results] == [(rank, "") for rank in ranks]
        assert [one.mask for one in done.results] == [book.masks[rank] for rank in ranks]
    link.close()


def kind_of(row: Row) -> int:
    """Which bit the range of a host start row belongs to."""
    if row["Domain"] == "communication":
        return COMM
    return bits.BIT_OF_MARK[re.sub(r" \d+$", "", row["Name"])]


def begins(rows: Iterator[Row]) -> Iterator[tuple[int, int]]:
    """Bit and begin (ns since the epoch) of each range; every Id has all its rows, once, in order."""
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["Id"]].append(row)
    for group in groups.values():
        stream = [(16, 0), (16, 1), (32, 0), (32, 1)]
        expected = stream if group[0]["Flag"] == 16 else [(2, 0), (4, 0)]
        assert [(row["Flag"], row["SourceKind"]) for row in group] == expected, group
        assert group[0]["Name"] and not any(row["Name"] for row in group[1:]), group
        yield kind_of(group[0]), group[0]["Timestamp"]


def test_200_switches_of_5_bits_on_4_training_ranks(tmp_path: Path) -> None:
    book, dice, halt = Book([DEFAULT_ON] * WORLD), random.Random(3), tmp_path / "halt"
    with ToyJob(tmp_path / "job", WORLD, profiling=str(tmp_path / "rows")) as job:
        for rank in job.ranks:
            rank.tell(f"loop {halt}")
        switch_at_random(job, book, dice)
        with operator(job) as link:
            book.asked(list(range(WORLD)), ALL, time.monotonic_ns())
            link.switch(None, ALL, 0, wait=PATIENCE)
            book.masks = [ALL] * WORLD
            until(lambda: [row.marks for row in link.ranks().rows] == book.masks, "heartbeats tell the marks")
            table = link.ranks()
        halt.touch()
        ended = [rank.wait_for("looped") for rank in job.ranks]
        for rank in job.ranks:
            rank.tell("done")
        assert [rank.code() for rank in job.ranks] == [0] * WORLD
    assert [row.state for row in table.rows] == ["running"] * WORLD
    assert all(row.step is not None and row.step > 0 for row in table.rows)
    assert [(rank["written"], rank["dropped"]) for rank in ended] == [(True, 0)] * WORLD
    rows = tmp_path / "rows" / f"default_task_id_{table.started_s}"
    for number in range(WORLD):
        check_rows(rows / str(number), book, number, ended[number])


def check_rows(directory: Path, book: Book, rank: int, ended: dict[str, Any]) -> None:
    """Whole ranges only; none that began while its bit was off for certain; of each kind some."""
    found: dict[int, int] = defaultdict(int)
    for bit, begin in begins(taskd_reader.rows(directory)):
        found[bit] += 1
        at = begin - ended["wall_offset"]
        wrong = [span for span in book.off[rank, bit] if span[0] < at < span[1]]
        assert wrong == [], f"rank {rank}: a range of {bits.describe(bit)} began at {at}, switched off in {wrong}"
    assert set(found) == set(bits.SHORT.values())
    assert taskd_reader.read(directory).open == {}, "TaskD's reader finds every range complete, too"
    assert all(count <= ended["step"] for count in found.values())
    assert sum(len(book.off[rank, bit]) for bit in found) > SWITCHES / 10, "the dice did switch off and on"


# -- who does not answer ---------------------------------------------------------------------------


def pass_by(job: ToyJob, seconds: float) -> None:
    """For the timers of the controller's loop so much time has passed."""
    assert job.thread is not None
    vars(job.thread._loop)["time"] = lambda: time.monotonic() + seconds


def test_a_stopped_rank_is_named_within_the_deadline_and_gets_its_order_late(tmp_path: Path) -> None:
    with ToyJob(tmp_path / "job", 3, profiling=str(tmp_path / "rows")) as job:
        job.ranks[1].signal(signal.SIGSTOP)
        command = [sys.executable, "-m", "lastgasp", "switch", "comm=on", "--wait", "600", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
            with operator(job) as link:
                until(lambda: [link.ranks().rows[r].marks for r in (0, 2)] == [ALL] * 2, "ranks 0 and 2 have switched")
            pass_by(job, 600.0)
            out, _ = asking.communicate(timeout=PATIENCE)
        document = json.loads(out)
        assert (asking.returncode, document["acknowledged"]) == (1, False)
        assert [(rank["rank"], rank["acknowledged"], rank["why"]) for rank in document["ranks"]] == [
            (0, True, ""),
            (1, False, "no answer within 600 s"),
            (2, True, ""),
        ]
        with operator(job) as link:
            assert [row.state for row in link.ranks().rows] == ["running"] * 3
            job.ranks[1].signal(signal.SIGCONT)
            done = link.switch([1], 0, bits.STEP, wait=PATIENCE)
            assert [one.mask for one in done.results] == [ALL & ~bits.STEP], "the late order was carried out first"
        assert not (tmp_path / "job" / "incidents").exists()
        for rank in job.ranks:
            rank.tell("done")
        assert [rank.code() for rank in job.ranks] == [0] * 3


def test_the_file_and_the_command_in_a_running_rank(tmp_path: Path) -> None:
    file = tmp_path / "switch"
    with ToyJob(tmp_path / "job", 1, profiling=str(tmp_path / "rows")) as job, operator(job) as link:

        def marks() -> int | None:
            return link.ranks().rows[0].marks

        file.write_text(json.dumps(dict.fromkeys(bits.TASKD, "off")))
        until(lambda: marks() == 0, "the file switches everything off")
        assert link.switch(None, COMM, 0, wait=PATIENCE).results[0].mask == COMM
        file.write_text("{garbled")
        until(lambda: marks() == COMM, "heartbeats tell the command's mask")
        file.write_text(json.dumps({"Step": "on"}))
        until(lambda: marks() == COMM | bits.STEP, "a missing key keeps its bit")
        job.ranks[0].tell("done")
        assert job.ranks[0].code() == 0


# -- operators and faults --------------------------------------------------------------------------


def test_operators_while_a_recovery_is_on(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    with ToyJob(tmp_path / "job", 3, save_until=str(asked), profiling=str(tmp_path / "rows")) as job:
        job.step(1)
        job.stuck(0, 1)
        with operator(job) as link:
            job.ranks[2].signal(signal.SIGKILL)
            job.ranks[0].wait_for("save")
            table = link.ranks()
            done = link.switch(None, COMM, 0, wait=PATIENCE)
        asked.touch()
        with operator(job) as careless:  # goes in the middle of its question
            careless.send(m.AskSwitch(ranks=None, on=COMM, off=0, wait=600.0))
        assert [job.ranks[r].code() for r in (0, 1)] == [exitcodes.SAVED] * 2
        incident = job.incident()
    assert table.state == "recovering"
    assert [row.state for row in table.rows] == ["running", "running", "dead"]
    words = ("SIGKILL", "exiting", "closed", "died")  # of whoever saw it first
    assert any(word in table.rows[2].why for word in words), table.rows[2].why
    assert [one.mask for one in done.results] == [ALL, ALL, None]
    assert done.results[2].why.startswith("gone: ")
    assert job.saved() == ["step-1.toy"]
    assert [(fault.kind, fault.rank) for fault in incident.faults] == [("killed", 2)]


def test_a_rank_that_dies_before_it_answers(tmp_path: Path) -> None:
    with ToyJob(tmp_path / "job", 2, profiling=str(tmp_path / "rows")) as job:
        job.step(1)
        job.stuck(0)
        job.ranks[1].signal(signal.SIGSTOP)
        command = [sys.executable, "-m", "lastgasp", "switch", "comm=on", "--wait", "600", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
            with operator(job) as link:  # rank 0 has acknowledged, so rank 1 has its order, too
                until(lambda: link.ranks().rows[0].marks == ALL, "rank 0 has switched")
            job.ranks[1].signal(signal.SIGKILL)
            out, _ = asking.communicate(timeout=PATIENCE)
        assert asking.returncode == 1
        assert json.loads(out)["ranks"][1]["why"].startswith("gone: ")
        assert job.ranks[0].code() == exitcodes.SAVED


def test_a_stranger_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ToyJob(tmp_path / "job", 1, profiling=str(tmp_path / "rows")) as job:
        assert job.endpoint is not None
        monkeypatch.setenv("LASTGASP_TOKEN", "0" * 64)
        command = [sys.executable, "-m", "lastgasp", "switch", "comm=on", "--controller", job.endpoint.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 1
        assert "wrong token" in done.stderr and job.endpoint.token not in done.stderr + done.stdout
        monkeypatch.setenv("LASTGASP_TOKEN", job.endpoint.token)
        document = lastgasp("switch", "step=off", "--controller", job.endpoint.address)
        assert document["ranks"][0]["marks"] == ["forward", "dataloader", "save"], "comm stayed off"
        job.ranks[0].tell("done")
        assert job.ranks[0].code() == 0


# -- where the controller lives --------------------------------------------------------------------


def test_ps_of_a_detached_controller_from_its_start_to_its_end(tmp_path: Path) -> None:
    endpoint = start_detached()
    announced(endpoint)
    [waiting] = lastgasp("ps")["jobs"]
    assert (waiting["state"], waiting["controller"], waiting["ranks"]) == ("waiting", endpoint.address, [])
    with ToyJob(tmp_path / "job", 2, endpoint=endpoint, profiling=str(tmp_path / "rows")) as job:
        job.step(5)

        def both_at_5() -> bool:
            with operator(job) as link:
                return [(row.step, row.marks) for row in link.ranks().rows] == [(5, DEFAULT_ON)] * 2

        until(both_at_5, "both ranks have told their step")
        announced(endpoint, "local")
        [found] = lastgasp("ps", "--job", "local")["jobs"]
        assert (found["job"], found["directory"], found["state"]) == ("local", str(tmp_path / "job"), "running")
        assert found["pid"] != os.getpid() and Path(f"/proc/{found['pid']}").exists()
        assert [(r["rank"], r["state"], r["pid"]) for r in found["ranks"]] == [
            (rank.rank, "running", rank.process.pid) for rank in job.ranks
        ]
        job.ranks[0].tell("done")
        assert job.ranks[0].code() == 0
        [found] = lastgasp("ps")["jobs"]
        assert [rank["state"] for rank in found["ranks"]] == ["left", "running"]
        job.ranks[1].tell("done")
    until(lambda: list((tmp_path / "runtime").iterdir()) == [], "the controller ends and takes its file away")
    assert lastgasp("ps")["jobs"] == []


def test_a_killed_controllers_file_is_cleaned_up(tmp_path: Path) -> None:
    job = announced(start_detached())
    os.kill(job.pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{job.pid}").exists(), "it is gone")
    assert len(list((tmp_path / "runtime").iterdir())) == 1
    assert lastgasp("ps")["jobs"] == []
    assert list((tmp_path / "runtime").iterdir()) == []


def test_a_stopped_controller_is_shown_as_such(tmp_path: Path) -> None:
    endpoint = start_detached()
    file = announced(endpoint)
    os.kill(file.pid, signal.SIGSTOP)
    try:
        with pytest.raises(ControlError, match="broke the greeting off"):
            OperatorLink(endpoint.address, endpoint.token, seconds=0.3)
    finally:
        os.kill(file.pid, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{file.pid}").exists(), "it is gone")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_under_lastgasp_run_over_a_restart(tmp_path: Path) -> None:
    """A job that dies at once in each attempt: ps and switch find every one of them, and nothing afterwards."""
    script = tmp_path / "watch.py"
    script.write_text(WATCH)
    worker = SUPPORT / "launch_worker.py"
    paths = os.pathsep.join(filter(None, [str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")]))
    command = [
        "lastgasp",
        "run",
        "--rdzv-id",
        "watched",
        "--nproc-per-node",
        "2",
        str(script),
        str(worker),
        str(tmp_path),
    ]
    done = run_job(
        [sys.executable, "-m", *command], tmp_path / "log", timeout=400.0, environ=os.environ | {"PYTHONPATH": paths}
    )
    assert done.returncode == exitcodes.NO_PROGRESS, done.output[-4000:]
    seen = [json.loads((tmp_path / f"seen-{attempt}.json").read_text()) for attempt in (0, 1)]
    for attempt, (ps, switch) in enumerate(seen):
        [job] = ps["jobs"]
        assert (job["attempt"], job["state"], job["directory"]) == (attempt, "running", str(tmp_path / "d"))
        assert [rank["state"] for rank in job["ranks"]] == ["running", "running"]
        assert all("nothing is marked on this rank" in rank["why"] for rank in switch["ranks"])
    assert seen[0][0]["jobs"][0]["pid"] == seen[1][0]["jobs"][0]["pid"], "the launcher's process"
    assert seen[0][0]["jobs"][0]["ranks"][0]["pid"] != seen[1][0]["jobs"][0]["ranks"][0]["pid"]
    assert list((tmp_path / "runtime").iterdir()) == []


WATCH = """
import json, os, runpy, subprocess, sys
sys.argv = sys.argv[1:]
folder, attempt = sys.argv[1], os.environ["LASTGASP_ATTEMPT"]
from lastgasp.session import Session
def ask(*words):
    command = [sys.executable, "-m", "lastgasp", *words, "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, timeout=250).stdout)
plain = Session.training_started
def begin(self, step, durable):
    plain(self, step, durable)
    self.gather("begun", b"")
    if self.place.rank == 0 and attempt in "01":
        seen = [ask("ps"), ask("switch", "comm=on")]
        with open(f"{folder}/seen-{attempt}.json", "w") as file:
            json.dump(seen, file)
    self.gather("seen", b"")
Session.training_started = begin
sys.argv = [sys.argv[0], folder + "/d", "die", "1"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
