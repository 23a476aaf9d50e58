"""MindIO's elastic training: ranks that are lost are left out by TaskD's word, and each sample is still used once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support import mindx
from support.again_faults import VARIABLE
from support.launchers import SUPPORT, finish, incidents, running, until
from support.mindio_scaling import KILLED, LOOP, POD, SOON
from support.recovery_backends import LEADERS, TORCH, Backend, used

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a job of four ranks without a fault, on our own engine."""
    return LOOP.undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize("lost", [3, 1])
def test_the_job_goes_on_without_a_lost_rank(
    leader: Backend, lost: int, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LOOP.shrunk(leader, tmp_path, undisturbed, monkeypatch, lost)


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
    LOOP.second_fault(leader, tmp_path, undisturbed, monkeypatch, 3, **{VARIABLE: second})


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
    LOOP.second_fault(leader, tmp_path, undisturbed, monkeypatch, step, LASTGASP_FAULT=faults)


@pytest.mark.parametrize(
    "lost", [[1], *(pytest.param(ranks, marks=pytest.mark.full) for ranks in ([3], [1, 3], [1, 2]))]
)
def test_lost_ranks_are_taken_in_again(
    lost: list[int], tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LOOP.taken_in(tmp_path, undisturbed, monkeypatch, lost)


@pytest.mark.full
def test_the_last_rank_that_is_left_takes_in_the_other(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with two micro-batches each, and one with four."""
    replace(LOOP, ranks=2).taken_in(tmp_path, undisturbed, monkeypatch, [1])


@pytest.mark.full
def test_a_rank_may_be_missing_once_more(tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four, three, four, three; the last one comes back in a moment that nobody chooses, or not before the end."""
    fault = f"{KILLED};kind=sigkill,rank=2,step=8,phase=backward,incarnation=2"
    with used(TORCH, tmp_path, monkeypatch) as trace:
        LOOP.scaled_out(tmp_path, trace, {"LASTGASP_FAULT": fault})
    found = incidents(tmp_path / "d")
    assert [one.rung for one in found] in (["shrink", "grow", "shrink"], ["shrink", "grow", "shrink", "grow"]), found
    assert [one.steps_lost for one in found] == [0] * len(found) and found[2].step_saved == 8
    LOOP.same(tmp_path / "d", undisturbed)


ON_THE_WAY_BACK = [
    "stop,1,self", "clean,2,self", "taken in,1,self", "taken in,0,self", "rebuild,3,self", "resize,0,self",
    "resize,1,self", "kept,0,self", "kept,1,self", "joining again,2,self", "function called,1,self",
    "function called,3,self", "handover,3,self", "handover,0,self", "state taken,3,self", "state taken,3,1",
]  # fmt: skip


@pytest.mark.product
@pytest.mark.full
@pytest.mark.parametrize(("second", "lost"), [*((one, 3) for one in ON_THE_WAY_BACK), ("handover,0,self", 1)])
def test_a_fault_while_ranks_are_taken_in_ends_with_the_step_dumped(
    second: str, lost: int, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are there, of who gives its state, and of the new one. To MindIO that holds the step, too: where it
    is the lowest rank MindIO asks it for the dump."""
    LOOP.dumped_on_the_way_back(second, lost, tmp_path, undisturbed, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("last", ["upgrade", "upgrade_repair", "upgrade_rollback"])
def test_an_order_that_is_not_followed_by_the_next_one_ends_with_the_step_saved(
    last: str, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says anything any more: each rank that is there waits for its limit."""
    limits = {"LASTGASP_SAVE_TIMEOUT": "8", "LASTGASP_FINISH_TIMEOUT": "4", "MINDIO_STANDIN_SILENT": last}
    with used(TORCH, tmp_path, monkeypatch) as trace:
        LOOP.scaled_out(tmp_path, trace, limits)
        assert trace.events("silent")
    LOOP.dumped(tmp_path, undisturbed)


@pytest.mark.full
def test_a_new_process_that_runs_other_code_is_not_taken_in(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its order fails; the step is dumped, and all four begin with it."""
    script = tmp_path / "train_elastic.py"
    script.write_bytes(LOOP.script.read_bytes())
    with used(TORCH, tmp_path, monkeypatch) as trace:
        done = LOOP.scaled_out(tmp_path, trace, SOON, script=script)
        assert trace.events("zit_upgrade_rebuild_failed", 3) and trace.events("upgraded") == []
    why = "rank 3 cannot be taken into the running job: it runs other code than the ranks that are there (the script)"
    assert why in done.output
    LOOP.dumped(tmp_path, undisturbed)


@pytest.mark.full
def test_a_new_process_that_ends_too_early_is_not_waited_for(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MindIO has not heard of it: the others train to the end."""
    directory = tmp_path / "d"
    with used(TORCH, tmp_path, monkeypatch) as trace:
        LOOP.scaled_out(tmp_path, trace, {VARIABLE: "joins,3,self"}, wanted="second")
        assert len(trace.events("stop", 0)) == 1
    [shrunk] = incidents(directory)
    assert (shrunk.rung, shrunk.steps_lost) == ("shrink", 0)
    LOOP.same(directory, undisturbed)


@pytest.mark.full
def test_nobody_is_taken_in_before_the_others_have_completed_a_step(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps the step that it has just begun with: that is dumped."""
    directory, log = tmp_path / "d", tmp_path / "faults.log"
    variables = {"LASTGASP_FAULT": KILLED, "LASTGASP_FAULT_LOG": str(log), mindx.SCALE_OUT: str(log)}
    with used(TORCH, tmp_path, monkeypatch) as trace:
        command, stay = LOOP.job(directory), directory / "stay-1"
        stay.touch()
        with running(tmp_path, command, **POD, **SOON, **variables) as [started]:
            until(lambda: len(trace.events("stop", 0)) == 2, "the ranks are stopped for the new one")
            stay.unlink()
            assert started.code() == 0, started.output[-8000:]
        assert trace.events("zit_upgrade_rebuild_failed", 0) and trace.events("upgraded") == []
    LOOP.dumped(tmp_path, undisturbed, step=3)


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
