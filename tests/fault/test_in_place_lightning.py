"""Recovery in place of Lightning jobs: `fit` goes on in the processes that are left, and logs each step once."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lastgasp.checkpoint import candidates
from lastgasp.exitcodes import SAVED
from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from lastgasp_lightning.checkpoint_io import LAYOUT
from support import again_faults, logged, older_place
from support.launchers import (
    LIMIT,
    SUPPORT,
    Running,
    finish,
    incidents,
    run,
    running,
    torchrun,
    undisturbed_jobs,
    until,
)

WORKER = SUPPORT / "train_again_lightning.py"
VALUES = SUPPORT / "train_values_lightning.py"
READY = "a restart will fork its ranks from a warm process"
STEPS = "14"
SHAPES = ("ema", "swa", "manual", "schedule", "config", "compile", "scaler", "common", "bare")

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


def job(launcher: Any, ranks: int, directory: Path, *more: str) -> list[str]:
    """Its command line."""
    worker = SUPPORT / "train_users_lightning.py" if "--shape" in more else WORKER
    command: list[str] = launcher(worker, "--dir", directory, *more, ranks=ranks)
    return [sys.executable if "--board" in more else command[0], *command[1:]]  # others see no TensorBoard


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directory of a job without a fault, by its number of ranks and arguments."""
    return undisturbed_jobs(tmp_path_factory, lambda folder, ranks, *more: job(torchrun, ranks, folder, *more), "")


@contextmanager
def disturbed(folder: Path, command: list[str], faults: str, **more: str) -> Iterator[Running]:
    """A job whose faults come once a warm process is ready; it ends well."""
    directory, log = folder / "d", folder / "faults.log"
    directory.mkdir(exist_ok=True)
    variables = {"LASTGASP_LOG": "debug", "LASTGASP_WARM": "auto", "LASTGASP_FAULT_LOG": str(log)}
    variables |= {"LASTGASP_FAULT": faults} | more
    with running(folder, command, **variables) as [started]:
        if variables["LASTGASP_WARM"] == "auto":
            until(lambda: READY in started.output, "the warm process is ready", LIMIT)
        (directory / "go").touch()
        yield started
        assert started.code() == 0, started.output[-6000:]
    assert len(read_log(log) if faults else []) == len(list(filter(None, faults.split(";")))), started.output[-6000:]


def lines(directory: Path, rank: int, what: str) -> list[list[str]]:
    """What a rank has noted about itself."""
    return [line.split()[1:] for line in (directory / f"rank-{rank}").read_text().splitlines() if line.startswith(what)]


def check_in_place(
    directory: Path, job: Running, ranks: int, replaced: int | None, steps: tuple[int, ...] = (8,), noted: str = ""
) -> None:
    """One fault, answered in place: all processes stay but that of the dead rank, and `fit` returns once in each.

    Args:
        steps: one of them is what all go on with.
    """
    [incident] = incidents(directory)
    rung = "retry" if replaced is None else "replace"
    assert (incident.ending, incident.rung, incident.steps_lost) == ("in_place", rung, 0), job.output[-6000:]
    assert len(incident.notes) == bool(noted) and all(note.startswith(noted) for note in incident.notes)
    goes_on = lines(directory, 0, "entered")[-1][1]
    assert int(goes_on) in steps
    for rank in range(ranks):
        entered, left = lines(directory, rank, "entered"), lines(directory, rank, "left")
        assert [begun for _, begun in entered] == ["0", goes_on], entered
        assert (len({pid for pid, _ in entered}) == 1) == (rank != replaced)
        assert [pid for pid, _ in left] == [entered[-1][0]]


def check_same(one: Path, other: Path) -> None:
    """The same weights, the same lines in the same logs, the same checkpoints."""
    assert differences(one / "final.pt", other / "final.pt") == []
    if not (other / "logs").exists():  # barebones
        return
    assert logged.rows(one / "logs/table") == logged.rows(other / "logs/table")
    assert scalars(one) == scalars(other)
    assert logged.versions(one / "logs") == logged.versions(other / "logs")


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's logger has written, where the job has one."""
    return logged.scalars(directory / "logs/board") if (directory / "logs/board").exists() else {}


