"""MindIO's elastic training: ranks that are lost are left out by TaskD's word, and each sample is still used once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lastgasp.testing.weights import differences
from support import mindx
from support.again_faults import VARIABLE
from support.launchers import SUPPORT, finish, incidents, running, torchrun, until
from support.recovery_backends import LEADERS, TORCH, Backend, Trace, used
from support.samples import check_samples, entered
from support.train_elastic import GATES

WORKER = SUPPORT / "train_elastic.py"
POD = {
    "HIGH_AVAILABILITY": "dump,elastic-training", "LASTGASP_TOKEN": "the secret of this test's job",
    "LASTGASP_BIND": mindx.HOST, "LASTGASP_WARM": "off",
}  # fmt: skip
KILLED = "kind=sigkill,rank=3,step=3,phase=backward"
SURVIVOR = ["stop", "clean", "zit_downgrade_rebuild"]

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a job of four ranks without a fault, on our own engine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    gates(folder)
    command = torchrun(WORKER, "--dir", folder, "--final", folder / "final.pt", ranks=4)
    assert finish(command, folder, LASTGASP_WARM="off", LASTGASP_BACKEND="embedded").ok
    return folder


def gates(directory: Path) -> None:
    """No rank waits at any."""
    directory.mkdir(exist_ok=True)
    for step in GATES:
        (directory / f"go-{step}").touch()


def job(directory: Path, *more: str) -> list[str]:
    """Four ranks under TaskD."""
    gates(directory)
    return mindx.command(WORKER, "--dir", directory, "--final", directory / "final.pt", *more, ranks=4)


def check_orders(trace: Trace, lost: int) -> None:
    """MindIO's order on each rank that is left; nobody is saved, repaired or rolled back."""
    left = [rank for rank in range(4) if rank != lost]
    for rank in left:
        orders = [name for name in trace.names(rank) if name in (*SURVIVOR, "repair", "rollback", "save_ckpt")]
        assert orders == SURVIVOR
        assert [event["state"] for event in trace.events("report", rank)] == ["RS_NORMAL"]
        [order] = trace.events("zit_downgrade_rebuild", rank)
        assert order["given"] == [left, left] and order["thread"] == "_DummyThread"
    [down] = trace.events("downgraded")
    assert down["isolated"] == [lost]


