"""What only MindIO has: order, threads, limits and ends (docs/facts/mindio_tft.md §15), on its stand-in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastgasp import exitcodes
from support.engine_job import ToyJob
from support.ports import free_port
from support.recovery_backends import MINDSPORE, SCALE, TORCH, Trace, used
from support.waiting import until

pytestmark = pytest.mark.fault
WORKER = Path(__file__).parents[1] / "support" / "in_place_worker.py"
CONTROLLER = """
import sys, mindio_ttp.controller_ttp as c
c.tft_init_controller(-1, 2, False, True, False)
c.tft_start_controller("127.0.0.1", int(sys.argv[1]), False, "")
print("up", flush=True); sys.stdin.read()
"""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """MindIO in torch mode."""
    with used(TORCH, tmp_path, monkeypatch) as found:
        yield found


def alive(pid: int) -> bool:
    """It is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_start_up_order_threads_and_limits(tmp_path: Path, trace: Trace) -> None:
    with ToyJob(tmp_path, world=4, replicas=[[0, 2], [1, 3]]) as job:
        job.step(1)
        pids = {rank.process.pid for rank in job.ranks}
        job.stuck(0, 2, 3)
        job.ranks[1].signal(signal.SIGKILL)
        assert [job.ranks[rank].code() for rank in (0, 2, 3)] == [exitcodes.SAVED] * 3
    until(lambda: bool(trace.events("renamed")), "MindIO's controller has heard that it is renamed")
    [controller] = trace.events("start_controller")
    assert controller["pid"] not in pids  # else rank 0's death would end it (§16.2)
    first = ["init_processor", "start_processor", "is_reboot_node", "replica"]
    for rank in range(4):
        assert trace.names(rank)[:4] == first
        assert [event["thread"] for event in trace.events(rank=rank)[:4]] == ["main"] * 4
        [replica] = trace.events("replica", rank)
        shard = [0, 2] if rank in (0, 2) else [1, 3]
        assert replica["info"] == [{"rank_list": shard, "replica_cnt": 2, "replica_shift": 0}]
    # 600 s for a save, 10 s to finish an update, 25 s of MindIO's own: read when the package was imported.
    assert {event["limit"] for event in trace.events("init_processor")} == {635}
    assert controller["limit"] == "635"
    names = [event["event"] for event in trace.events()]
    assert names.count("rename") == 1
    assert max(i for i, name in enumerate(names) if name == "save_ckpt_done") < names.index("rename")
    assert {event["thread"] for event in trace.events("save_ckpt")} == {"Thread"}
    assert {event["thread"] for event in trace.events("rename")} == {"_DummyThread"}
    assert "stop" not in names  # the state is read while the training thread is stuck
    [renamed] = trace.events("renamed")
    assert renamed["ok"]


