"""`lastgasp ps` and `lastgasp switch`: which job, what is printed, exit codes, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lastgasp.cli import main
from lastgasp.cli._jobs import Target
from lastgasp.cli.ps import _table
from lastgasp.cli.switch import parse_ranks, parse_settings
from lastgasp.gasp import messages as m
from lastgasp.gasp.rundir import Announcement, running_jobs
from lastgasp.steps.bits import ALL, COMM, DATALOADER, DEFAULT_ON, STEP
from support import switch_job
from support.switch_job import JobHere
from support.waiting import until


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory of the test's own."""
    path = tmp_path / "runtime"
    monkeypatch.setenv("LASTGASP_RUNTIME_DIR", str(path))
    for name in ("LASTGASP_TOKEN", "LASTGASP_CONTROLLER"):
        monkeypatch.delenv(name, raising=False)
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def json_of(done: Result, code: int = 0) -> dict[str, Any]:
    """The document that it printed."""
    assert done.exit_code == code, done.output
    found = json.loads(done.stdout)
    assert found["version"] == 1
    assert isinstance(found, dict)
    return found


@contextmanager
def job_here(world: int, job: str = "job", joined: int | None = None, marked: bool = True) -> Iterator[JobHere]:
    """A job whose file holds its name: a controller writes that after it has welcomed the first rank."""
    with switch_job.job_here(world, joined=joined, job=job, marked=marked) as here:
        file = (here.address, "" if joined == 0 else job)
        until(lambda: file in [(found.address, found.job) for found in running_jobs()], "the file with the job's name")
        yield here


def shown(job: JobHere) -> None:
    """Every rank has been heard."""
    job.until(lambda t: all(row.card is not None and row.marks is not None for row in t.rows if row.state == "running"))


# -- ps --------------------------------------------------------------------------------------------


def test_no_job_is_an_answer() -> None:
    done = run("ps")
    assert (done.exit_code, done.output) == (0, "this user runs no job with a controller on this machine\n")
    assert json_of(run("ps", "--json"))["jobs"] == []


def test_a_table_of_the_ranks() -> None:
    with job_here(3, joined=2, job="digits [v2]") as job:
        shown(job)
        job.ranks[1].processor.close(goodbye=True)
        job.until(lambda t: t.rows[1].state == "left")
        done = run("ps")
    assert done.exit_code == 0
    for words in (
        "digits [v2]  /nowhere",
        "running, attempt 0, 3 ranks, controller 127.0.0.1:",
        f"(process {os.getpid()})",
    ):
        assert words in done.output
    assert re.search(rf"0 .* {os.getpid()} .* cpu .* running .* step forward dataloader save .* s ", done.output)
    assert re.search(r"1 .* left ", done.output) and re.search(r"2 .* awaited ", done.output)
    assert done.output.count("torch 2.13.0") == 1, "the same versions everywhere are told once"


def test_different_versions_are_told_for_each_rank() -> None:
    with job_here(2) as job:
        card = job.table().rows[1].card
        assert card is not None
        card.versions["torch"] = "2.6.0"
        job.ranks[1].processor.register(card)
        job.until(lambda t: t.rows[1].card == card)
        done = run("ps")
    assert "torch 2.13.0" in done.output and "torch 2.6.0" in done.output


def test_the_table_tells_of_recoveries_in_place() -> None:
    target = Target(address="127.0.0.1:1", token="", job="job", directory="/nowhere", pid=None)
    answer = m.Ranks(
        job="job", directory="/nowhere", attempt=1, world_size=2, state="running", started_s=1, rows=(),
        incarnation=4, replaced=(1, 0, 1),
    )  # fmt: skip
    about = "running, attempt 1, incarnation 4, replaced: rank 0, rank 1 2 times, 2 ranks, controller 127.0.0.1:1"
    assert _table(target, answer).caption == about


def test_json_of_the_ranks() -> None:
    with job_here(2, joined=1, job="digits") as job:
        shown(job)
        [found] = json_of(run("ps", "--json"))["jobs"]
    assert (found["job"], found["directory"], found["state"], found["world_size"]) == (
        "digits",
        "/nowhere",
        "running",
        2,
    )
    assert (found["pid"], found["controller"], found["error"]) == (os.getpid(), job.address, "")
    assert (found["attempt"], found["incarnation"], found["replaced"]) == (0, 0, [])
    here, awaited = found["ranks"]
    assert (here["rank"], here["state"], here["pid"], here["device"]) == (0, "running", os.getpid(), "cpu")
    assert here["marks"] == ["step", "forward", "dataloader", "save"]
    assert here["versions"]["torch"] == "2.13.0"
    assert (awaited["rank"], awaited["state"], awaited["marks"], "pid" in awaited) == (1, "awaited", None, False)


