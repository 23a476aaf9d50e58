"""Recovery in place: a function that is called again finds outside of itself what it found the first time."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.events import Incident
from lastgasp.testing.jobs import Finished
from lastgasp.testing.weights import differences
from support.launchers import SUPPORT, finish, incidents, run

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


def retried(what: str, folder: Path, ranks: int = 1) -> tuple[Finished, Path, list[Incident]]:
    """A job with a step that failed once, its directory and its incidents, of which the first was answered in place."""
    directory = folder / "d"
    directory.mkdir()
    command = run(SUPPORT / "train_kept.py", what, directory, ranks=ranks)
    done = finish(command, folder, LASTGASP_WARM="off")
    assert done.returncode == 0, done.output[-6000:]
    found = incidents(directory)
    assert [(i.ending, i.rung, i.steps_lost) for i in found[:1]] == [("in_place", "retry", 0)], done.output[-6000:]
    return done, directory, found


def test_random_numbers_of_the_function_are_those_of_its_first_call(tmp_path: Path) -> None:
    """It divides its data by them: with others a process that stays trains on what the others evaluate with."""
    _, directory, found = retried("splits", tmp_path)
    first, second = (directory / "splits").read_text().splitlines()
    assert first == second
    assert len(found) == 1
    assert differences(undisturbed("splits", tmp_path), directory / "final.pt") == []


def undisturbed(what: str, folder: Path) -> Path:
    """The weights of a job in which nothing fails."""
    directory = folder / "calm"
    directory.mkdir()
    (directory / "failed").touch()
    assert finish(run(SUPPORT / "train_kept.py", what, directory, ranks=1), folder, LASTGASP_WARM="off").ok
    return directory / "final.pt"


@pytest.mark.full
def test_hooks_that_the_function_registers_are_not_there_twice(tmp_path: Path) -> None:
    _, directory, found = retried("hooks", tmp_path)
    assert len(found) == 1 and found[0].notes == []
    assert differences(undisturbed("hooks", tmp_path), directory / "final.pt") == []


@pytest.mark.full
def test_layers_that_were_frozen_behind_ddp_are_averaged_when_the_loop_unfreezes_them(tmp_path: Path) -> None:
    """A model that is made outside would come to the second call frozen, and DDP would not know of those layers."""
    done, directory, found = retried("freezes", tmp_path, ranks=2)
    assert len(found) == 1, done.output[-6000:]
    assert differences(directory / "final-0.pt", directory / "final-1.pt") == []


@pytest.mark.full
def test_what_the_script_sets_is_known_from_the_first_call(tmp_path: Path) -> None:
    """An optimizer that is made outside has trained: what it holds at the second call is nothing that the script set.

    Two trainings save into one directory, where other settings would be those of another trial.
    """
    done, _, found = retried("folds", tmp_path)
    assert [i.ending for i in found] == ["in_place", "nothing_to_save"], done.output[-6000:]
    assert "not as the script sets it" not in done.output
    assert ".unfit" not in done.output
