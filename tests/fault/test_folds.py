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
