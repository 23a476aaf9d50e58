"""Recovery in place of jobs of Hugging Face's Trainer: `train` is entered again, no healthy process ends."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

from lastgasp import exitcodes
from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from lastgasp.testing.weights import differences
from support import again_faults, older_place
from support.disturbed import disturbed, lines
from support.launchers import SUPPORT, Running, finish, incidents, run, undisturbed_jobs
from support.matrix import SAVE_STEP, STEP
from support.transformers_matrix import EVALUATED, MOMENTS, TransformersCase

KILL = "kind=sigkill,rank=0,step=5,phase=backward"
WORKER = SUPPORT / "train_again_transformers.py"
LAYOUT = DirectoryLayout("checkpoint-[0-9]*")

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


def job(ranks: int, directory: Path, *more: str) -> list[str]:
    """Its command line."""
    return [sys.executable, *run(WORKER, "--dir", directory, *more, ranks=ranks)[1:]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Result of a job without a fault, by its number of ranks and arguments."""
    return undisturbed_jobs(tmp_path_factory, lambda folder, ranks, *more: job(ranks, folder, *more))


STUCK = {"LASTGASP_FINISH_TIMEOUT": "1", "LASTGASP_WARM": "auto"}
CUT_SHORT = "step 6 was cut short after its update by InjectedFault: "


def check(
    directory: Path, job: Running, expected: Path, ranks: int, *faults: tuple[int | None, int], noted: str = ""
) -> None:
    """Each fault, given by the rank that was replaced and the step that was gone on from, was answered in place."""
    where = job.output[-6000:]
    found = [(one.ending, one.rung, one.steps_lost) for one in incidents(directory)]
    assert found == [("in_place", "retry" if lost is None else "replace", 0) for lost, _ in faults], where
    notes = [note for one in incidents(directory) for note in one.notes]
    assert len(notes) == bool(noted) and all(note.startswith(noted) for note in notes), (notes, where)
    for rank in range(ranks):
        entered, left = lines(directory, rank, "entered"), lines(directory, rank, "left")
        assert [int(begun) for _, begun in entered] == [0, *(step for _, step in faults)], where
        processes = 1 + sum(lost == rank for lost, _ in faults)
        assert (len({pid for pid, _ in entered}), len(left)) == (processes, 1), where
    assert differences(directory / "final.pt", expected) == [], where
    assert all(verify(one.path, LAYOUT).ok for one in candidates([directory], LAYOUT)), where


def test_a_killed_rank_0_is_replaced(tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(2, directory), KILL) as started:
        pass
    check(directory, started, undisturbed(2), 2, (0, 5))


def test_processes_that_make_up_their_own_directories_use_one(tmp_path: Path, undisturbed: Any) -> None:
    """As in examples with the time in `output_dir`: a second may pass between two ranks, and does before a new one."""
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(2, directory, "--apart"), KILL) as started:
        pass
    (used,) = [one for one in directory.glob("run-*") if any(one.iterdir())]
    assert used.name == f"run-{lines(directory, 0, 'entered')[0][0]}", started.output[-6000:]
    assert "all use the latter" in started.output
    assert [(one.rung, one.steps_lost) for one in incidents(used)] == [("replace", 0)], started.output[-6000:]
    assert differences(directory / "final.pt", undisturbed(2)) == []


def test_rows_that_rank_0_alone_has_logged_are_named(tmp_path: Path) -> None:
    """Where it raises, another rank saves the step; where it saves, nothing is lost."""
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(2, directory, "--alone"), "kind=exception,rank=0,step=5,phase=forward") as started:
        pass
    (one,) = incidents(directory)
    (note,) = [note for note in one.notes if note.startswith("rank 0 alone has logged 2 of its rows")]
    assert "rank 1 saves the step" in note, started.output[-6000:]