def checkpoints(directory: Path) -> list[str]:
    """What ModelCheckpoint has left; after a restart it may find a file of that name and choose another one."""
    return sorted(path.name for path in directory.glob("logs/**/*.ckpt"))


def test_a_killed_rank_0_is_replaced_and_each_step_is_logged_once(tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(run, 2, directory), "kind=sigkill,rank=0,step=8,phase=backward") as started:
        pass
    check_in_place(directory, started, 2, replaced=0)
    check_same(directory, undisturbed(2))
    assert checkpoints(directory) == checkpoints(undisturbed(2)) != []


def test_a_script_that_imports_pytorch_lightning_is_protected_alike(tmp_path: Path, undisturbed: Any) -> None:
    directory, script = tmp_path / "d", tmp_path / "train.py"
    text = WORKER.read_text().replace("lightning.pytorch", "pytorch_lightning")
    script.write_text(text.replace("lastgasp_lightning", "lastgasp_pytorch_lightning"))
    command = run(script, "--dir", directory)
    with disturbed(tmp_path, command, "kind=sigkill,rank=1,step=8,phase=backward") as started:
        pass
    check_in_place(directory, started, 2, replaced=1)
    check_same(directory, undisturbed(2))
    assert checkpoints(directory) == checkpoints(undisturbed(2)) != []


@pytest.mark.skipif(bool(older_place.missing("lightning")), reason=older_place.missing("lightning"))
@pytest.mark.parametrize("recovery", ["auto", "restart"])
def test_an_older_lightning_goes_on_with_the_same_numbers(tmp_path: Path, undisturbed: Any, recovery: str) -> None:
    directory, script = tmp_path / "d", tmp_path / "train.py"
    script.write_text(
        f"import lightning, runpy\nassert lightning.__version__ == {older_place.version('lightning')!r}\n"
        f"runpy.run_path({str(WORKER)!r}, run_name='__main__')\n"
    )
    paths = os.pathsep.join([str(older_place.folder("lightning")), str(SUPPORT.parent)])
    faults, more = "kind=sigkill,rank=1,step=8,phase=backward", {"LASTGASP_RECOVERY": recovery, "PYTHONPATH": paths}
    with disturbed(tmp_path, run(script, "--dir", directory), faults, **more) as started:
        pass
    if recovery == "auto":
        check_in_place(directory, started, 2, replaced=1)
    else:
        [incident] = incidents(directory)
        assert (incident.ending, incident.steps_lost) == ("saved", 0)
    assert differences(directory / "final.pt", undisturbed(2) / "final.pt") == []


def test_a_step_that_failed_is_done_again(tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    faults = "kind=exception,rank=1,step=8,phase=backward"
    with disturbed(tmp_path, job(torchrun, 2, directory), faults, LASTGASP_WARM="off") as started:
        pass
    check_in_place(directory, started, 2, replaced=None)
    check_same(directory, undisturbed(2))
    assert checkpoints(directory) == checkpoints(undisturbed(2)) != []


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "faults", "replaced", "more", "board"),
    [
        pytest.param(2, "kind=sigkill,rank=1,step=8,phase=validation", 1, [], False, id="in validation"),
        pytest.param(2, "kind=sigkill,rank=0,step=8,phase=forward", 0, [], True, id="rank 0, TensorBoard"),
        pytest.param(3, "kind=sigkill,rank=1,step=8,phase=backward", 1, [], False, id="one of three"),
        pytest.param(3, "kind=sigkill,rank=0,step=8,phase=data", 0, ["--accumulate", "2"], False, id="accumulation"),
        pytest.param(2, "kind=exception,rank=0,step=8,phase=forward", None, ["--stop"], True, id="early stopping"),
        pytest.param(2, "kind=sigstop,rank=1,step=8,phase=forward", 1, ["--stop"], False, id="hang, early stopping"),
    ],
)
def test_shapes_and_moments(
    ranks: int, faults: str, replaced: int | None, more: list[str], board: bool, tmp_path: Path, undisturbed: Any
) -> None:
    directory = tmp_path / "d"
    variables = {"LASTGASP_HANG_TIMEOUT": "8"} if "sigstop" in faults else {}
    if board and importlib.util.find_spec("tensorboard"):
        more = [*more, "--board"]
    with disturbed(tmp_path, job(run, ranks, directory, *more), faults, **variables) as started:
        pass
    check_in_place(directory, started, ranks, replaced)
    check_same(directory, undisturbed(ranks, *more))
    assert checkpoints(directory) == checkpoints(undisturbed(ranks, *more)) != []


