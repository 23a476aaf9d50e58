"""Recovery in place of a fit with `ModelParallelStrategy`: each rank begins with its own part, from its arena."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from lastgasp.checkpoint import candidates
from lastgasp.testing.weights import differences
from lastgasp_lightning.checkpoint_io import SHARDED
from support import again_faults, logged
from support.disturbed import disturbed, lines
from support.launchers import SUPPORT, Running, incidents, run, undisturbed_jobs

WORKER = SUPPORT / "train_again_lightning_sharded.py"
MOMENTS = ("forward", "backward", "update", "step_end", "arena_copy")
KILL = "kind=sigkill,rank=1,step=7,phase=backward"  # ModelCheckpoint has not saved that step
SECOND = "no step was completed since training began, when the fault before was answered in place"

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directory of a job without a fault, by shape and number of ranks."""
    return undisturbed_jobs(tmp_path_factory, lambda folder, shape, ranks, *more: job(shape, ranks, folder, *more), "")


def job(shape: str, ranks: int, directory: Path, *more: str) -> list[str]:
    """Its command line."""
    return run(WORKER, "--dir", directory, "--shape", shape, *more, ranks=ranks)


def check(
    directory: Path, started: Running, ranks: int, replaced: int | None, begun: tuple[int, ...] = (0, 8), lost: int = 0
) -> None:
    """Faults answered in place: all processes stay but that of the dead rank, and nothing is saved."""
    found = incidents(directory)
    rung = "retry" if replaced is None else "replace"
    assert [(one.ending, one.rung, one.step_saved, one.steps_lost) for one in found] == [
        ("in_place", rung, step, lost) for step in begun[1:]
    ], (found, started.output[-6000:])
    for rank in range(ranks):
        entered = lines(directory, rank, "entered")
        assert [int(step) for _, step in entered] == list(begun), started.output[-6000:]
        assert len({pid for pid, _ in entered}) == (len(begun) if rank == replaced else 1)
        assert lines(directory, rank, "ended") == [[entered[-1][0], "12"]]
    assert not list(directory.glob("gasp-*"))


def check_same(one: Path, other: Path, ranks: int) -> None:
    """The same weights, lines in the log, plain values and checkpoints."""
    assert differences(other / "final.pt", one / "final.pt") == []
    assert logged.rows(one / "logs/table") == logged.rows(other / "logs/table")
    for rank in range(ranks):
        assert lines(one, rank, "seen") == lines(other, rank, "seen")
    found, due = ({path.name for path in each.glob("*.ckpt")} for each in (one, other))
    assert found == due != set()


@pytest.mark.full
@pytest.mark.parametrize(
    ("faults", "more"),
    [
        pytest.param(KILL, ["--dies", "1"], id="the new process, at once"),
        pytest.param(f"{KILL};kind=sigkill,rank=1,step=7,phase=update,incarnation=1", [], id="the new process"),
        pytest.param(f"{KILL};kind=exception,rank=1,step=7,phase=forward,incarnation=1", [], id="an exception"),
    ],
)
def test_a_second_fault_is_answered_by_a_restart(
    faults: str, more: list[str], tmp_path: Path, undisturbed: Any
) -> None:
    """The step is in the arenas of the living and the dead, and saved from there."""
    directory = tmp_path / "d"
    with disturbed(tmp_path, job("plain", 2, directory, "--stateless", *more), faults) as started:
        pass
    first, last = incidents(directory)
    assert (first.ending, first.rung, first.steps_lost) == ("in_place", "replace", 0), started.output[-6000:]
    assert (last.ending, last.step_saved, last.steps_lost, last.rung) == ("saved", 7, 0, ""), last
    assert last.not_in_place.startswith(SECOND), last
    assert [found.step for found in candidates([directory], SHARDED) if "gasp" in found.path.name] == [7]
    assert differences(undisturbed("plain", 2, "--stateless") / "final.pt", directory / "final.pt") == []


@pytest.mark.full
@pytest.mark.parametrize("where", ["state kept,0"])
def test_the_arenas_of_all_who_have_not_begun_again_count(where: str, tmp_path: Path, undisturbed: Any) -> None:
    """A survivor or the new process is killed on its way; the others write its part, and that of the first one."""
    directory = tmp_path / "d"
    second = {again_faults.VARIABLE: f"{where},self"}
    with disturbed(tmp_path, job("plain", 3, directory, "--stateless"), KILL, **second) as started:
        pass
    assert (directory / "second").exists(), started.output[-6000:]
    first, last = incidents(directory)
    assert (first.ending, first.rung, first.steps_lost) == ("in_place", "replace", 0), started.output[-6000:]
    assert (last.ending, last.step_saved, last.steps_lost) == ("saved", 7, 0), (last, started.output[-6000:])
    assert differences(undisturbed("plain", 3, "--stateless") / "final.pt", directory / "final.pt") == []


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
    check_same(directory, undisturbed("plain", 2), 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "ranks", "victim", "phase"),
    [
        ("plain", 4, 2, "backward"),
        ("hybrid", 4, 0, "forward"),
        ("tensor", 2, 1, "backward"),
        ("ending", 2, 0, "update"),
        ("accumulated", 2, 1, "backward"),
        ("late", 2, 0, "backward"),
    ],
)
def test_in_other_shapes(shape: str, ranks: int, victim: int, phase: str, tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    faults = f"kind=sigkill,rank={victim},step=8,phase={phase}"
    with disturbed(tmp_path, job(shape, ranks, directory), faults) as started:
        pass
    check(directory, started, ranks, victim)
    check_same(directory, undisturbed(shape, ranks), ranks)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "phase", "arena", "step"),
    [
        ("plain", "backward", "every 1", 8),
        ("plain", "update", "every 1", 8),
        ("plain", "arena_copy", "every 1", 9),
        ("plain", "forward", "every 5", 8),  # from live states: no step is lost although the arenas hold an older one
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
    check_same(directory, undisturbed(shape, ranks), ranks)


@pytest.mark.full
@pytest.mark.cold
def test_a_hung_rank_is_replaced(tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    faults = "kind=sigstop,rank=1,step=8,phase=forward"
    with disturbed(tmp_path, job("plain", 2, directory), faults, LASTGASP_HANG_TIMEOUT="8") as started:
        pass
    check(directory, started, 2, 1)
    check_same(directory, undisturbed("plain", 2), 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("shape", "more", "line", "not_in_place"),
    [
        pytest.param("plain", ["--arena", "off"], "there is no recovery in place without arenas", "", id="off"),
        pytest.param("plain", ["--full"], "of memory are available", "no rank holds a common step", id="no memory"),
        pytest.param("hooked", [], "is not called at each step", "is not called at each step", id="a hook"),
        pytest.param("plain", ["--recovery", "default"], "", "", id="by default"),
    ],
)
def test_where_it_cannot_be_the_job_restarts_as_ever(
    shape: str, more: list[str], line: str, not_in_place: str, tmp_path: Path, undisturbed: Any
) -> None:
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(shape, 2, directory, "--stateless", *more), KILL) as started:
        pass
    [incident] = incidents(directory)
    assert (incident.ending in ("saved", "gave_up"), incident.rung) == (True, ""), started.output[-6000:]
    assert not_in_place in incident.not_in_place, incident
    assert line in started.output
    assert differences(undisturbed(shape, 2, "--stateless") / "final.pt", directory / "final.pt") == []
