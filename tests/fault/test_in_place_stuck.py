"""A survivor stays in the user's own code, and never comes to a recovery in place: a new process takes its rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lastgasp.testing.weights import differences
from support.disturbed import disturbed, lines
from support.launchers import SUPPORT, Running, incidents, run, torchrun, undisturbed_jobs

LIMITS = {"LASTGASP_FINISH_TIMEOUT": "1", "LASTGASP_WARM": "auto"}

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final weights of a job without a fault, by its number of ranks."""
    return undisturbed_jobs(tmp_path_factory, lambda folder, ranks: job(torchrun, ranks, folder))


def job(launcher: Any, ranks: int, directory: Path, *more: str) -> list[str]:
    """Its command line."""
    worker = SUPPORT / "train_again.py"
    command: list[str] = launcher(worker, "--dir", directory, "--final", directory / "final.pt", *more, ranks=ranks)
    return command


@pytest.mark.parametrize(
    ("ranks", "fault", "hit", "stuck", "keep"),
    [
        (3, "sigkill", 1, 2, False),
        pytest.param(3, "exception", 0, 2, True, marks=pytest.mark.full),
        pytest.param(2, "exception", 1, 0, True, marks=pytest.mark.full),
        pytest.param(3, "sigkill", 2, 0, True, marks=pytest.mark.full),
    ],
)
def test_a_survivor_that_does_not_leave_its_training_is_replaced(
    ranks: int, fault: str, hit: int, stuck: int, keep: bool, tmp_path: Path, undisturbed: Any
) -> None:
    directory, more = tmp_path / "d", ["--stuck", str(stuck), *(["--keep"] if keep else [])]
    faults = f"kind={fault},rank={hit},step=8,phase=data"
    with disturbed(tmp_path, job(run, ranks, directory, *more), faults, **LIMITS) as started:
        pass
    killed = {hit} if fault == "sigkill" else set()
    check(directory, started, ranks, killed | {stuck}, "replace" if killed else "retry", stuck)
    assert differences(undisturbed(ranks), directory / "final.pt") == []


@pytest.mark.full
def test_where_it_cannot_be_replaced_the_step_is_saved_and_the_job_restarts(tmp_path: Path, undisturbed: Any) -> None:
    directory, limits = tmp_path / "d", LIMITS | {"LASTGASP_WARM": "off"}
    faults = "kind=exception,rank=0,step=8,phase=data"
    with disturbed(tmp_path, job(run, 2, directory, "--stuck", "1"), faults, **limits) as started:
        pass
    where = started.output[-8000:]
    first, last, own = incidents(directory)
    assert (first.rung, last.rung, first.steps_lost, last.steps_lost) == ("retry", "", 0, 0), where
    assert (last.ending, last.step_saved) == ("saved", 8), where
    assert (own.led_by, own.ending, own.steps_lost) == ("rank 1", "saved", 0), own  # it saves, too
    assert last.not_in_place.startswith("there is no warm process"), last.not_in_place
    assert "rank 1 does not leave its training: it ends, and the job restarts" in started.output, where
    assert differences(undisturbed(2), directory / "final.pt") == []


def check(directory: Path, started: Running, ranks: int, new: set[int], first: str, stuck: int) -> None:
    """Both recoveries were in place; those who were not lost kept their processes, and each went on from step 8."""
    where = started.output[-8000:]
    found = incidents(directory)
    endings = [(one.ending, one.rung, one.steps_lost) for one in found]
    assert endings == [("in_place", first, 0), ("in_place", "replace", 0)], where
    assert [(fault.kind, fault.rank) for fault in found[1].faults] == [("hang", stuck)], where
    assert all(one.phases.restarted is not None and one.phases.first_step is not None for one in found[1:]), found
    assert "a resume will not be bit-equal" not in started.output and found[1].notes == [], found[1].notes
    for rank in range(ranks):
        entered, ended = lines(directory, rank, "entered"), lines(directory, rank, "ended")
        assert [begun for _, begun, _ in entered] == ["0", "8"], (entered, where)
        assert (len({pid for pid, _, _ in entered}) == 1) == (rank not in new), entered
        assert ended == [[entered[-1][0], "12"]]