MOMENTS = ("data", "forward", "backward", "update", "after_update", "validation")
AFTER = {"update": (8, 9), "after_update": (9,)}
"""Steps that may be gone on with, where it is not the one before the fault: a rank that has not begun its update when
the other one fails in its own is held before it. So it is if the other one is killed behind its update at once."""


@pytest.mark.product
@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["sigkill", "exception", "sigstop"])
def test_each_fault_at_each_moment(kind: str, moment: str, rank: int, tmp_path: Path, undisturbed: Any) -> None:
    directory, faults = tmp_path / "d", f"kind={kind},rank={rank},step=8,phase={moment}"
    variables = {"LASTGASP_HANG_TIMEOUT": "8"} if kind == "sigstop" else {}
    with disturbed(tmp_path, job(run, 2, directory), faults, **variables) as started:
        pass
    raised = kind == "exception"
    noted = "step 9 was cut short" if raised and moment == "after_update" else ""
    steps = (8, 9) if (kind, moment) == ("sigkill", "after_update") else AFTER.get(moment, (8,))
    check_in_place(directory, started, 2, None if raised else rank, steps, noted)
    check_same(directory, undisturbed(2))
    assert checkpoints(directory) == checkpoints(undisturbed(2)) != []


@pytest.mark.product
@pytest.mark.full
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["exit3", "sigterm"])
def test_what_no_step_done_again_would_cure_restarts(kind: str, moment: str, tmp_path: Path, undisturbed: Any) -> None:
    directory, faults = tmp_path / "d", f"kind={kind},rank=1,step=8,phase={moment}"
    with disturbed(tmp_path, job(run, 2, directory), faults) as started:
        pass
    [incident] = incidents(directory)
    assert (incident.rung, incident.steps_lost) == ("", 0), started.output[-6000:]
    assert "a fault of that kind is not answered in place" in incident.not_in_place, incident
    assert differences(directory / "final.pt", undisturbed(2) / "final.pt") == []


@pytest.mark.full
def test_several_faults_in_one_job(tmp_path: Path, undisturbed: Any) -> None:
    """Each fault comes to the processes that the one before has left; rank 1 survives all, and holds no more for it."""
    directory = tmp_path / "d"
    kinds = ("sigkill,rank=0", "exception,rank=0", "sigkill,rank=2", "sigkill,rank=0")
    faults = ";".join(f"kind={k},step={6 + 2 * n},phase=backward,incarnation={n}" for n, k in enumerate(kinds))
    with disturbed(tmp_path, job(run, 3, directory), faults) as started:
        pass
    found = incidents(directory)
    assert [one.rung for one in found] == ["replace", "retry", "replace", "replace"], started.output[-6000:]
    assert [one.steps_lost for one in found] == [0] * 4
    for rank in range(3):
        assert [begun for _, begun in lines(directory, rank, "entered")] == ["0", "6", "8", "10", "12"]
        assert len(lines(directory, rank, "left")) == 1
    assert len({pid for pid, _ in lines(directory, 1, "entered")}) == 1
    assert lines(directory, 1, "more") == [["False"]] * 4, "descriptors or threads"
    check_same(directory, undisturbed(3))


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_jobs_as_users_write_them(shape: str, tmp_path: Path, undisturbed: Any) -> None:
    """One rank is killed, later the other one; loggers, averages, metrics and workers go on."""
    directory, more = tmp_path / "d", ["--shape", shape]
    if importlib.util.find_spec("tensorboard"):
        more = [*more, "--board"]
    faults = "kind=sigkill,rank=1,step=6,phase=forward;kind=sigkill,rank=0,step=10,phase=forward,incarnation=1"
    if shape == "compile":
        faults = ""
    with disturbed(tmp_path, job(run, 2, directory, *more), faults, TEST_KILLS="1") as started:
        pass
    where = started.output[-6000:]
    found = [(one.ending, one.rung, one.steps_lost) for one in incidents(directory)]
    assert found == [("in_place", "replace", 0)] * 2, where
    notes = [[note for note in one.notes if "DataLoader workers draw" not in note] for one in incidents(directory)]
    assert notes == [[], []], where
    for rank in range(2):
        entered = lines(directory, rank, "entered")
        assert [begun for _, begun in entered] == ["0", "6", "10"], where
        pids = [pid for pid, _ in entered]
        assert (pids[0] == pids[1], pids[1] == pids[2]) == (rank == 0, rank == 1), where
        assert lines(directory, rank, "kept") == lines(undisturbed(2, *more), rank, "kept") != [], where
    assert checkpoints(directory) == checkpoints(undisturbed(2, *more))
    assert bool(checkpoints(directory)) != (shape == "bare")
    check_same(directory, undisturbed(2, *more))


