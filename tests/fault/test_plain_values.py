"""What a Lightning module and callbacks keep in plain Python goes on after a restart from a gasp within an epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lastgasp import exitcodes
from support.launchers import SUPPORT, finish, incidents, run, undisturbed_jobs

pytestmark = pytest.mark.fault
SCRIPT, VALUES = SUPPORT / "train_outs_lightning.py", SUPPORT / "train_values_lightning.py"
RESTART = {"LASTGASP_RECOVERY": "restart"}


def command(folder: Path, ranks: int = 2) -> list[str]:
    return run(SCRIPT, folder, ranks=ranks)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return undisturbed_jobs(tmp_path_factory, command)


def same(folder: Path, expected: Path, ranks: int = 2) -> None:
    """The very values of the undisturbed job on each rank, and its weights."""
    for rank in range(ranks):
        found, wanted = (json.loads((one / f"kept-{rank}.json").read_text()) for one in (folder, expected.parent))
        assert found == wanted, rank
    weights = torch.load(folder / "final.pt"), torch.load(expected)
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


@pytest.mark.parametrize("phase", ["backward", pytest.param("validation", marks=pytest.mark.full)])
def test_a_list_filled_in_training_step_goes_on_after_an_exception(
    phase: str, undisturbed: Any, tmp_path: Path
) -> None:
    """In the validation, which comes before the end of the epoch, a list that begins anew stays empty."""
    folder, fault = tmp_path / "d", f"kind=exception,rank=1,step=8,phase={phase}"
    done = finish(command(folder), tmp_path, LASTGASP_FAULT=fault, **RESTART)
    assert done.returncode == 0, done.output[-4000:]
    [incident] = incidents(folder)
    assert (incident.ending, incident.steps_lost) == ("saved", 0), incident
    assert not [note for note in incident.notes if "beside their state" in note], incident.notes
    same(folder, undisturbed())


@pytest.mark.full
def test_the_same_after_sigterm_and_a_new_job(undisturbed: Any, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    fault = "kind=sigterm,rank=all,step=8,phase=forward"
    done = finish(command(folder), tmp_path, LASTGASP_FAULT=fault, LASTGASP_RECOVERY="save")
    assert done.returncode == exitcodes.SAVED, done.output[-4000:]
    done = finish(command(folder), tmp_path, **RESTART)
    assert done.returncode == 0, done.output[-4000:]
    same(folder, undisturbed())


@pytest.mark.full
@pytest.mark.parametrize("step", [8, 36], ids=["", "long list"])
def test_all_that_users_keep_goes_on(step: int, tmp_path: Path) -> None:
    """Random generators, objects of their classes, averages of weights; what is computed with them is the same."""
    wanted, folder, fault = tmp_path / "w", tmp_path / "d", f"kind=exception,rank=0,step={step},phase=backward"
    for one, variables in ((wanted, {}), (folder, {"LASTGASP_FAULT": fault, **RESTART})):
        one.mkdir()
        (one / "go").touch()
        done = finish(run(VALUES, one), tmp_path, **variables)
        assert done.returncode == 0, done.output[-4000:]
    assert [(one.ending, one.steps_lost, one.notes) for one in incidents(folder)] == [("saved", 0, [])]
    assert kept_lines(folder) == kept_lines(wanted)
    weights = torch.load(folder / "final.pt"), torch.load(wanted / "final.pt")
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())


def kept_lines(folder: Path) -> list[list[str]]:
    """What each rank has noted at its end."""
    found = [path.read_text().splitlines() for path in sorted(folder.glob("rank-*"))]
    return [[line for line in lines if line.startswith(("values ", "own "))] for lines in found]


@pytest.mark.full
def test_values_of_a_killed_rank_are_lost_and_then_those_of_all_ranks(tmp_path: Path) -> None:
    """Lists of different lengths would let ranks wait for each other, or raise where they meet."""
    folder = tmp_path / "d"
    done = finish(command(folder), tmp_path, LASTGASP_FAULT="kind=sigkill,rank=1,step=8,phase=backward", **RESTART)
    assert done.returncode == 0, done.output[-4000:]
    [incident] = incidents(folder)
    assert (incident.ending, incident.steps_lost) == ("saved", 0), incident
    assert [note for note in incident.notes if "beside their state: Net.outs, " in note], incident.notes
    assert "Net.outs: rank 1 left none" in done.output
    kept = [json.loads((folder / f"kept-{rank}.json").read_text()) for rank in range(2)]
    assert [len(one["seen"]) for one in kept] == [16, 16], kept


@pytest.mark.full
def test_what_the_script_begins_with_since_then_counts(tmp_path: Path) -> None:
    """Here that of one number; what has not changed in the script goes on."""
    folder, fault = tmp_path / "d", "kind=sigterm,rank=0,step=8,phase=forward"
    done = finish(command(folder, 1), tmp_path, LASTGASP_FAULT=fault, LASTGASP_RECOVERY="save")
    assert done.returncode == exitcodes.SAVED, done.output[-4000:]
    done = finish(command(folder, 1), tmp_path, TEST_SCALE="100", **RESTART)
    assert done.returncode == 0, done.output[-4000:]
    assert "Net.scale: the script begins with another value" in done.output
    step = incidents(folder)[0].step_saved
    assert step is not None and step >= 8
    kept = json.loads((folder / "kept-0.json").read_text())
    assert (kept["scale"], sum(kept["kinds"].values()), len(kept["seen"])) == (100 + 24 - step, 24, 24), kept
