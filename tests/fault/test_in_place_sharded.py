"""Recovery in place where each rank alone holds a part: survivors stay, a new process takes the dead one's arena."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from lastgasp.checkpoint import candidates
from lastgasp.pytorch.sharded import LAYOUT
from lastgasp.testing.weights import differences
from support import again_faults
from support.disturbed import disturbed, lines
from support.launchers import SUPPORT, Running, incidents, run, undisturbed_jobs

WORKER = SUPPORT / "train_again_sharded.py"
MOMENTS = ("forward", "backward", "update", "step_end", "arena_copy")
KILL = "kind=sigkill,rank=1,step=8,phase=backward"
SECOND = "no step was completed since training began, when the fault before was answered in place"

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final weights of a job without a fault, by shape and number of ranks."""
    return undisturbed_jobs(tmp_path_factory, lambda folder, shape, ranks: job(shape, ranks, folder))


def job(shape: str, ranks: int, directory: Path, *more: str) -> list[str]:
    """Its command line."""
    return run(WORKER, "--dir", directory, "--final", directory / "final.pt", "--shape", shape, *more, ranks=ranks)


def check(
    directory: Path, started: Running, ranks: int, replaced: int | None, begun: tuple[int, ...] = (0, 8), lost: int = 0
) -> None:
    """Faults answered in place: all processes stay but that of the dead rank, and nothing is on the disk."""
    found = incidents(directory)
    rung = "retry" if replaced is None else "replace"
    assert [(one.ending, one.rung, one.step_saved, one.steps_lost) for one in found] == [
        ("in_place", rung, step, lost) for step in begun[1:]
    ], started.output[-6000:]
    for rank in range(ranks):
        entered = lines(directory, rank, "entered")
        assert [int(step) for _, step, _ in entered] == list(begun), started.output[-6000:]
        assert len({pid for pid, _, _ in entered}) == (len(begun) if rank == replaced else 1)
        assert lines(directory, rank, "ended") == [[entered[-1][0], "12"]]
    assert not list(candidates([directory], LAYOUT))


@pytest.mark.parametrize(
    ("victim", "phase"),
    [pytest.param(*case, marks=() if case == (1, "update") else pytest.mark.full)
     for case in itertools.product((0, 1), MOMENTS)],
)  # fmt: skip
def test_a_killed_rank_is_replaced(victim: int, phase: str, tmp_path: Path, undisturbed: Any) -> None:
    """Also where the survivor has completed the step by then: it goes back, from its own arena."""
    directory = tmp_path / "d"
    faults = f"kind=sigkill,rank={victim},step=8,phase={phase}"
    with disturbed(tmp_path, job("plain", 2, directory), faults) as started:
        pass
    check(directory, started, 2, victim)
    assert differences(undisturbed("plain", 2), directory / "final.pt") == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "ranks", "victim", "phase"),
    [
        ("zero", 2, 0, "forward"),
        ("zero", 2, 1, "backward"),
        ("zero", 2, 1, "after_update"),
        ("hybrid", 4, 0, "forward"),
        ("hybrid", 4, 3, "backward"),
        ("plain", 4, 2, "backward"),
        ("accumulated", 2, 1, "backward"),
        ("half", 2, 1, "backward"),
        ("offload", 2, 1, "update"),
        ("checkpointed", 2, 1, "backward"),
    ],
)
def test_in_other_shapes(shape: str, ranks: int, victim: int, phase: str, tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    faults = f"kind=sigkill,rank={victim},step=8,phase={phase}"
    with disturbed(tmp_path, job(shape, ranks, directory), faults) as started:
        pass
    check(directory, started, ranks, victim)
    assert differences(undisturbed(shape, ranks), directory / "final.pt") == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "phase", "arena", "step"),
    [
        ("plain", "backward", "every 1", 8),
        ("plain", "update", "every 1", 8),
        ("plain", "arena_copy", "every 1", 9),
        ("plain", "backward", "every 5", 8),  # from live states: no step is lost although the arenas hold an older one
        ("zero", "forward", "every 1", 8),
        ("hybrid", "backward", "every 1", 8),
    ],
)
def test_a_step_that_failed_is_done_again(
    shape: str, phase: str, arena: str, step: int, tmp_path: Path, undisturbed: Any
) -> None:
    directory, ranks = tmp_path / "d", 4 if shape == "hybrid" else 2
    faults = f"kind=exception,rank=1,step=8,phase={phase}"
    with disturbed(tmp_path, job(shape, ranks, directory, "--arena", arena), faults) as started:
        pass
    check(directory, started, ranks, None, (0, step))
    assert differences(undisturbed(shape, ranks), directory / "final.pt") == []