def test_ranks_that_wait_between_two_updates_of_a_batch_lose_no_step(tmp_path: Path, undisturbed: Any) -> None:
    """Rank 1 is killed in the second backward pass, behind the first optimizer's update; then all of it again."""
    directory, more = tmp_path / "d", ["--shape", "manual"]
    faults = "kind=sigkill,rank=1,step=6,phase=backward;kind=exception,rank=0,step=10,phase=backward,incarnation=1"
    with disturbed(tmp_path, job(run, 2, directory, *more), faults) as started:
        pass
    found = [(one.ending, one.step_saved, one.steps_lost) for one in incidents(directory)]
    assert found == [("in_place", 6, 0), ("in_place", 10, 0)], started.output[-6000:]
    check_same(directory, undisturbed(2, *more))


@pytest.mark.full
def test_parameters_that_are_others_than_at_the_start_cost_a_restart(tmp_path: Path) -> None:
    """ModelPruning has changed them at the end of the first epoch; what a restart does not restore is noted."""
    directory, more = tmp_path / "d", ["--shape", "prune"]
    with disturbed(tmp_path, job(run, 2, directory, *more), "kind=sigkill,rank=1,step=10,phase=forward") as started:
        pass
    [incident] = incidents(directory)
    assert (incident.ending, incident.steps_lost) == ("saved", 0), started.output[-6000:]
    assert "the module has other parameters than when training began" in incident.not_in_place, incident
    assert [note for note in incident.notes if "ModelPruning" in note], incident


@pytest.mark.full
@pytest.mark.parametrize(("more", "noted"), [("--validate", ""), ("--twice", "the last step of fit 0 of this script")])
def test_a_step_of_a_later_fit_is_done_again(more: str, noted: str, tmp_path: Path, undisturbed: Any) -> None:
    """The process group was there when it began; an entry makes it again."""
    directory = tmp_path / "d"
    faults = "kind=exception,rank=1,step=8,phase=backward"
    with disturbed(tmp_path, job(run, 2, directory, more), faults, LASTGASP_WARM="off") as started:
        pass
    check_in_place(directory, started, 2, replaced=None, noted=noted)
    check_same(directory, undisturbed(2, more))


@pytest.mark.full
def test_a_rank_that_ends_its_training_meanwhile_enters_it_again(tmp_path: Path, undisturbed: Any) -> None:
    """All ranks are needed, also by the one that has raised behind its last step."""
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(run, 2, directory, "--ends"), "") as started:
        pass
    check_in_place(directory, started, 2, replaced=None, steps=(int(STEPS),))
    check_same(directory, undisturbed(2))


KILL = "kind=sigkill,rank=1,step=8,phase=backward"
KILL_0 = "kind=sigkill,rank=0,step=8,phase=forward,incarnation=1"
SECOND = "no step was completed since training began, when the fault before was answered in place"


@pytest.mark.full
def test_a_second_kill_before_there_is_a_new_step_is_answered_in_place_as_well(
    tmp_path: Path, undisturbed: Any
) -> None:
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(run, 2, directory), f"{KILL};{KILL_0}") as started:
        pass
    found, where = incidents(directory), started.output[-6000:]
    assert [(one.ending, one.rung, one.steps_lost) for one in found] == [("in_place", "replace", 0)] * 2, (found, where)
    for rank in range(2):
        entered = lines(directory, rank, "entered")
        assert {begun for _, begun in entered} == {"0", "8"}, (entered, where)
        assert len({pid for pid, _ in entered}) == 2, entered
        assert [pid for pid, _ in lines(directory, rank, "left")] == [entered[-1][0]], where
    check_same(directory, undisturbed(2))