def test_a_rank_that_marks_nothing() -> None:
    with job_here(1, marked=False) as job:
        job.until(lambda t: t.rows[0].phase != "")
        assert json_of(run("ps", "--json"))["jobs"][0]["ranks"][0]["marks"] is None


def test_several_jobs_and_one_of_them() -> None:
    with job_here(1, job="first"), job_here(2, job="second"):
        assert [job["job"] for job in json_of(run("ps", "--json"))["jobs"]] in (
            ["first", "second"],
            ["second", "first"],
        )
        assert [job["job"] for job in json_of(run("ps", "--json", "--job", "second"))["jobs"]] == ["second"]
        assert len(json_of(run("ps", "--json", "--job", str(os.getpid())))["jobs"]) == 2
        done = run("ps", "--job", "third")
    assert done.exit_code == 2
    assert "--job 'third' is not among the jobs of this user" in done.output
    assert "first, controller" in done.output and "second, controller" in done.output


def test_a_controller_that_does_not_answer_is_shown() -> None:
    one = Announcement("127.0.0.1:1", "secret", 1)
    with job_here(1, job="healthy"):
        done, document = run("ps"), json_of(run("ps", "--json"), code=1)
    one.withdraw()
    assert done.exit_code == 1
    assert "the controller does not answer" in done.output and "healthy" in done.output
    assert "secret" not in done.output + json.dumps(document)
    assert "Connection refused" in document["jobs"][0]["error"]


