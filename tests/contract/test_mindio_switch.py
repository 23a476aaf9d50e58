"""MindX moves a rank to another node while the job trains (hot switch): all others keep their processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from lastgasp.testing.weights import differences
from support import logged
from support.again_faults import AFTER, VARIABLE
from support.launchers import SUPPORT, finish, incidents, torchrun, undisturbed_jobs, until
from support.mindio_switch import GATE, SWITCHED, WORKER, check_moved, check_undisturbed, pids, prepared
from support.recovery_backends import TORCH, used

LIGHTNING = SUPPORT / "train_again_lightning.py"
SOON = {"TTP_NORMAL_ACTION_TIME_LIMIT": "60"}
"""Scaled: an order that nobody answers is given up after twelve seconds."""

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final weights of a job of which nobody is moved."""

    def alone(folder: Path) -> list[str]:
        return torchrun(WORKER, "--dir", folder, "--final", folder / "final.pt", ranks=3)

    return undisturbed_jobs(tmp_path_factory, alone)


@pytest.mark.parametrize(
    ("how", "ends"),
    [
        ("term", "has ended by itself: 0"),
        pytest.param("kill", "is killed", marks=pytest.mark.full),
        pytest.param("late", "has ended by itself: 0", marks=pytest.mark.full),
    ],
)
def test_a_rank_is_moved_and_the_others_keep_their_processes(
    how: str, ends: str, tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old process ends before the new one has the rank, as ClusterD has it; or after that, by itself."""
    directory = tmp_path / "d"
    with used(TORCH, tmp_path, monkeypatch) as trace, prepared(tmp_path, trace, how) as started:
        (directory / "go").touch()
        assert started.code() == 0, started.output[-8000:]
        assert f"the old process of rank 1 {ends}" in started.output
        check_moved(directory, undisturbed(), trace)


@pytest.mark.full
def test_a_rank_of_lightnings_fit_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of the log is there once."""
    fitted, directory = tmp_path / "fitted", tmp_path / "d"
    fitted.mkdir()
    (fitted / "go").touch()
    command = torchrun(LIGHTNING, "--dir", fitted, ranks=3)
    assert finish(command, tmp_path, LASTGASP_WARM="off", LASTGASP_BACKEND="embedded").ok
    auto = {"LASTGASP_RECOVERY": "auto"}
    with (
        used(TORCH, tmp_path, monkeypatch) as trace,
        prepared(tmp_path, trace, "term", auto, script=LIGHTNING) as started,
    ):
        (directory / "go").touch()
        assert started.code() == 0, started.output[-8000:]
        check_moved(directory, fitted / "final.pt", trace)
    assert logged.rows(fitted / "logs/table") == logged.rows(directory / "logs/table")


@pytest.mark.full
def test_a_switch_that_is_stopped_disturbs_nobody(
    tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the new process waits."""
    directory = tmp_path / "d"
    with used(TORCH, tmp_path, monkeypatch) as trace, prepared(tmp_path, trace, "term", None, False, True) as started:
        until(lambda: "the switch is stopped: 0" in started.output, "MindX has ordered that")
        (directory / "go").touch()
        assert started.code() == 0, started.output[-8000:]
    check_undisturbed(directory, undisturbed())


@pytest.mark.full
def test_a_new_process_that_ends_too_early_disturbs_nobody(
    tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before MindIO has heard that it waits."""
    directory = tmp_path / "d"
    fault = {VARIABLE: "joins,1,self", AFTER: str(directory / "switch")}
    with used(TORCH, tmp_path, monkeypatch) as trace, prepared(tmp_path, trace, "term", fault, False) as started:
        until((directory / "second").exists, "the new process has ended")
        (directory / "go").touch()
        assert started.code() == 0, started.output[-8000:]
    check_undisturbed(directory, undisturbed())


def saved(directory: Path, undisturbed: Any, step: int) -> None:
    """MindX has told nobody to dump: the step is saved all the same, and the job restarts with it."""
    *_, incident = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", step, 0), incident
    assert differences(undisturbed(), directory / "final.pt") == []


@pytest.mark.full
def test_a_switch_that_is_stopped_too_late_ends_in_a_save_and_a_restart(
    tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MindIO has ordered the ranks to leave their step: it ends the job."""
    directory = tmp_path / "d"
    with used(TORCH, tmp_path, monkeypatch) as trace, prepared(tmp_path, trace, "term") as started:
        until(lambda: trace.events("switch_begins"), "the ranks are told to leave their step")
        (directory / "stop").touch()
        until(lambda: "the switch is stopped: 0" in started.output, "MindX has ordered that")
        (directory / "go").touch()
        assert started.code() == 0, started.output[-8000:]
    saved(directory, undisturbed, SWITCHED)


@pytest.mark.full
@pytest.mark.parametrize(("victim", "step"), [(0, GATE), (1, SWITCHED)], ids=["old", "new"])
def test_a_process_of_the_rank_that_dies_before_the_switch(
    victim: int, step: int, tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one: a fault as any, which ClusterD does not answer. The new one: MindIO still counts on it."""
    directory = tmp_path / "d"
    with used(TORCH, tmp_path, monkeypatch) as trace, prepared(tmp_path, trace, "kill", SOON) as started:
        os.kill(pids(trace)[victim], signal.SIGKILL)
        (directory / "go").touch()
        assert started.code() == 0, started.output[-8000:]
    saved(directory, undisturbed, step)


SECOND = ["rebuild,0,self", "rebuild,1,self", "rollback,2,self", "handover,1,self", "handover,2,self"]


@pytest.mark.product("second")
@pytest.mark.full
@pytest.mark.parametrize("second", SECOND)
def test_a_second_fault_in_the_switch_is_answered_by_a_save_and_a_restart(
    second: str, tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "d"
    fault = {VARIABLE: second, AFTER: str(directory / "switch")}
    with used(TORCH, tmp_path, monkeypatch) as trace, prepared(tmp_path, trace, "kill", SOON | fault) as started:
        (directory / "go").touch()
        assert started.code() == 0, started.output[-8000:]
    assert (directory / "second").exists()
    saved(directory, undisturbed, SWITCHED)