def test_stop_and_clean_before_a_dump_where_it_is_asked_for(
    tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_STOP_CLEAN_BEFORE_DUMP", "1")
    with ToyJob(tmp_path, world=2) as job:
        job.step(1)
        job.ranks[1].signal(signal.SIGKILL)
        until(lambda: bool(trace.events("prelock", 0)), "the step is locked")
        job.ranks[0].tell("step 2")  # held back by MindIO's lock, then told to leave its loop
        assert job.ranks[0].code() == exitcodes.SAVED
    assert job.saved() == ["step-1.toy"]
    order = [name for name in trace.names(0) if name in ("stop", "clean", "save_ckpt", "rename")]
    assert order == ["stop", "clean", "save_ckpt", "rename"]
    assert [event["state"] for event in trace.events("report", 0)] == ["RS_NORMAL"]


def test_mindspore_mode_leaves_by_the_exit_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with used(MINDSPORE, tmp_path, monkeypatch) as trace:
        with ToyJob(tmp_path, world=2, leave=600.0) as job:  # not by the timer of a rank that was released
            job.step(2)
            job.stuck(0)
            job.ranks[1].signal(signal.SIGKILL)
            assert job.ranks[0].code() == exitcodes.SAVED
        assert job.saved() == ["step-2.toy"]
        assert trace.events("exit", 0)[0]["thread"] == "_DummyThread"
        assert trace.events("killed_by_2") == []


def test_a_state_without_a_holder_ends_with_a_record(
    tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINDIO_STANDIN_EXIT_WAIT", "1")
    with ToyJob(tmp_path, world=2, replicas=[[0], [1]]) as job:
        job.step(1)
        job.stuck(0)
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].code() == exitcodes.GAVE_UP  # not MindIO's 2, which may mean anything
        until(lambda: bool(list((tmp_path / "incidents").glob("*.json"))), "there is a record")
        incident = job.incident()
    assert (incident.ending, incident.backend) == ("gave_up", "mindio")
    assert "no living holder" in incident.reason or "shard" in incident.reason
    assert trace.events("no_dump")


def test_where_mindio_ends_all_ranks_ours_saves_first_however_long_it_takes(
    tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead rank had reported a step that nobody else holds, so MindIO saves nothing (§16.6) and kills the others."""
    monkeypatch.setenv("MINDIO_STANDIN_EXIT_WAIT", "1")
    with ToyJob(tmp_path, world=2, save_seconds=3.0) as job:
        job.step(1)
        job.ranks[1].tell("step 2")
        job.ranks[1].wait_for("stepped")
        until(lambda: (1, 2) in {(e["of"], e["step"]) for e in trace.events("heard")}, "MindIO has heard of step 2")
        job.stuck(0)
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].wait_for("save")["step"] == 1
        assert job.ranks[0].code() == exitcodes.SAVED
        incident = job.incident()
    assert trace.events("no_dump")
    assert job.saved() == ["step-1.toy"]
    assert (incident.ending, incident.step_saved) == ("saved", 1)


def test_a_rank_that_has_finished_stays_a_holder_until_all_have(tmp_path: Path, trace: Trace) -> None:
    """MindIO saves nothing once one rank has left; the others' last step would be lost with them."""
    with ToyJob(tmp_path, world=2) as job:
        job.step(1)
        job.ranks[1].tell("done")
        job.stuck(0)
        job.ranks[0].signal(signal.SIGKILL)
        assert job.ranks[1].wait_for("save")["step"] == 1
        job.ranks[1].code()
    assert job.saved() == ["step-1.toy"]
    order = [*trace.names(1), "leave"]
    assert order.index("save_ckpt") < order.index("leave")


def test_taskd_has_the_controller(tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its pod's address, whatever master the launcher has given its workers."""
    port = free_port()
    monkeypatch.setenv("MINDX_TASK_ID", "job")
    monkeypatch.setenv("TTP_PORT", str(port))
    monkeypatch.setenv("POD_IP", "127.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "master.invalid")
    command = [sys.executable, "-c", CONTROLLER, str(port)]
    taskd = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert taskd.stdout is not None and taskd.stdout.readline() == "up\n"
        with ToyJob(tmp_path, world=2) as job:
            job.step(1)
            job.stuck(0)
            job.ranks[1].signal(signal.SIGKILL)
            assert job.ranks[0].code() == exitcodes.SAVED
            incident = job.incident()
    finally:
        taskd.kill()
        taskd.communicate()
    assert [event["pid"] for event in trace.events("start_controller")] == [taskd.pid]
    assert (incident.led_by, incident.backend) == ("MindIO in TaskD", "mindio")
    assert job.saved() == ["step-1.toy"]


@pytest.mark.parametrize("manager", ["profiling only", "without a controller"])
def test_where_taskd_has_none_the_job_trains_with_one_of_its_own(
    tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch, manager: str
) -> None:
    """A job without a strategy (TASKD_PROCESS_ENABLE=off); a manager that could not start MindIO's controller."""
    monkeypatch.setenv("TTP_PORT", str(free_port()))
    monkeypatch.setenv("MINDX_TASK_ID", "job")
    monkeypatch.setenv("POD_IP", "127.0.0.1")
    monkeypatch.setenv("TASKD_PROCESS_ENABLE", "off" if manager == "profiling only" else "on")
    with ToyJob(tmp_path, world=2, taskd_join=1.0) as job:
        job.step(1)
        job.stuck(0)
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].code() == exitcodes.SAVED
        incident = job.incident()
    assert (incident.led_by, incident.backend) == ("MindIO", "mindio")
    assert job.saved() == ["step-1.toy"]


def test_a_controller_that_does_not_start_stops_all_ranks_with_the_reason(
    tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINDIO_STANDIN_START", "fail")
    job = ToyJob(tmp_path, world=2)
    try:
        job.ranks = [job.start(rank) for rank in range(2)]
        assert [rank.code() for rank in job.ranks] == [1, 1]
    finally:
        job.__exit__(None, None, None)
    said = capfd.readouterr().err
    assert said.count("LASTGASP_BACKEND='ascend' is not allowed") == 2
    assert "MindIO's controller did not start on 127.0.0.1: SystemExit: 2" in said


def test_the_controller_leaves_after_the_last_rank(tmp_path: Path, trace: Trace) -> None:
    with ToyJob(tmp_path, world=2) as job:
        [started] = trace.events("start_controller")
        assert alive(started["pid"])
        for rank in job.ranks:
            rank.tell("done")
        assert [rank.code() for rank in job.ranks] == [0, 0]
    until(lambda: not alive(started["pid"]), "the controller leaves")
    assert trace.events("destroy_controller")


@pytest.mark.slow
def test_a_destroy_that_hangs_keeps_no_process(tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDIO_STANDIN_DESTROY", "hang")
    with ToyJob(tmp_path, world=2) as job:
        job.step(1)
        for rank in job.ranks:
            rank.tell("done")
        assert [rank.code() for rank in job.ranks] == [0, 0]
    assert job.saved() == []
    assert not (tmp_path / "incidents").exists()


def test_a_memory_error_is_repaired_in_place(tmp_path: Path, trace: Trace) -> None:
    """Retry: the training function is entered again on both ranks, and nothing is saved or lost."""
    job = ToyJob(tmp_path, world=2)
    assert job.endpoint is not None
    environment = {"LASTGASP_CONTROLLER": job.endpoint.address, "LASTGASP_TOKEN": job.endpoint.token}
    environment["PYTHONPATH"] = os.pathsep.join([str(WORKER.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(WORKER)]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], env=os.environ | environment, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        told = [json.loads(process.communicate(timeout=250)[0].splitlines()[-1]) for process in processes]
        assert [process.returncode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        job.__exit__(None, None, None)
    assert [(end["value"], end["step"]) for end in told] == [(200, 200), (200, 200)]
    assert [end["entered"] for end in told] == [2, 2]
    names = ("stop", "clean", "repair", "rollback")
    for rank in range(2):
        assert [name for name in trace.names(rank) if name in names] == list(names)
    assert [e["state"] for e in trace.events("report", 0)] == ["RS_UCE"]
    assert [e["state"] for e in trace.events("report", 1)] == ["RS_NORMAL"]
    assert trace.events("init_processor", 0)[0]["uce"] is True
    assert trace.events("save_ckpt") == []
    assert float(SCALE) < 1