@pytest.mark.skipif(bool(older_place.missing("transformers")), reason=older_place.missing("transformers"))
def test_an_older_release_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    """In place, and by a restart; Trainer itself could not resume there on CPUs."""
    script = tmp_path / "train.py"
    script.write_text(
        f"import runpy\nrunpy.run_path({str(WORKER)!r}, run_name='__main__')\n"
        f"import transformers\nassert transformers.__version__ == {older_place.version('transformers')!r}\n"
    )
    variables = {
        "PYTHONPATH": os.pathsep.join([str(older_place.folder("transformers")), str(SUPPORT.parent)]),
        "HF_HUB_OFFLINE": "1",  # the script sets it, too; there it is read at the import, so a fork would lack it
    }

    def command(folder: Path) -> list[str]:
        folder.mkdir(exist_ok=True)
        return [sys.executable, *run(script, "--dir", folder / "d", ranks=2)[1:]]

    for name, faults in (("undisturbed", ""), ("auto", KILL), ("restart", KILL)):
        folder = tmp_path / name
        recovery = {"LASTGASP_RECOVERY": name} if faults else {}
        with disturbed(folder, command(folder), faults, **variables, **recovery) as started:
            pass
        if name == "auto":
            check(folder / "d", started, tmp_path / "undisturbed/d/final.pt", 2, (0, 5))
    [incident] = incidents(folder / "d")
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 5, 0)
    assert differences(folder / "d/final.pt", tmp_path / "undisturbed/d/final.pt") == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "shape", "faults", "expected"),
    [
        pytest.param(2, "plain", "kind=exception,rank=1,step=5,phase=forward", [(None, 5)], id="exception"),
        pytest.param(2, "accumulating", "kind=sigkill,rank=1,step=7,phase=backward", [(1, 7)], id="accumulating"),
        pytest.param(2, "noisy", "kind=sigkill,rank=1,step=5,phase=forward", [(1, 5)], id="noisy embeddings"),
        pytest.param(2, "bf16", "kind=sigkill,rank=1,step=5,phase=forward", [(1, 5)], id="bf16"),
        pytest.param(2, "epochs", "kind=sigkill,rank=1,step=8,phase=validation", [(1, 12)], id="validation"),
        pytest.param(2, "unseeded", "kind=sigstop,rank=1,step=8,phase=forward", [(1, 8)], id="hang"),
        pytest.param(
            3, "plain", "kind=sigkill,rank=2,step=5,phase=data;kind=exception,rank=0,step=7,phase=backward,"
            "incarnation=1;kind=sigkill,rank=0,step=9,phase=backward,incarnation=2", [(2, 5), (None, 7), (0, 9)],
            id="three faults of three ranks",
        ),
        pytest.param(
            2, "plain", "kind=sigkill,rank=1,step=5,phase=backward;"
            "kind=sigkill,rank=0,step=5,phase=backward,incarnation=1", [(1, 5), (0, 5)],
            id="a second kill before a new step",
        ),
    ],
)  # fmt: skip
def test_shapes_and_moments(
    ranks: int, shape: str, faults: str, expected: list[Any], tmp_path: Path, undisturbed: Any
) -> None:
    directory, more = tmp_path / "d", ("--shape", shape)
    variables = {"LASTGASP_HANG_TIMEOUT": "20"} if "sigstop" in faults else {}
    with disturbed(tmp_path, job(ranks, directory, *more), faults, **variables) as started:
        pass
    check(directory, started, undisturbed(ranks, *more), ranks, *expected)


def matrix() -> list[TransformersCase]:
    """Every kind at every moment, on either rank by turns."""
    product = itertools.product(("sigkill", "exception", "sigstop"), MOMENTS)
    turns = zip(product, itertools.cycle(("first", "last")), strict=False)
    return [TransformersCase(*one, rank, "run") for one, rank in turns if "gasp_save" not in one]


@pytest.mark.product
@pytest.mark.full
@pytest.mark.parametrize("case", matrix(), ids=str)
def test_each_fault_at_each_moment(case: TransformersCase, tmp_path: Path, undisturbed: Any) -> None:
    directory, raised = tmp_path / "d", case.kind == "exception"
    variables = {"LASTGASP_HANG_TIMEOUT": "20"} if case.kind == "sigstop" else {}
    with disturbed(tmp_path, job(2, directory), case.faults, **variables) as started:
        pass
    begun = {int(lines(directory, rank, "entered")[-1][1]) for rank in range(2)}
    step = {"validation": EVALUATED, "periodic_save": SAVE_STEP}.get(case.moment, STEP)
    assert begun in ({step}, {step + 1}), started.output[-6000:]
    [goes_on] = begun
    noted = CUT_SHORT if raised and case.moment in ("after_update", "step_end") else ""
    check(directory, started, undisturbed(2), 2, (None if raised else case.victim, goes_on), noted=noted)


