"""MindIO's elastic training: ranks that are lost are left out by TaskD's word, and each sample is still used once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lastgasp.testing.weights import differences
from support import mindx
from support.again_faults import AFTER, VARIABLE
from support.launchers import SUPPORT, Running, finish, incidents, running, torchrun, until
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
SOON = {"TTP_NORMAL_ACTION_TIME_LIMIT": "60"}
"""Scaled: an order that nobody answers is given up after twelve seconds."""

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


@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize("lost", [3, 1])
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
    variables = {"LASTGASP_FAULT": KILLED, "LASTGASP_FAULT_LOG": str(tmp_path / "faults.log")} | SOON | more
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
    "stop,1,self", "clean,2,self", "resize,1,self", "resize,2,0", "kept,0,self", "kept,1,self", "joining again,2,self",
    "function called,1,self", "handover,2,self", "state taken,1,self",
]  # fmt: skip


@pytest.mark.product("second")
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


GROWN = ["zit_upgrade_rebuild", "zit_upgrade_repair", "zit_upgrade_rollback"]
GATE = 6
"""The step behind which ranks wait until the missing one is there again."""


def scaled_out(
    tmp_path: Path, trace: Trace, more: Mapping[str, str], script: Path = WORKER, wanted: str = "stop"
) -> Running:
    """The job, in which a rank is killed, and replaced when the others have come to the gate.

    They wait there until they are stopped, or until there was a second fault.
    """
    directory, back = tmp_path / "d", tmp_path / "back"
    command = mindx.command(script, "--dir", directory, "--final", directory / "final.pt", ranks=4)
    gates(directory)
    (directory / f"go-{GATE}").unlink()
    variables = {"LASTGASP_FAULT": KILLED, "LASTGASP_FAULT_LOG": str(tmp_path / "faults.log"), AFTER: str(back)}
    variables |= {mindx.SCALE_OUT: str(back)} | POD | dict(more)
    with running(tmp_path, command, **variables) as [started]:
        until(lambda: [event for event in trace.events("heard") if event["step"] == GATE], "they come to the gate")
        if script != WORKER:
            script.write_bytes(script.read_bytes() + b"# edited\n")
        back.touch()
        until(lambda: {"stop": len(trace.events("stop", 0)) == 2, "second": (directory / "second").exists()}[wanted],
              "the ranks are stopped for the new one, or that has ended")  # fmt: skip
        (directory / f"go-{GATE}").touch()
        assert started.code() == 0, started.output[-8000:]
    return started


def check_grown(directory: Path, undisturbed: Path, lost: list[int]) -> None:
    """All processes that trained have stayed, each number is that of the beginning, and nothing was saved or lost."""
    for rank in range(4):
        rows = [row for row in entered(directory, rank) if row[3] == 4]
        assert [row[1:3] for row in rows] == [(0, rank), (GATE, rank)], rows
        assert (rows[0][0] == rows[1][0]) == (rank not in lost), rows
    assert list(directory.glob("gasp-*")) == []
    shrunk, grown = incidents(directory)
    assert (shrunk.rung, shrunk.ending, shrunk.step_saved, shrunk.steps_lost) == ("shrink", "in_place", 3, 0), shrunk
    ended = (grown.rung, grown.ending, grown.step_saved, grown.steps_lost, grown.led_by, grown.faults)
    assert ended == ("grow", "in_place", GATE, 0, "MindIO in TaskD", []), grown
    taken = f"MindIO in TaskD takes in {len(lost)} of 4 ranks, which were missing: training goes on with all of them"
    assert taken in grown.notes and any("digest" in one for one in grown.notes), grown.notes
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


@pytest.mark.parametrize(
    "lost", [[1], *(pytest.param(ranks, marks=pytest.mark.full) for ranks in ([3], [1, 3], [1, 2]))]
)
def test_lost_ranks_are_taken_in_again(
    lost: list[int], tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks, fewer, and four: new processes take the step from ranks that are there, which keep their own."""
    directory = tmp_path / "d"
    fault = ";".join(KILLED.replace("rank=3", f"rank={rank}") for rank in lost)
    with used(TORCH, tmp_path, monkeypatch) as trace:
        scaled_out(tmp_path, trace, {"LASTGASP_FAULT": fault})
        [up] = trace.events("upgraded")
        assert (up["taken_in"], up["step"]) == (lost, GATE)
        for rank in range(4):
            orders = [name for name in trace.names(rank) if name in (*SURVIVOR, *GROWN, "repair", "save_ckpt")]
            before = [] if rank in lost else [*SURVIVOR, "stop", "clean"]
            gives = rank in {next(r for r in (one + 1, one + 2) if r not in lost) % 4 for one in lost}
            assert orders == before + [name for name in GROWN if name != GROWN[1] or gives or rank in lost]
    check_grown(directory, undisturbed, lost)