@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize("lost", [3, pytest.param(1, marks=pytest.mark.full)])
def test_the_job_goes_on_without_a_lost_rank(
    leader: Backend, lost: int, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks that are left keep their processes and get numbers without a gap; the weights are the very same."""
    directory = tmp_path / "d"
    fault = KILLED.replace("rank=3", f"rank={lost}")
    with used(leader, tmp_path, monkeypatch) as trace:
        done = finish(job(directory), tmp_path, LASTGASP_FAULT=fault, **POD)
        assert done.ok, done.output[-8000:]
        if leader is TORCH:
            check_orders(trace, lost)
    left = [rank for rank in range(4) if rank != lost]
    for number, rank in enumerate(left):
        [(pid, *first)], [(same, *then)] = entered(directory, rank)[:1], entered(directory, number)[-1:]
        assert (first, then, same) == ([0, rank, 4], [3, number, 3], pid)
    assert list(directory.glob("gasp-*")) == []
    [incident] = incidents(directory)
    ended = (incident.ending, incident.rung, incident.step_saved, incident.steps_lost, incident.led_by)
    assert ended == ("in_place", "shrink", 3, 0, "MindIO in TaskD"), incident
    assert [fault.rank for fault in incident.faults] == [lost]
    note = f"MindIO in TaskD goes on without rank {lost}: training goes on with 3 of 4 ranks"
    assert note in incident.notes and any("digest" in one for one in incident.notes)
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


def second_fault(
    leader: Backend, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, **more: str
) -> tuple[Path, Any]:
    """The job, whose last incident must be that the step was dumped; afterwards all four ranks train on."""
    directory = tmp_path / "d"
    variables = {"LASTGASP_FAULT": KILLED, "LASTGASP_FAULT_LOG": str(tmp_path / "faults.log")} | more
    with used(leader, tmp_path, monkeypatch):
        done = finish(job(directory), tmp_path, **POD, **variables)
        assert done.ok, done.output[-8000:]
    *earlier, incident = incidents(directory)
    assert [one.rung for one in earlier] in ([], ["shrink"]), earlier
    assert (incident.ending, incident.steps_lost) == ("saved", 0), incident
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []
    return directory, incident


SECOND = [
    "stop,1,self", "clean,2,self", "fewer,1,self", "fewer,2,0", "kept,0,self", "kept,1,self", "joining again,2,self",
    "function called,1,self", "handover,2,self", "state taken,1,self",
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize("second", SECOND)
def test_a_second_fault_on_the_way_ends_with_the_step_dumped(
    leader: Backend, second: str, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, incident = second_fault(leader, tmp_path, undisturbed, monkeypatch, **{VARIABLE: second})
    assert (directory / "second").exists() and incident.step_saved == 3


WHILE = "step=6,phase=backward,incarnation=1"
LATER = [
    pytest.param(f"{KILLED};kind=sigkill,rank=1,{WHILE}", 6, id="one is missing and one killed"),
    pytest.param(f"{KILLED};kind=exception,rank=2,{WHILE}", 6, id="one is missing and one raises"),
    pytest.param(f"{KILLED};kind=sigkill,rank=0,{WHILE}", 6, id="one is missing and rank 0 killed"),
    pytest.param("kind=sigkill,rank=0,step=3,phase=backward", 3, id="rank 0 is never missing"),
]


@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize(("faults", "step"), LATER)
def test_what_mindio_cannot_leave_out_is_dumped(
    leader: Backend, faults: str, step: int, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, incident = second_fault(leader, tmp_path, undisturbed, monkeypatch, LASTGASP_FAULT=faults)
    assert incident.step_saved == step


@pytest.mark.full
def test_ranks_that_come_back_are_taken_in_by_a_restart(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MindIO's scale out is refused with the reason; the step is dumped, and all four begin with it."""
    directory = tmp_path / "d"
    with used(TORCH, tmp_path, monkeypatch) as trace:
        command = job(directory)
        (directory / "go-8").unlink()
        with running(tmp_path, command, LASTGASP_FAULT=KILLED, **POD, **{mindx.SCALE_OUT: "1"}) as [started]:
            until(lambda: len(trace.events("stop", 0)) == 2, "the ranks are stopped for the new one")
            (directory / "go-8").touch()
            assert started.code() == 0, started.output[-8000:]
        assert trace.events("zit_upgrade_rebuild_failed") and trace.events("upgraded") == []
    assert "ranks that were missing are not taken in while training goes on, but by a restart" in started.output
    shrunk, incident = incidents(directory)
    assert (shrunk.rung, incident.ending, incident.step_saved, incident.steps_lost) == ("shrink", "saved", 8, 0)
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


@pytest.mark.full
def test_without_an_elastic_loader_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindIO has been told before that was known: its order fails, and the step is dumped."""
    directory, script = tmp_path / "d", SUPPORT / "train_again.py"
    directory.mkdir()
    (directory / "go").touch()
    fault = "kind=sigkill,rank=2,step=8,phase=backward"
    with used(TORCH, tmp_path, monkeypatch) as trace:
        command = mindx.command(script, "--dir", directory, "--final", directory / "final.pt", ranks=3)
        done = finish(command, tmp_path, LASTGASP_FAULT=fault, TESTS_UNTIL_KEPT="1", **POD)
        assert done.ok, done.output[-8000:]
        assert "strategy elastic-training is refused: its data do not come from an ElasticLoader" in done.output
        assert trace.events("zit_downgrade_rebuild_failed") and trace.events("downgraded") == []
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 8, 0), incident
