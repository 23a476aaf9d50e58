"""`lastgasp report`: what is printed where, exit codes, what is refused and how, and the live table in a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lastgasp.cli import main
from support.step_jobs import Shape, write

HEALTHY = Shape(steps=40)
SLOW = Shape(steps=60, slow={1: {"data": 0.02}})
DEADLINE = 150.0


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    write(HEALTHY, 1, tmp_path / "base/healthy")
    return tmp_path / "base"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    write(SLOW, 1, tmp_path / "base/slow")
    return tmp_path / "base"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def json_of(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def refused(done: Result, *parts: str) -> None:
    """Exit code 2, nothing on standard output, and a message with these parts."""
    assert (done.exit_code, done.stdout) == (2, "")
    for part in parts:
        assert part in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


# -- what is printed -------------------------------------------------------------------------------


def test_a_table_and_a_verdict(slow: Path) -> None:
    done = run(slow)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "Slow: rank 1 of 4." in done.stdout
    assert "cause data, confidence 0." in done.stdout


def test_a_document_alone_on_standard_output(slow: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    done = run(slow, "--json", "--html", page, "--trace", trace)
    document = json_of(done)
    assert document["version"] == 1
    assert [(item["rank"], item["cause"]) for item in document["verdict"]["slow"]] == [(1, "data")]
    assert [row["rank"] for row in document["ranks"]] == [0, 1, 2, 3]
    assert f"page: {page}" in done.stderr
    assert f"ranges: {trace}" in done.stderr
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    assert json.loads(trace.read_bytes())["traceEvents"]


def test_whoever_is_slow_the_code_is_0_unless_asked(slow: Path) -> None:
    assert run(slow).exit_code == 0
    assert run(slow, "--fail-on-slow").exit_code == 1
    assert json.loads(run(slow, "--fail-on-slow", "--json").stdout)["verdict"]["slow"]


def test_a_healthy_job_does_not_fail(healthy: Path) -> None:
    done = run(healthy, "--fail-on-slow")
    assert done.exit_code == 0
    assert "Nobody is slow" in done.stdout


def test_some_ranks_and_the_newest_steps(slow: Path) -> None:
    document = json_of(run(slow, "--json", "--rank", "0,2-3", "--last", "25"))
    assert [row["rank"] for row in document["ranks"]] == [0, 2, 3]
    assert {row["steps"] for row in document["ranks"]} == {25}
    assert document["verdict"]["slow"] == []


def test_the_newest_task_and_another(healthy: Path) -> None:
    write(SLOW, 2, healthy / "slow")
    assert json_of(run(healthy, "--json"))["other_tasks"] in (["slow"], ["healthy"])
    document = json_of(run(healthy, "--json", "--task", "slow"))
    assert (document["task"], document["other_tasks"]) == ("slow", ["healthy"])


def test_half_a_line_and_damage_are_counted(healthy: Path) -> None:
    with (healthy / "healthy/2/1795247866").open("ab") as file:
        file.write(b'\x00\x00\n{"Kind":1,"Fla')
    document = json_of(run(healthy, "--json"))
    assert [row["unreadable"] for row in document["ranks"]] == [0, 0, 2, 0]
    assert any(remark.startswith("2 lines could not be read") for remark in document["remarks"])


def test_foreign_files_and_rows_are_left_alone(healthy: Path, tmp_path: Path) -> None:
    for name in ("healthy/0/notes.txt", "healthy/readme", "healthy/3/comm.csv"):
        (healthy / name).write_text("mine\n")
    before = {path: path.read_bytes() for path in healthy.rglob("*") if path.is_file()}
    assert run(healthy, "--html", tmp_path / "p.html", "--trace", tmp_path / "t.json").exit_code == 0
    assert before == {path: path.read_bytes() for path in healthy.rglob("*") if path.is_file()}


# -- what is refused -------------------------------------------------------------------------------


def test_a_wrong_directory(tmp_path: Path) -> None:
    refused(run(tmp_path / "nowhere"), "nowhere", "does not exist")
    (tmp_path / "file").write_text("x")
    refused(run(tmp_path / "file"), "is a file")
    refused(run(tmp_path), "DIR=", str(tmp_path), "BASE/TASK/RANK", "Are marks on?")
    refused(run(), "DIR")


@pytest.mark.parametrize("ranks", ["x", "1-", "-1", "", "0,,1", "1.5"])
def test_ranks_that_are_no_list(ranks: str, healthy: Path) -> None:
    refused(run(healthy, "--rank", ranks), f"--rank={ranks!r}", "ranks such as 0,4-7", "Leave it out for all.")


@pytest.mark.parametrize("ranks", ["9", "0,9", "7-8", "3-1"])
def test_ranks_that_have_no_files(ranks: str, healthy: Path) -> None:
    refused(run(healthy, "--rank", ranks), f"--rank={ranks!r}", "ranks 0-3", "has no files")


def test_a_task_that_is_not_there(healthy: Path) -> None:
    refused(run(healthy, "--task", "other"), "--task='other'", "one of healthy", "Leave it out")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--last", "0"], "--last"), (["--last", "x"], "--last"), (["--for", "5"], "--for belongs to --follow"),
        (["--follow", "--for", "-1"], "--for"), (["--follow", "--json"], "--follow with --json"),
        (["--html", "."], "--html"),
    ],
)  # fmt: skip
def test_wrong_options(options: list[str], says: str, healthy: Path) -> None:
    refused(run(healthy, *options), says)


@pytest.mark.parametrize("option", ["--html", "--trace"])
def test_a_file_that_cannot_be_written(option: str, slow: Path, tmp_path: Path) -> None:
    done = run(slow, option, tmp_path / "missing/file")
    assert done.exit_code == 1
    assert "Slow: rank 1 of 4." in done.stdout, "the report itself is not lost"
    assert f"{tmp_path / 'missing/file'} cannot be written: No such file" in done.stderr
    assert "Traceback" not in done.stderr


# -- live ------------------------------------------------------------------------------------------


def test_live_for_a_while(slow: Path, tmp_path: Path) -> None:
    done = run(slow, "--follow", "--for", "0", "--html", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("Slow: rank 1 of 4.") == 1
    assert (tmp_path / "page.html").exists()


class Terminal:
    """The command in a terminal of 100 columns."""

    def __init__(self, *arguments: str | Path) -> None:
        master, slave = pty.openpty()
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "50"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lastgasp", "report", *map(str, arguments)],
            stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # not so in background
        )  # fmt: skip
        os.close(slave)
        self.master, self.seen = master, ""

    def until(self, text: str) -> None:
        """Wait until it shows `text` anew."""
        deadline = time.monotonic() + DEADLINE
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, self.seen[-3000:]
            if select.select([self.master], [], [], left)[0]:
                self.seen += os.read(self.master, 65536).decode("utf-8", "replace")
        self.seen = self.seen.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE)
        os.close(self.master)


def test_a_live_table_shows_new_steps_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    write(Shape(steps=40), 1, tmp_path / "part")
    write(Shape(steps=80), 1, tmp_path / "whole")
    terminal = Terminal(tmp_path / "part", "--follow")
    try:
        terminal.until("Nobody is slow: 4 ranks over")
        terminal.until("fwd, bwd, opt")
        for rank in range(4):  # the same seed: the longer job begins with the rows of the shorter one
            more = (tmp_path / f"whole/{rank}/1795247866").read_bytes()
            here = tmp_path / f"part/{rank}/1795247866"
            have = here.stat().st_size
            assert more[:have] == here.read_bytes()
            with here.open("ab") as file:
                file.write(more[have:])
        terminal.until(" to 79).")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(DEADLINE) == 0
    finally:
        terminal.close()
