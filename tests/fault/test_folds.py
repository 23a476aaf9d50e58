"""Several trainings in one script (folds, sweeps): what happens in one of them is no fault of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.launchers import SUPPORT, finish, incidents, run

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


def ended(directory: Path) -> list[str]:
    """Fold, rank and step of each training that has ended."""
    return sorted(path.name.removeprefix("ended-") for path in directory.glob("ended-*"))


BOTH = [f"{fold}-{rank}-10" for fold in range(2) for rank in range(2)]


@pytest.mark.full
def test_a_rank_that_evaluates_between_two_trainings_is_waited_for(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    done = finish(run(SUPPORT / "train_folds.py", "evaluates", directory), tmp_path)
    assert done.returncode == 0, done.output[-6000:]
    assert ended(directory) == BOTH
    assert incidents(directory) == []


@pytest.mark.full
def test_a_fault_in_each_training(tmp_path: Path) -> None:
    """The second one begins at step 0 in processes that have entered the first one again at step 8."""
    directory = tmp_path / "d"
    directory.mkdir()
    done = finish(run(SUPPORT / "train_folds.py", "fails", directory), tmp_path)
    assert done.returncode == 0, done.output[-6000:]
    assert ended(directory) == BOTH
    first, second = incidents(directory)
    assert (first.ending, first.rung, first.step_saved, first.steps_lost) == ("in_place", "retry", 8, 0), done.output
    assert (second.ending, second.step_saved, second.steps_lost) == ("saved", 3, 0), done.output[-6000:]
    assert "killing" not in done.output


@pytest.mark.full
def test_a_script_that_handles_what_all_ranks_raise_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    done = finish(run(SUPPORT / "train_folds.py", "continues", directory), tmp_path)
    assert done.returncode == 0, done.output[-6000:]
    assert ended(directory) == ["1-0-10", "1-1-10"]
    [incident] = incidents(directory / "0")
    assert (incident.ending, incident.step_saved, incident.restart) == ("saved", 3, ""), done.output[-6000:]
    assert "raised Diverged" in done.output and "the script goes on" in done.output
    assert incidents(directory / "1") == []