@pytest.mark.product
@pytest.mark.full
@pytest.mark.parametrize(
    ("point", "who"),
    [*itertools.product(("step left", "let go"), "02"), *itertools.product(("meets", "entered"), "012")],
)
def test_a_death_at_each_point_of_a_recovery_loses_no_step(
    point: str, who: str, tmp_path: Path, undisturbed: Any
) -> None:
    """Rank 1 of three has a new process; a survivor dies, or that one. The step is on disk."""
    directory, second = tmp_path / "d", {again_faults.VARIABLE: f"{point},{who},self"}
    faults = "kind=sigkill,rank=1,step=5,phase=backward"
    with disturbed(tmp_path, job(3, directory), faults, **second) as started:
        pass
    where = started.output[-6000:]
    assert (directory / "second").exists(), where
    assert not any(one.steps_lost for one in incidents(directory)), (incidents(directory), where)
    begun = [[int(step) for _, step in lines(directory, rank, "entered")] for rank in range(3)]
    assert all((steps[0], steps[-1]) == (0, 5) for steps in begun), (begun, where)
    assert differences(directory / "final.pt", undisturbed(3)) == [], where


@pytest.mark.full
@pytest.mark.parametrize("victim", ["2", "self"])
def test_a_second_death_while_the_step_is_written_is_answered_in_place(
    victim: str, tmp_path: Path, undisturbed: Any
) -> None:
    """A few milliseconds behind the first one, of the rank that writes or of another one: both are replaced."""
    directory, second = tmp_path / "d", {again_faults.VARIABLE: f"gasp written,0,{victim}"}
    faults = "kind=sigkill,rank=1,step=5,phase=backward"
    with disturbed(tmp_path, job(3, directory), faults, **second) as started:
        pass
    found, where = incidents(directory), started.output[-6000:]
    assert (directory / "second").exists(), where
    assert [(one.ending, one.rung, one.step_saved, one.steps_lost) for one in found] == [("in_place", "replace", 5, 0)]
    entered = [lines(directory, rank, "entered") for rank in range(3)]
    assert [[int(step) for _, step in one] for one in entered] == [[0, 5]] * 3, where
    assert [len({pid for pid, _ in one}) for one in entered] == ([2, 2, 1] if victim == "self" else [1, 2, 2]), where
    assert differences(directory / "final.pt", undisturbed(3)) == [], where


@pytest.mark.full
@pytest.mark.parametrize(("point", "who"), [("let go", 0), ("entered", 0), ("entered", 1)])
def test_a_rank_that_is_stopped_on_its_way_is_not_waited_for(
    point: str, who: int, tmp_path: Path, undisturbed: Any
) -> None:
    """It gets a new process; once it has joined the job restarts. All others may load for as long as they like."""
    directory, second = tmp_path / "d", {again_faults.VARIABLE: f"{point},{who},self,stop"}
    faults = "kind=sigkill,rank=1,step=5,phase=backward"
    with disturbed(tmp_path, job(3, directory), faults, **second, LASTGASP_FINISH_TIMEOUT="2") as started:
        pass
    found, where = incidents(directory), started.output[-6000:]
    assert (directory / "second").exists(), where
    assert {fault.rank for one in found for fault in one.faults if fault.kind == "hang"} == {who}, (found, where)
    assert [one.ending for one in found] == ["in_place", "nothing_to_save"][: 1 + (point == "entered")], (found, where)
    assert not any(one.steps_lost for one in found), found
    begun = [[int(step) for _, step in lines(directory, rank, "entered")] for rank in range(3)]
    assert begun == [[0, 5]] * 3, (begun, where)
    if point == "let go":
        assert len({pid for pid, _ in lines(directory, 2, "entered")}) == 1, where
    assert differences(directory / "final.pt", undisturbed(3)) == [], where


@pytest.mark.full
@pytest.mark.parametrize(
    ("recovery", "more", "why"),
    [
        ("retry", [], "recovery=retry: no rank is replaced"),
        ("replace", [], "recovery=replace: no step is tried again"),
        ("restart", [], ""),
        ("auto", ["--twice"], "not every rank can be entered again"),
    ],
)
def test_what_is_not_answered_in_place_restarts(
    recovery: str, more: list[str], why: str, tmp_path: Path, undisturbed: Any
) -> None:
    directory = tmp_path / "d"
    kind = "exception" if recovery == "replace" else "sigkill"
    faults = f"kind={kind},rank=0,step=5,phase=backward"
    with disturbed(tmp_path, job(2, directory, *more), faults, LASTGASP_RECOVERY=recovery) as started:
        pass
    [incident] = incidents(directory)
    assert (incident.rung, incident.steps_lost) == ("", 0), started.output[-6000:]
    assert why == incident.not_in_place or (recovery == "auto" and not incident.not_in_place), incident
    line = "this training cannot be entered again: it is not the first training of its script"
    assert (line in started.output) == bool(more)
    assert differences(directory / "final.pt", undisturbed(2, *more)) == []