def test_a_controller_of_another_machine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a rank has joined is not known."""
    monkeypatch.setenv("LASTGASP_TOKEN", "7" * 32)
    assert run("ps", "--controller", "127.0.0.1:1").output.startswith("controller 127.0.0.1:1\n")


# -- switch ----------------------------------------------------------------------------------------


def test_all_ranks() -> None:
    with job_here(2) as job:
        done = run("switch", "comm=on", "step=off", "--wait", "60")
        assert [rank.mask for rank in job.ranks] == [ALL & ~STEP] * 2
    assert done.exit_code == 0, done.output
    assert "2 of 2 ranks acknowledged" in done.output
    assert done.output.count("forward dataloader save comm") == 2


def test_some_ranks_as_json() -> None:
    with job_here(4) as job:
        document = json_of(run("switch", "--ranks", "3,0-1", "dataloader=off", "--json", "--wait", "60"))
        assert [rank.mask for rank in job.ranks] == [DEFAULT_ON & ~DATALOADER] * 2 + [
            DEFAULT_ON,
            DEFAULT_ON & ~DATALOADER,
        ]
    assert (document["job"], document["on"], document["off"]) == ("job", [], ["dataloader"])
    assert document["acknowledged"] is True
    assert [(rank["rank"], rank["marks"]) for rank in document["ranks"]] == [
        (n, ["step", "forward", "save"]) for n in (0, 1, 3)
    ]


def test_a_rank_that_did_not_acknowledge_is_named_and_the_exit_code_says_so() -> None:
    with job_here(2, joined=1) as job:
        shown(job)
        done = run("switch", "comm=on", "--wait", "60")
        document = json_of(run("switch", "comm=on", "--wait", "60", "--json"), code=1)
    assert done.exit_code == 1
    assert re.search(r"1 .* has not joined yet", done.output) and "1 of 2 ranks acknowledged" in done.output
    assert document["acknowledged"] is False
    assert document["ranks"][1] == {"rank": 1, "acknowledged": False, "marks": None, "why": "has not joined yet"}


def test_before_the_first_rank() -> None:
    with job_here(2, joined=0):
        done = run("switch", "comm=on", "--ranks", "1")
    assert done.exit_code == 1
    assert "no rank has joined the job yet" in done.output


def test_without_a_job() -> None:
    done = run("switch", "comm=on")
    assert done.exit_code == 2
    assert "runs no job with a controller" in done.output and "only the switch file reaches it" in done.output


def test_several_jobs_need_a_choice() -> None:
    with job_here(1, job="first") as first, job_here(1, job="second") as second:
        done = run("switch", "comm=on")
        assert done.exit_code == 2
        assert "--job must name one of these" in done.output
        assert "first, controller" in done.output and "second, controller" in done.output
        assert run("switch", "comm=on", "--wait", "60", "--job", "second").exit_code == 0
        done = run("switch", "comm=on", "--job", str(os.getpid()))
        assert done.exit_code == 2 and "by its controller's process id" in done.output
        assert (first.ranks[0].mask, second.ranks[0].mask) == (DEFAULT_ON, ALL)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["steps=on"],
            "'steps' is not a kind of marks: expected NAME=on or NAME=off, NAME one of step, forward, dataloader",
        ),
        (["step=On"], "'On' is not allowed: expected step=on or step=off"),
        (["step"], "'' is not allowed: expected step=on or step=off"),
        (["=on"], "'' is not a kind of marks"),
        (["step=on", "step=off"], "step is given twice"),
        (["step=on", "step=on"], "step is given twice"),
        ([], "Missing argument"),
        (["step=on", "--ranks", "a"], "'a' is not a rank: expected ranks and ranges of ranks, as in 0,3-5"),
        (["step=on", "--ranks", ""], "'' is not a rank"),
        (["step=on", "--ranks", "1,,2"], "'' is not a rank"),
        (["step=on", "--ranks", "-1"], "'-1' is not a rank"),
        (["step=on", "--ranks", "5-3"], "'5-3' ends before it begins: write 3-5"),
        (["step=on", "--ranks", "0-999999999"], "more than 100000 ranks"),
        (["step=on", "--ranks", "0,2"], "rank 2 is unknown: expected ranks from 0 to 1"),
        (["step=on", "--wait", "0.05"], "0.05 is not allowed: expected 0.1 to 600 seconds"),
        (["step=on", "--wait", "601"], "expected 0.1 to 600 seconds"),
        (["step=on", "--wait", "nan"], "expected 0.1 to 600 seconds"),
        (["step=on", "--wait", "soon"], "not a valid float"),
        (["step=on", "--job", "x", "--controller", "h:1"], "--job and --controller exclude each other"),
        (["step=on", "--controller", "h:1"], "LASTGASP_TOKEN"),
        (["step=on", "--controller", "h"], "expected HOST:PORT"),
        (["step=on", "--controller", "h:99999"], "a port from 1 to 65535"),
    ],
)
def test_what_is_wrong_usage(arguments: list[str], words: str) -> None:
    with job_here(2) as job:
        done = run("switch", *arguments)
        assert [rank.mask for rank in job.ranks] == [DEFAULT_ON] * 2
    assert done.exit_code == 2, done.output
    assert words in re.sub(r"\s+", " ", done.output)


def test_ranks_and_settings() -> None:
    assert parse_ranks(" 0, 3-5,4 ") == (0, 3, 4, 5)
    assert parse_ranks("7-7") == (7,)
    assert parse_settings(("step=on", "comm=off")) == (STEP, COMM)


# -- another machine -------------------------------------------------------------------------------


def test_by_address_and_token(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job_here(1) as job:
        shown(job)
        for path in directory.iterdir():
            path.unlink()
        assert run("switch", "comm=on").exit_code == 2
        monkeypatch.setenv("LASTGASP_TOKEN", job.token)
        assert run("switch", "comm=on", "--wait", "60", "--controller", job.address).exit_code == 0
        assert job.ranks[0].mask == ALL
        [found] = json_of(run("ps", "--json", "--controller", job.address))["jobs"]
        assert (found["job"], found["pid"]) == ("job", None)
        monkeypatch.setenv("LASTGASP_TOKEN", "f" * 64)
        done = run("switch", "comm=off", "--controller", job.address)
        assert done.exit_code == 1 and "wrong token" in done.output
        assert job.ranks[0].mask == ALL


def test_a_directory_that_cannot_be_trusted_is_wrong_usage(directory: Path) -> None:
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    for command in (["ps"], ["switch", "step=on"]):
        done = run(*command)
        assert done.exit_code == 2
        assert "chmod 700 it" in done.output


def test_as_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "lastgasp", "switch", "comm=on", "--wait", "60", "--json"]
    with job_here(1) as job:
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["ranks"] == [
            {"rank": 0, "acknowledged": True, "marks": ["step", "forward", "dataloader", "save", "comm"], "why": ""}
        ]
        assert job.ranks[0].mask == ALL


def test_the_commands_need_neither_torch_nor_the_session() -> None:
    code = "import sys, lastgasp.cli.switch, lastgasp.cli.ps; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True)
    assert done.stdout == "False\n"
