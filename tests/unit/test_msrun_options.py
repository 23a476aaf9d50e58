"""`lastgasp run --framework mindspore`: its command line, its environment, and what it keeps. No MindSpore."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lastgasp import exitcodes
from lastgasp.errors import ConfigError, MissingExtra
from lastgasp.gasp.cards import JobState, RankRow, RankState
from lastgasp.gasp.messages import Agreed, Ranks
from lastgasp.launch import msattempts, msrun
from lastgasp.launch.msattempts import MsAttempts, Plan, plan, quiet
from lastgasp.launch.msrun import msrun_arguments, started_by_us, tft_with_restarts, with_join
from lastgasp.launch.msworkers import Worker, keep_logs, wait_shown, workers_of
from lastgasp.launch.restarts import Restarts
from lastgasp.launch.taskdagent import Agent, serving
from support.ports import free_port
from support.waiting import until

START = ["-m", "lastgasp_mindformers.start"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["--framework", "mindspore", "t.py", "--x"], ["t.py", "--x"]),
        (["--framework=mindspore", "--worker_num", "2", "t.py"], ["--worker_num", "2", "t.py"]),
        (["--worker_num=2", "--framework", "mindspore", "t.py"], ["--worker_num=2", "t.py"]),
        (["--log_dir", "l", "--framework=mindspore", "python", "t.py"], ["--log_dir", "l", "python", "t.py"]),
        (["t.py", "--framework", "mindspore"], None),
        (["--framework", "megatron", "t.py"], None),
        (["--framework"], None),
        (["--standalone", "t.py", "--framework", "mindspore"], None),
        (["--nproc-per-node", "2", "--framework", "mindspore", "t.py"], None),
        (["--worker_num", "2", "t.py", "--framework", "mindspore"], None),
        ([], None),
    ],
)
def test_msrun_is_asked_for_among_its_own_options(given: list[str], wanted: list[str] | None) -> None:
    assert msrun_arguments(given) == wanted


@pytest.mark.parametrize(
    ("script", "rest", "wanted"),
    [
        ("t.py", ["--x"], ("python", [*START, "t.py", "--x"])),
        ("python", ["t.py"], ("python", [*START, "t.py"])),
        ("python3", ["-m", "pkg", "-v"], ("python3", [*START, "-m", "pkg", "-v"])),
        ("pytest", ["-s", "t.py"], ("pytest", ["-s", "t.py"])),
    ],
)
def test_the_plugin_comes_before_the_script(script: str, rest: list[str], wanted: tuple[str, list[str]]) -> None:
    assert started_by_us(script, rest) == wanted


@pytest.mark.parametrize("rest", [[], ["-u", "t.py"], ["-c", "pass"]])
def test_options_of_python_itself_are_refused(rest: list[str]) -> None:
    with pytest.raises(ConfigError, match="a script, or -m and a module"):
        started_by_us("python", rest)


@pytest.mark.parametrize(
    ("users", "wanted"),
    [
        ("", "{RSC:1}"),
        ("{}", "{RSC:1}"),
        ("{TTP:1,UCE:1}", "{TTP:1,UCE:1,RSC:1}"),
        ("{TTP:1,}", "{TTP:1,RSC:1}"),
        ("{RSC:1,TTP:1}", "{RSC:1,TTP:1}"),
        ("TTP:1", "{TTP:1,RSC:1}"),
    ],
)
def test_what_the_user_set_stays(users: str, wanted: str) -> None:
    assert tft_with_restarts(users) == wanted


def test_logs_are_shown_unless_told_otherwise() -> None:
    assert with_join(["t.py"]) == ["--join", "True", "t.py"]
    assert with_join(["--join=False", "t.py"]) == ["--join=False", "t.py"]


# -- where the controller is -----------------------------------------------------------------------


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LASTGASP_CONTROLLER", "LASTGASP_TOKEN", "LASTGASP_JOB", "MINDX_TASK_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_variables")
def test_a_job_of_one_node_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = plan(2, 2, "a:1", True), plan(2, 2, "a:1", True)
    assert (first.host, first.port, first.here) == ("127.0.0.1", 0, True)
    assert first.token != second.token and first.job != second.job
    monkeypatch.setenv("MINDX_TASK_ID", "task")
    assert plan(2, 2, "a:1", True).job == "task"


@pytest.mark.usefixtures("no_variables")
def test_nodes_must_be_told_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"LASTGASP_CONTROLLER.*2 of 4 workers"):
        plan(4, 2, "a:1", True)
    monkeypatch.setenv("LASTGASP_CONTROLLER", "10.0.0.1:7000")
    with pytest.raises(ConfigError, match="LASTGASP_TOKEN"):
        plan(4, 2, "a:1", True)
    monkeypatch.setenv("LASTGASP_TOKEN", "secret" * 4)
    first, second = plan(4, 2, "a:1", True), plan(4, 2, "a:1", False)
    assert (first.host, first.port, first.token, first.job) == ("10.0.0.1", 7000, "secret" * 4, "a:1")
    assert first.here and not second.here and second.job == first.job


# -- TaskD's agent ---------------------------------------------------------------------------------


def test_both_forms_of_taskd_s_agent_are_served_and_taken_away() -> None:
    agent, ran = Agent(), []
    agent.main = lambda: ran.append("main")
    theirs = sys.modules["taskd"] = type(sys)("taskd")
    try:
        with serving(agent):
            from taskd.api.taskd_agent_api import (
                init_taskd_agent,
                register_func,
                start_taskd_agent,
            )
            from taskd.python.framework.agent.ms_mgr.msrun_plugin import (
                MSRunPlugin,
            )

            assert init_taskd_agent({"Framework": "MindSpore"})
            assert register_func("MONITOR", len)
            plugin = MSRunPlugin()
            plugin.register_callbacks("KILL_WORKER", max)
            plugin.start()
            start_taskd_agent()
        assert agent.operations == {"MONITOR": len, "KILL_WORKER": max} and ran == ["main", "main"]
        assert {name for name in sys.modules if name.partition(".")[0] == "taskd"} == {"taskd"}
        assert sys.modules["taskd"] is theirs
    finally:
        del sys.modules["taskd"]


# -- workers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "wanted"), [("raise SystemExit(83)", 83), ("", 0), ("os.abort()", -6)])
def test_how_a_worker_ended_is_seen_and_stays_to_be_waited_for(tmp_path: Path, code: str, wanted: int) -> None:
    with (tmp_path / "worker_0.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", f"import os; input(); {code}"], stdin=-1, stdout=log)
        worker = workers_of({0: {"pid": process.pid, "status": None, "global_rank": 3}})[0]
        assert (worker.rank, worker.log) == (3, tmp_path / "worker_0.log")
        assert worker.code() is None
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert [worker.code(), worker.code(), process.wait(30), worker.code()] == [wanted, wanted, wanted, 1]


def test_what_msrun_has_waited_for_is_taken_from_msrun() -> None:
    found = workers_of({0: {"pid": 1, "status": 0, "global_rank": 0}, 1: {"pid": 2, "status": 300, "global_rank": 1}})
    assert [worker.code() for worker in found] == [0, 1]
    assert workers_of({0: {"pid": None, "status": 200, "global_rank": 0}, 1: {}}) == []


def test_the_logs_of_an_attempt_are_kept_under_its_number(tmp_path: Path) -> None:
    logs = [tmp_path / f"worker_{rank}.log" for rank in (0, 1)]
    logs[0].write_text("zero")
    workers = [Worker(rank, 0, log) for rank, log in enumerate(logs)] + [Worker(2, 0, None)]
    assert keep_logs(workers, 4) == [tmp_path / "worker_0.attempt4.log"]
    assert (tmp_path / "worker_0.attempt4.log").read_text() == "zero"


def test_readers_get_to_the_end_of_a_log(tmp_path: Path) -> None:
    log, text = tmp_path / "log", "x" * 200_000
    log.write_text(text)
    with (tmp_path / "shown").open("wb") as shown:
        reader = subprocess.Popen(["tail", "-c", "+1", "-f", str(log)], stdout=shown)
        wait_shown([reader.pid], [log], 30.0)
        reader.kill()
        reader.wait()
    assert (tmp_path / "shown").read_text() == text
    wait_shown([reader.pid], [log], 30.0)


def test_the_launcher_of_mindspore_jobs_imports_no_torch() -> None:
    code = "import sys, lastgasp.cli.run, lastgasp.launch.mswatch as m; print('torch' in sys.modules, m.LEAVE)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.split() == ["False", "15.0"]


def test_ranks_must_be_known_on_several_nodes() -> None:
    args = SimpleNamespace(worker_num=2, local_worker_num=1, master_addr="a", master_port=1, node_rank=-1)
    with pytest.raises(ConfigError, match="--node_rank"):
        MsAttempts.of(args, True)


def never() -> bool:
    """Nobody tells it to stop."""
    return False


def test_a_node_without_the_controller_sees_that_the_first_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msattempts, "LED", 60.0)
    first = MsAttempts(Plan(job="j", host="127.0.0.1", port=0, token="t", here=True, several=True))
    found = first.begin()
    port = int(found["LASTGASP_CONTROLLER"].rpartition(":")[2])
    second = MsAttempts(Plan(job="j", host="127.0.0.1", port=port, token="t", here=False, several=True))
    assert second.begin() == found, "the ranks of both nodes find the same"
    assert [first.wait_quiet([0], never), second.wait_quiet([1], never), second.close()] == [True, True, ""]
    assert (first.in_use(), second.in_use()) == (False, True)
    assert first.close() == "" == first.close()
    monkeypatch.setattr(msattempts, "LED", 0.2)
    assert not second.wait_quiet([1], never)
    assert second.wait_quiet([1], lambda: True), "asked to stop, it does not wait"


def test_a_node_without_the_controller_hears_that_the_recovery_is_over() -> None:
    """One of its ranks may hang: nobody else can end it, and the others would wait for its restart."""
    first = MsAttempts(Plan(job="j", host="127.0.0.1", port=0, token="t", here=True, several=True))
    port = int(first.begin()["LASTGASP_CONTROLLER"].rpartition(":")[2])
    second = MsAttempts(Plan(job="j", host="127.0.0.1", port=port, token="t", here=False, several=True))
    second.begin()
    assert first._controller is not None and second._keeper is not None
    keepers, agreed = first._controller._controller.keepers, Agreed(attempt=0, ending="saved")
    first._controller._call(lambda: keepers.agreed(agreed))
    until(lambda: second.over_for() is not None, "it is told")
    assert not second.abandoned(60.0) and second.abandoned(-1.0) and not first.abandoned(-1.0)
    assert (second.close(), first.close()) == ("", "")


@pytest.mark.parametrize(
    ("codes", "wanted"),
    [
        ({1, -9}, True),
        ({exitcodes.SAVED, None}, True),
        ({exitcodes.REFUSED}, False),
        ({exitcodes.REFUSED, exitcodes.NOTHING_TO_SAVE, None}, False),
        ({exitcodes.REFUSED, exitcodes.SAVED}, True),
    ],
)
def test_a_node_without_the_controller_hears_that_its_rank_has_refused(codes: set[int | None], wanted: bool) -> None:
    """It had left that to the first one, and started the rank again, which refused again."""
    one = MsAttempts(Plan(job="j", host="127.0.0.1", port=free_port(), token="t", here=False, several=True))
    one.begin()
    assert one.progressed(codes) is wanted
    restarts = Restarts(always=True)
    restarts.ended(one.number, one.in_use(), one.progressed(codes), exitcodes.REFUSED in codes, frozenset({87}))
    assert restarts.should_give_up is not wanted
    one.close()


@pytest.mark.parametrize(
    ("attempt", "state", "rows", "wanted"),
    [
        (3, "recovering", ["running", "dead"], False),
        (3, "running", ["running", "dead"], False),
        (3, "over", ["running", "dead"], True),
        (3, "waiting", [], True),
        (2, "recovering", ["running", "dead"], True),
        (4, "running", ["running", "awaited"], True),
        (3, "running", ["running", "awaited"], True),
    ],
)
def test_a_node_waits_for_savers_on_others(attempt: int, state: JobState, rows: list[RankState], wanted: bool) -> None:
    ranks = tuple(RankRow(rank=rank, state=row) for rank, row in enumerate(rows))
    seen = Ranks(job="j", directory="", attempt=attempt, world_size=2, state=state, started_s=0, rows=ranks)
    assert quiet(seen, 3, [1]) is wanted


def test_taskds_msrun_is_the_one_beside_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_environ: None
) -> None:
    """Without an activated environment it is on no PATH; its code is the job's."""
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(MissingExtra, match="mindspore"):
        msrun.taskds_msrun(["train.py"])
    (tmp_path / "msrun").write_text(f'#!/bin/sh\necho "$LASTGASP $@" > "{tmp_path}/told"\nexit 7\n')
    (tmp_path / "msrun").chmod(0o755)
    assert msrun.taskds_msrun(["--worker_num", "8", "train.py"]) == 7
    assert (tmp_path / "told").read_text() == "1 --join True --worker_num 8 train.py\n"
    monkeypatch.setenv("LASTGASP", "0")
    assert msrun.taskds_msrun(["train.py"]) == 7
    assert (tmp_path / "told").read_text() == "0 --join True train.py\n", "switched off"