@pytest.mark.full
def test_a_rank_may_be_missing_once_more(tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four, three, four, three; the last one comes back in a moment that nobody chooses, or not before the end."""
    fault = f"{KILLED};kind=sigkill,rank=2,step=8,phase=backward,incarnation=2"
    with used(TORCH, tmp_path, monkeypatch) as trace:
        scaled_out(tmp_path, trace, {"LASTGASP_FAULT": fault})
    found = incidents(tmp_path / "d")
    assert [one.rung for one in found] in (["shrink", "grow", "shrink"], ["shrink", "grow", "shrink", "grow"]), found
    assert [one.steps_lost for one in found] == [0] * len(found) and found[2].step_saved == 8
    check_samples(tmp_path / "d", undisturbed)
    assert differences(undisturbed / "final.pt", tmp_path / "d" / "final.pt") == []


ON_THE_WAY_BACK = [
    "stop,1,self", "clean,2,self", "taken in,1,self", "taken in,0,self", "rebuild,3,self", "resize,0,self",
    "resize,1,self", "kept,0,self", "kept,1,self", "joining again,2,self", "function called,1,self",
    "function called,3,self", "handover,3,self", "handover,0,self", "state taken,3,self", "state taken,3,1",
]  # fmt: skip


def dumped(tmp_path: Path, undisturbed: Path, step: int = GATE) -> None:
    """The last incident says that the step was saved; then all four ranks have trained on with it."""
    shrunk, *grown, last = incidents(tmp_path / "d")
    assert (shrunk.rung, shrunk.steps_lost) == ("shrink", 0) and [one.rung for one in grown] in ([], ["grow"])
    assert (last.ending, last.step_saved, last.steps_lost) == ("saved", step, 0), last
    check_samples(tmp_path / "d", undisturbed)
    assert differences(undisturbed / "final.pt", tmp_path / "d" / "final.pt") == []


@pytest.mark.product
@pytest.mark.full
@pytest.mark.parametrize(("second", "lost"), [*((one, 3) for one in ON_THE_WAY_BACK), ("handover,0,self", 1)])
def test_a_fault_while_ranks_are_taken_in_ends_with_the_step_dumped(
    second: str, lost: int, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are there, of who gives its state, and of the new one. To MindIO that holds the step, too: where it
    is the lowest rank MindIO asks it for the dump."""
    with used(TORCH, tmp_path, monkeypatch) as trace:
        fault = KILLED.replace("rank=3", f"rank={lost}")
        scaled_out(tmp_path, trace, {VARIABLE: second, "LASTGASP_FAULT": fault} | SOON)
    assert (tmp_path / "d" / "second").exists()
    dumped(tmp_path, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("last", ["upgrade", "upgrade_repair", "upgrade_rollback"])
def test_an_order_that_is_not_followed_by_the_next_one_ends_with_the_step_saved(
    last: str, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says anything any more: each rank that is there waits for its limit."""
    limits = {"LASTGASP_SAVE_TIMEOUT": "8", "LASTGASP_FINISH_TIMEOUT": "4", "MINDIO_STANDIN_SILENT": last}
    with used(TORCH, tmp_path, monkeypatch) as trace:
        scaled_out(tmp_path, trace, limits)
        assert trace.events("silent")
    dumped(tmp_path, undisturbed)


@pytest.mark.full
def test_a_new_process_that_runs_other_code_is_not_taken_in(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its order fails; the step is dumped, and all four begin with it."""
    script = tmp_path / "train_elastic.py"
    script.write_bytes(WORKER.read_bytes())
    with used(TORCH, tmp_path, monkeypatch) as trace:
        done = scaled_out(tmp_path, trace, SOON, script=script)
        assert trace.events("zit_upgrade_rebuild_failed", 3) and trace.events("upgraded") == []
    why = "rank 3 cannot be taken into the running job: it runs other code than the ranks that are there (the script)"
    assert why in done.output
    dumped(tmp_path, undisturbed)


@pytest.mark.full
def test_a_new_process_that_ends_too_early_is_not_waited_for(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MindIO has not heard of it: the others train to the end."""
    directory = tmp_path / "d"
    with used(TORCH, tmp_path, monkeypatch) as trace:
        scaled_out(tmp_path, trace, {VARIABLE: "joins,3,self"}, wanted="second")
        assert len(trace.events("stop", 0)) == 1
    [shrunk] = incidents(directory)
    assert (shrunk.rung, shrunk.steps_lost) == ("shrink", 0)
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


@pytest.mark.full
def test_nobody_is_taken_in_before_the_others_have_completed_a_step(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps the step that it has just begun with: that is dumped."""
    directory, log = tmp_path / "d", tmp_path / "faults.log"
    variables = {"LASTGASP_FAULT": KILLED, "LASTGASP_FAULT_LOG": str(log), mindx.SCALE_OUT: str(log)}
    with used(TORCH, tmp_path, monkeypatch) as trace:
        with running(tmp_path, job(directory), **POD, **SOON, **variables) as [started]:
            until(log.exists, "a rank is killed in the step behind the gate")
            (directory / "go-3").unlink()
            until(lambda: len(trace.events("stop", 0)) == 2, "the ranks are stopped for the new one")
            (directory / "go-3").touch()
            assert started.code() == 0, started.output[-8000:]
        assert trace.events("zit_upgrade_rebuild_failed", 0) and trace.events("upgraded") == []
    dumped(tmp_path, undisturbed, step=3)


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
