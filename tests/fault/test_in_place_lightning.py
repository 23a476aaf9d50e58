"""Recovery in place of Lightning jobs: `fit` goes on in the processes that are left, and logs each step once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support import logged
from support.launchers import SUPPORT, Running, finish, incidents, run, running, torchrun, until

WORKER = SUPPORT / "train_again_lightning.py"
READY = "a restart will fork its ranks from a warm process"
STEPS = "14"

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


def job(launcher: Any, ranks: int, directory: Path, *more: str) -> list[str]:
    """Its command line."""
    command: list[str] = launcher(WORKER, "--dir", directory, *more, ranks=ranks)
    return command


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directory of a job without a fault, by its number of ranks and arguments."""
    found: dict[tuple[Any, ...], Path] = {}

    def directory(ranks: int, *more: str) -> Path:
        if (ranks, *more) not in found:
            folder = tmp_path_factory.mktemp("undisturbed")
            (folder / "go").touch()
            assert finish(job(torchrun, ranks, folder, *more), folder, LASTGASP_WARM="off").ok
            found[(ranks, *more)] = folder
        return found[(ranks, *more)]

    return directory


@contextmanager
def disturbed(folder: Path, command: list[str], faults: str, warm: bool = True, **more: str) -> Iterator[Running]:
    """A job whose faults come once a warm process is ready; it ends well."""
    directory, log = folder / "d", folder / "faults.log"
    directory.mkdir(exist_ok=True)
    variables = {"LASTGASP_LOG": "debug", "LASTGASP_WARM": "auto" if warm else "off", "LASTGASP_FAULT_LOG": str(log)}
    variables |= {"LASTGASP_FAULT": faults, "LASTGASP_RECOVERY": "auto"} | more
    with running(folder, command, **variables) as [started]:
        if warm:
            until(lambda: READY in started.output, "the warm process is ready")
        (directory / "go").touch()
        yield started
        assert started.code() == 0, started.output[-6000:]
    assert len(read_log(log)) == len(faults.split(";")), started.output[-6000:]


def lines(directory: Path, rank: int, what: str) -> list[list[str]]:
    """What a rank has noted about itself."""
    return [line.split()[1:] for line in (directory / f"rank-{rank}").read_text().splitlines() if line.startswith(what)]


def check_in_place(directory: Path, job: Running, ranks: int, replaced: int | None, step: int = 8) -> None:
    """One fault, answered in place: all processes stay but that of the dead rank, and `fit` returns once in each."""
    [incident] = incidents(directory)
    rung = "retry" if replaced is None else "replace"
    assert (incident.ending, incident.rung, incident.steps_lost) == ("in_place", rung, 0), job.output[-6000:]
    assert incident.notes == ()
    for rank in range(ranks):
        entered, left = lines(directory, rank, "entered"), lines(directory, rank, "left")
        assert [begun for _, begun in entered] == ["0", str(step)], entered
        assert (len({pid for pid, _ in entered}) == 1) == (rank != replaced)
        assert [pid for pid, _ in left] == [entered[-1][0]]


def check_same(one: Path, other: Path) -> None:
    """The same weights, the same lines in the same logs, the same checkpoints."""
    assert differences(one / "final.pt", other / "final.pt") == []
    assert logged.rows(one / "logs/table") == logged.rows(other / "logs/table")
    assert scalars(one) == scalars(other)
    assert logged.versions(one / "logs") == logged.versions(other / "logs")
    assert checkpoints(one) == checkpoints(other) != []


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard's logger has written, where the job has one."""
    return logged.scalars(directory / "logs/board") if (directory / "logs/board").exists() else {}


def checkpoints(directory: Path) -> list[str]:
    """What ModelCheckpoint has left."""
    return sorted(path.name for path in directory.glob("logs/**/*.ckpt"))


def test_a_killed_rank_0_is_replaced_and_each_step_is_logged_once(tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(run, 2, directory), "kind=sigkill,rank=0,step=8,phase=backward") as started:
        pass
    check_in_place(directory, started, 2, replaced=0)
    check_same(directory, undisturbed(2))


def test_a_step_that_failed_is_done_again(tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    faults = "kind=exception,rank=1,step=8,phase=backward"
    with disturbed(tmp_path, job(torchrun, 2, directory), faults, warm=False) as started:
        pass
    check_in_place(directory, started, 2, replaced=None)
    check_same(directory, undisturbed(2))