@pytest.mark.full
def test_a_new_process_that_dies_before_it_has_met_the_controller_is_replaced_as_well(
    tmp_path: Path, undisturbed: Any
) -> None:
    """The survivor is in the hooks of its fit, with what it holds."""
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(run, 2, directory, "--dies", "1"), KILL) as started:
        pass
    found, where = incidents(directory), started.output[-6000:]
    assert [(one.ending, one.rung, one.steps_lost) for one in found] == [("in_place", "replace", 0)] * 2, (found, where)
    assert len({pid for pid, _ in lines(directory, 0, "entered")}) == 1, where
    assert [begun for _, begun in lines(directory, 1, "entered")] == ["0", "8"], where
    check_same(directory, undisturbed(2))


@pytest.mark.full
@pytest.mark.parametrize(
    ("faults", "more"),
    [
        pytest.param(KILL, ["--dies", "0"], id="the only one that is there, at once"),
        pytest.param(f"{KILL};kind=exception,rank=1,step=8,phase=forward,incarnation=1", [], id="an exception"),
    ],
)
def test_another_second_fault_is_answered_by_a_restart(
    faults: str, more: list[str], tmp_path: Path, undisturbed: Any
) -> None:
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(run, 2, directory, *more), faults) as started:
        pass
    first, last = incidents(directory)
    assert (first.rung, last.rung, last.steps_lost) == ("replace", "", 0), started.output[-6000:]
    assert last.not_in_place.startswith(SECOND)
    assert [found.step for found in candidates([directory], LAYOUT)] == [8]
    check_same(directory, undisturbed(2))


EARLIER = ("step left", "released", "state kept")
LATER = ("handover", "state taken", "first step")


@pytest.mark.product
@pytest.mark.full
@pytest.mark.parametrize("how", ["", again_faults.HUNG], ids=["killed", "hung"])
@pytest.mark.parametrize(
    ("point", "who"), [*itertools.product(EARLIER, "02"), *itertools.product(LATER, "012"), ("joining", "0")]
)
def test_a_death_at_each_point_of_a_recovery_loses_no_step(
    point: str, who: str, how: str, tmp_path: Path, undisturbed: Any
) -> None:
    """Rank 1 of three has a new process; a survivor dies or hangs, or that one does."""
    directory, second = tmp_path / "d", {again_faults.VARIABLE: f"{point},{who},self{how}"}
    second |= again_faults.LIMITS | {"LASTGASP_HANG_TIMEOUT": "20"} if how else {}
    with disturbed(tmp_path, job(run, 3, directory), KILL, **second) as started:
        pass
    where = started.output[-6000:]
    assert (directory / "second").exists(), where
    found = incidents(directory)
    assert not any(one.steps_lost for one in found), (found, where)
    begun = [[step for _, step in lines(directory, rank, "entered")] for rank in range(3)]
    assert all(steps[0] == "0" and steps[-1] == "8" for steps in begun), (begun, where)
    check_same(directory, undisturbed(3))


@pytest.mark.full
def test_a_new_process_that_waits_where_no_other_comes_costs_a_restart(tmp_path: Path, undisturbed: Any) -> None:
    """A callback meets the others in the first fit of a process alone."""
    directory, more = tmp_path / "d", ["--shape", "once"]
    with disturbed(tmp_path, job(run, 2, directory, *more), KILL, LASTGASP_HANG_TIMEOUT="20") as started:
        pass
    first, last = incidents(directory)
    assert (first.rung, last.rung, first.steps_lost, last.steps_lost) == ("replace", "", 0, 0), started.output[-6000:]
    check_same(directory, undisturbed(2, *more))