@pytest.mark.full
def test_save_ends_the_job_and_the_next_start_resumes(tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    (directory / "go").touch()
    variables = {"LASTGASP_WARM": "off", "LASTGASP_RECOVERY": "save"}
    faults = "kind=exception,rank=1,step=5,phase=backward"
    first = finish(job(2, directory), tmp_path, LASTGASP_FAULT=faults, **variables)
    assert first.returncode == exitcodes.SAVED, first.output[-6000:]
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.not_in_place) == ("saved", 5, "recovery=save")
    assert finish(job(2, directory), tmp_path, **variables).ok
    assert [int(step) for _, step in lines(directory, 0, "entered")] == [0, 5]
    assert differences(directory / "final.pt", undisturbed(2)) == []


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1])
def test_a_new_process_prepares_its_data_alone(lost: int, tmp_path: Path, undisturbed: Any) -> None:
    """In `main_process_first`, in which the others are no more."""
    directory = tmp_path / "d"
    faults = f"kind=sigkill,rank={lost},step=5,phase=backward"
    with disturbed(tmp_path, job(2, directory, "--first"), faults) as started:
        pass
    check(directory, started, undisturbed(2, "--first"), 2, (lost, 5))


@pytest.mark.full
def test_a_new_process_that_needs_others_before_train_costs_a_restart(tmp_path: Path, undisturbed: Any) -> None:
    """What they said there cannot be had any more; nobody waits for it."""
    directory = tmp_path / "d"
    faults = "kind=sigkill,rank=0,step=5,phase=backward"
    with disturbed(tmp_path, job(2, directory, "--name"), faults) as started:
        pass
    found = incidents(directory)
    assert found[0].rung == "replace" and not any(one.steps_lost for one in found), started.output[-6000:]
    assert "broadcast_object_list was called before the training" in started.output
    assert differences(directory / "final.pt", undisturbed(2, "--name")) == []


STAYS = "rank {} does not leave its training"


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "stuck"), [("sigkill,rank=0,step=5,phase=backward", 1), ("exception,rank=2,step=5,phase=backward", 0)]
)
def test_a_survivor_that_does_not_leave_its_training_is_replaced(
    fault: str, stuck: int, tmp_path: Path, undisturbed: Any
) -> None:
    """Nobody waits for it until torch's timeout, which is half an hour: the step is on disk."""
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(3, directory, "--stuck", str(stuck)), f"kind={fault}", **STUCK) as started:
        pass
    where = started.output[-6000:]
    [incident] = incidents(directory)
    assert (incident.ending, incident.rung, incident.steps_lost) == ("in_place", "replace", 0), (incident, where)
    assert incident.notes == [f"{STAYS.format(stuck)}: it gets a new process"], incident.notes
    lost = {stuck} if "exception" in fault else {0, stuck}
    assert {("hang", stuck)} == {(one.kind, one.rank) for one in incident.faults[1:]}, incident.faults
    for rank in range(3):
        entered, left = lines(directory, rank, "entered"), lines(directory, rank, "left")
        assert [int(step) for _, step in entered] == [0, 5], where
        assert (len({pid for pid, _ in entered}), len(left)) == (1 + (rank in lost), 1), where
    assert differences(directory / "final.pt", undisturbed(3)) == [], where


@pytest.mark.full
def test_where_it_cannot_be_replaced_the_job_restarts(tmp_path: Path, undisturbed: Any) -> None:
    directory, faults = tmp_path / "d", "kind=exception,rank=0,step=5,phase=backward"
    with disturbed(tmp_path, job(2, directory, "--stuck", "1"), faults, **(STUCK | {"LASTGASP_WARM": "off"})) as it:
        pass
    first, *_ = found = incidents(directory)
    assert first.rung == "retry" and not any(one.steps_lost for one in found), it.output[-6000:]
    gets_none = f"{STAYS.format(1)}, and gets no new process: there is no warm process"
    assert first.notes[0].startswith(gets_none), first.notes
    assert first.notes[1] == f"{STAYS.format(1)}: it ends, and the job restarts", first.notes
    assert differences(directory / "final.pt", undisturbed(2)) == []