@pytest.mark.full
@pytest.mark.cold
def test_a_hung_rank_is_replaced(tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    faults = "kind=sigstop,rank=1,step=8,phase=forward"
    with disturbed(tmp_path, job("plain", 2, directory), faults, LASTGASP_HANG_TIMEOUT="8") as started:
        pass
    check(directory, started, 2, 1)
    assert differences(undisturbed("plain", 2), directory / "final.pt") == []


@pytest.mark.full
def test_two_faults_with_a_step_in_between(tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    faults = f"{KILL};kind=sigkill,rank=1,step=9,phase=update,incarnation=1"
    with disturbed(tmp_path, job("plain", 2, directory), faults) as started:
        pass
    check(directory, started, 2, 1, (0, 8, 9))
    assert differences(undisturbed("plain", 2), directory / "final.pt") == []


@pytest.mark.full
def test_what_is_not_in_the_arenas_is_done_again(tmp_path: Path, undisturbed: Any) -> None:
    """Three completed steps, as announced for every fifth one."""
    directory = tmp_path / "d"
    with disturbed(tmp_path, job("plain", 2, directory, "--arena", "every 5"), KILL) as started:
        pass
    check(directory, started, 2, 1, (0, 5), lost=3)
    [incident] = incidents(directory)
    assert any("all ranks go back to step 5" in note and "3 completed steps" in note for note in incident.notes)
    assert differences(undisturbed("plain", 2), directory / "final.pt") == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("faults", "more"),
    [
        pytest.param(KILL, ["--dies", "1"], id="the new process, at once"),
        pytest.param(KILL, ["--dies", "0"], id="a survivor, at once"),
        pytest.param(f"{KILL};kind=sigkill,rank=0,step=8,phase=forward,incarnation=1", [], id="a survivor"),
        pytest.param(f"{KILL};kind=sigkill,rank=1,step=8,phase=update,incarnation=1", [], id="the new process"),
        pytest.param(f"{KILL};kind=exception,rank=1,step=8,phase=forward,incarnation=1", [], id="an exception"),
        pytest.param(KILL, ["--outside"], id="a model that was sharded before"),
        pytest.param(f"{KILL};kind=sigkill,rank=all,step=8,phase=forward,incarnation=1", [], id="all"),
    ],
)
def test_a_second_fault_is_answered_by_a_restart(
    faults: str, more: list[str], tmp_path: Path, undisturbed: Any
) -> None:
    """The step is in the arenas of the living and the dead, and saved from there; all killed leave it there."""
    directory = tmp_path / "d"
    with disturbed(tmp_path, job("plain", 2, directory, *more), faults) as started:
        pass
    first, last = incidents(directory)
    assert (first.ending, first.rung, first.steps_lost) == ("in_place", "replace", 0), started.output[-6000:]
    assert (last.step_saved, last.steps_lost, last.rung) == (8, 0, ""), (last, started.output[-6000:])
    if "rank=all" in faults:
        assert last.ending == "in_arenas"
    elif more == ["--dies", "0"] and last.ending == "in_arenas":
        assert "rank 1: never joined" in last.reason  # nobody was there yet who could have saved
    else:
        why = "a fault of that kind is not answered in place" if more == ["--outside"] else SECOND
        assert last.ending == "saved" and last.not_in_place.startswith(why), last
        assert [c.step for c in candidates([directory], LAYOUT)] == [8]
    for rank in range(2):
        assert {step for _, step, _ in lines(directory, rank, "entered")} == {"0", "8"}
    assert differences(undisturbed("plain", 2), directory / "final.pt") == []


@pytest.mark.full
@pytest.mark.parametrize("where", ["state kept,0", "joining,2", "function called,0", "group made,1", "first step,2"])
def test_the_arenas_of_all_who_have_not_begun_again_count(where: str, tmp_path: Path, undisturbed: Any) -> None:
    """A survivor or the new process is killed on its way; the others write its part, and that of the first one."""
    directory = tmp_path / "d"
    second = {again_faults.VARIABLE: f"{where},self"}
    with disturbed(tmp_path, job("plain", 3, directory), KILL, **second) as started:
        pass
    assert (directory / "second").exists(), started.output[-6000:]
    first, last = incidents(directory)
    assert (first.ending, first.rung, first.steps_lost) == ("in_place", "replace", 0), started.output[-6000:]
    assert (last.ending, last.step_saved, last.steps_lost) == ("saved", 8, 0), (last, started.output[-6000:])
    for rank in range(3):
        assert {step for _, step, _ in lines(directory, rank, "entered")} == {"0", "8"}
    assert differences(undisturbed("plain", 3), directory / "final.pt") == []


@pytest.mark.full
def test_a_damaged_arena_is_not_begun_with(tmp_path: Path, undisturbed: Any) -> None:
    """The new process finds it; the step before is saved from other slots, and the incident says what that costs."""
    directory = tmp_path / "d"
    with disturbed(tmp_path, job("plain", 2, directory, "--damaged"), KILL) as started:
        pass
    first, last = incidents(directory)
    assert (last.ending, last.step_saved, last.rung) == ("saved", 7, ""), (last, started.output[-6000:])
    assert any("does not match its digest" in fault.cause for fault in last.faults), last
    assert first.steps_lost == 1 and any("went on from step 7" in note for note in first.notes), first
    assert {step for _, step, _ in lines(directory, 0, "entered")} == {"0", "7"}
    assert differences(undisturbed("plain", 2), directory / "final.pt") == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "line"),
    [
        pytest.param(["--arena", "off"], "there is no recovery in place without arenas", id="off"),
        pytest.param(["--full"], "of memory are available", id="no memory"),
    ],
)
def test_without_arenas_the_job_restarts_as_ever(more: list[str], line: str, tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    with disturbed(tmp_path, job("plain", 2, directory, *more), KILL) as started:
        pass
    [incident] = incidents(directory)
    assert (incident.ending, incident.rung) == ("gave_up", ""), started.output[-6000:]
    assert incident.not_in_place == "no rank holds a common step", incident
    assert line in started.output
    assert differences(undisturbed("plain", 2), directory / "final.pt") == []