@pytest.mark.full
def test_survivors_that_do_not_leave_their_training_save_and_end(tmp_path: Path, undisturbed: Any) -> None:
    """Nobody waits for it until torch's timeout, which is half an hour; the step is in their memory alone."""
    directory, limits = tmp_path / "d", {"LASTGASP_FINISH_TIMEOUT": "1"}
    faults = "kind=sigkill,rank=0,step=8,phase=data"
    with disturbed(tmp_path, job(run, 3, directory, "--stuck"), faults, **limits) as started:
        pass
    where = started.output[-6000:]
    assert "rank 1 does not leave its training: it ends, and the job restarts" in started.output, where
    assert [one.steps_lost for one in incidents(directory)] == [0] * len(incidents(directory)), where
    assert [found.step for found in candidates([directory], LAYOUT)] == [8], where
    assert [begun for _, begun in lines(directory, 0, "entered")] == ["0", "8"], where
    check_same(directory, undisturbed(3))


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "fault", "hit", "rung"), [(2, "exception", 0, "retry"), (3, "sigkill", 2, "replace")]
)
def test_a_survivor_that_does_not_leave_its_training_is_replaced(
    ranks: int, fault: str, hit: int, rung: str, tmp_path: Path, undisturbed: Any
) -> None:
    """Rank 0 is the only one left that holds the step, and keeps its process."""
    directory, limits = tmp_path / "d", {"LASTGASP_FINISH_TIMEOUT": "1"}
    faults = f"kind={fault},rank={hit},step=8,phase=data"
    with disturbed(tmp_path, job(run, ranks, directory, "--stuck"), faults, **limits) as started:
        pass
    found, where = incidents(directory), started.output[-6000:]
    assert [(one.ending, one.rung, one.steps_lost) for one in found] == [
        ("in_place", rung, 0), ("in_place", "replace", 0)
    ], where  # fmt: skip
    assert [(one.kind, one.rank) for one in found[1].faults] == [("hang", 1)], where
    assert not any(one.notes for one in found), found
    for rank in range(ranks):
        entered = lines(directory, rank, "entered")
        assert [begun for _, begun in entered] == ["0", "8"], (entered, where)
        assert (len({pid for pid, _ in entered}) == 1) == (rank == 0), entered
        assert [pid for pid, _ in lines(directory, rank, "left")] == [entered[-1][0]], where
    check_same(directory, undisturbed(ranks))


@pytest.mark.full
@pytest.mark.parametrize(
    ("loader", "rungs", "why"),
    [
        ("generator", [""], "its training data come from a generator, which cannot begin again"),
        ("counting", ["replace", ""], "a fault of that kind is not answered in place (exception on rank 0)"),
    ],
)
def test_a_loader_that_does_not_begin_again_as_it_did_costs_a_restart(
    loader: str, rungs: list[str], why: str, tmp_path: Path, undisturbed: Any
) -> None:
    """A survivor would get other batches than were due; the new processes of a restart do not."""
    directory, more = tmp_path / "d", ["--loader", loader]
    with disturbed(tmp_path, job(run, 2, directory, *more), KILL) as started:
        pass
    found = incidents(directory)
    assert [(one.rung, one.steps_lost) for one in found] == [(rung, 0) for rung in rungs], started.output[-6000:]
    assert why in found[-1].not_in_place
    if loader == "counting":
        assert "the loader does not give what it gave before" in found[-1].faults[0].cause
    check_same(directory, undisturbed(2, *more))


@pytest.mark.full
def test_sigterm_before_the_ranks_have_joined_again_has_the_step_saved(tmp_path: Path, undisturbed: Any) -> None:
    """It comes to both, when no session takes it and no step is on disk."""
    directory = tmp_path / "d"
    faults = "kind=exception,rank=1,step=8,phase=forward"
    with disturbed(tmp_path, job(run, 2, directory, "--stopped"), faults) as started:
        pass
    first, last = incidents(directory)
    assert (first.ending, first.rung) == ("in_place", "retry"), started.output[-6000:]
    assert {fault.kind for fault in last.faults} == {"sigterm"}, last
    assert [found.step for found in candidates([directory], LAYOUT)] == [8]
    check_same(directory, undisturbed(2))


