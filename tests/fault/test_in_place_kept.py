"""Recovery in place: a function that is called again finds outside of itself what it found the first time."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.events import Incident
from lastgasp.testing.jobs import Finished
from lastgasp.testing.weights import differences
from support.launchers import SUPPORT, finish, incidents, run

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


def retried(what: str, folder: Path, **variables: str) -> tuple[Finished, Path, list[Incident]]:
    """A job with a step that failed once, its directory and its incidents, of which the first was answered in place."""
    directory = folder / "d"
    directory.mkdir()
    command = run(SUPPORT / "train_kept.py", what, directory, ranks=1)
    done = finish(command, folder, LASTGASP_WARM="off", **variables)
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
    calm = tmp_path / "calm"
    calm.mkdir()
    (calm / "failed").touch()
    assert finish(run(SUPPORT / "train_kept.py", "splits", calm, ranks=1), tmp_path, LASTGASP_WARM="off").ok
    assert differences(calm / "final.pt", directory / "final.pt") == []


@pytest.mark.full
def test_what_the_script_sets_is_known_from_the_first_call(tmp_path: Path) -> None:
    """An optimizer that is made outside has trained: what it holds at the second call is nothing that the script set.

    Two trainings save into one directory, where other settings would be those of another trial.
    """
    done, _, found = retried("folds", tmp_path)
    assert [i.ending for i in found] == ["in_place", "nothing_to_save"], done.output[-6000:]
    assert "not as the script sets it" not in done.output
    assert ".unfit" not in done.output