@pytest.mark.full
@pytest.mark.parametrize(
    ("recovery", "more", "why"),
    [
        ("retry", [], "recovery=retry: no rank is replaced"),
        ("restart", [], ""),
        ("auto", ["--validate"], "it is not the first training of its script: no rank is replaced"),
        ("auto", ["--twice"], "it is not the first training of its script: no rank is replaced"),
        ("auto", ["--configured"], ""),
        ("auto", ["--full"], "copies of the state would take"),
    ],
)
def test_a_fit_that_may_not_or_cannot_restarts_as_ever(
    recovery: str, more: list[str], why: str, tmp_path: Path, undisturbed: Any
) -> None:
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(run, 2, directory, *more), KILL, LASTGASP_RECOVERY=recovery) as started:
        pass
    [incident] = incidents(directory)
    # Where a version of the logs is known when `fit` begins, ModelCheckpoint's own file of step 8 counts as saved.
    ending = ("nothing_to_save", None) if "--validate" in more else ("saved", 8)
    assert (incident.ending, incident.step_saved, incident.rung) == (*ending, ""), started.output[-6000:]
    assert incident.steps_lost == 0 and why in incident.not_in_place and bool(why) == bool(incident.not_in_place)
    line = "this fit cannot be entered again: LastGasp was added to its trainer when the fit had begun"
    assert (line in started.output) == ("--configured" in more)
    expected = undisturbed(2, *(one for one in more if one in ("--twice", "--validate")))
    assert differences(directory / "final.pt", expected / "final.pt") == []
    if "--validate" not in more:  # a restart validates again, and logs it
        check_same(directory, expected)


@pytest.mark.full
def test_save_ends_the_job_and_the_next_start_resumes(tmp_path: Path, undisturbed: Any) -> None:
    directory, log = tmp_path / "d", tmp_path / "faults.log"
    directory.mkdir()
    (directory / "go").touch()
    variables = {"LASTGASP_WARM": "off", "LASTGASP_RECOVERY": "save", "LASTGASP_FAULT_LOG": str(log)}
    first = finish(job(run, 2, directory), tmp_path, LASTGASP_FAULT=KILL, **variables)
    assert first.returncode == SAVED, first.output
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.not_in_place) == ("saved", 8, "recovery=save")
    assert finish(job(run, 2, directory), tmp_path, **variables).ok
    assert [begun for _, begun in lines(directory, 0, "entered")] == ["0", "8"]
    check_same(directory, undisturbed(2))


@pytest.fixture(scope="module")
def undisturbed_values(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same of the job whose module and callbacks keep plain values."""
    return undisturbed_jobs(tmp_path_factory, lambda folder, ranks: torchrun(VALUES, folder, ranks=ranks), "")


def values(directory: Path, rank: int, what: str = "values") -> Any:
    """What a rank has noted at its end."""
    [line] = lines(directory, rank, what)
    return json.loads(" ".join(line))


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "replaced"),
    [
        pytest.param("kind=sigkill,rank=1,step=8,phase=backward", 1, id="killed"),
        pytest.param("kind=sigkill,rank=0,step=36,phase=forward", 0, id="killed, long list"),
        pytest.param("kind=sigkill,rank=1,step=40,phase=backward", 1, id="killed behind the end of the epoch"),
        pytest.param("kind=exception,rank=0,step=8,phase=backward", None, id="raises"),
    ],
)
def test_each_step_counts_once_in_what_users_keep(
    fault: str, replaced: int | None, tmp_path: Path, undisturbed_values: Any
) -> None:
    directory, step = tmp_path / "d", fault.split("step=")[1].partition(",")[0]
    with disturbed(tmp_path, run(VALUES, directory, ranks=2), fault) as started:
        pass
    [incident] = incidents(directory)
    where = started.output[-6000:]
    rung = "retry" if replaced is None else "replace"
    assert (incident.ending, incident.rung, incident.steps_lost) == ("in_place", rung, 0), where
    told = [note for note in incident.notes if "has another rank's values: Net.training_step_outputs" in note]
    assert len(told) == len(incident.notes) == (replaced is not None), incident.notes
    expected = undisturbed_values(2)
    assert differences(directory / "final.pt", expected / "final.pt") == []
    for rank in range(2):
        entered = lines(directory, rank, "entered")
        assert [begun for _, begun in entered] == ["0", step]
        assert (len({pid for pid, _ in entered}) == 1) == (rank != replaced)
        assert values(directory, rank) == values(expected, rank), where
        if rank != replaced:
            assert values(directory, rank, "own") == values(expected, rank, "own"), where
