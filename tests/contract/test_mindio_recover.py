"""MindIO's `recover` (ARF): TaskD starts a dead rank's process anew, all others keep theirs, and nothing is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lastgasp.testing.weights import differences
from support import logged, mindx
from support.again_faults import VARIABLE
from support.launchers import SUPPORT, finish, incidents, torchrun, undisturbed_jobs
from support.recovery_backends import LEADERS, TORCH, Backend, Trace, used

WORKER = SUPPORT / "train_again.py"
LIGHTNING = SUPPORT / "train_again_lightning.py"
VALUES = SUPPORT / "train_values_lightning.py"
POD = {
    "HIGH_AVAILABILITY": "dump,recover,retry", "LASTGASP_TOKEN": "the secret of this test's job",
    "LASTGASP_BIND": mindx.HOST, "LASTGASP_WARM": "off", "TESTS_UNTIL_KEPT": "1",
}  # fmt: skip
KILLED = "kind=sigkill,rank=2,step=8,phase=backward"
LATER = "kind=sigkill,rank=0,step=10,phase=backward,incarnation=1"
SURVIVOR = ["stop", "clean", "rebuild_group", "repair", "rollback"]

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final weights of a job without a fault, by its number of ranks."""

    def alone(folder: Path, ranks: int) -> list[str]:
        return torchrun(WORKER, "--dir", folder, "--final", folder / "final.pt", ranks=ranks)

    return undisturbed_jobs(tmp_path_factory, alone)


def lines(directory: Path, rank: int) -> list[tuple[str, int]]:
    """Process and step of each entry of a rank's."""
    text = (directory / f"rank-{rank}").read_text()
    found = [line.split()[1:] for line in text.splitlines() if line.startswith("entered")]
    return [(pid, int(step)) for pid, step, *_ in found]


def job(ranks: int, directory: Path, *more: str) -> list[str]:
    """Its command line."""
    directory.mkdir(exist_ok=True)
    (directory / "go").touch()
    return mindx.command(WORKER, "--dir", directory, "--final", directory / "final.pt", *more, ranks=ranks)


def check_orders(trace: Trace, ranks: int, victims: tuple[int, ...]) -> None:
    """MindIO's order on each rank: state goes from one survivor to the new process."""
    assert trace.events("save_ckpt") == []
    for rank in range(ranks):
        orders, states = list[str](), list[str]()
        for victim in victims:
            pair = (victim, (victim + 1) % ranks)
            wanted = [name for name in SURVIVOR if name != "repair" or rank in pair]
            orders += wanted[2:] if rank == victim else wanted
            states.append("RS_PREREPAIR_FINISH" if rank == victim else "RS_NORMAL")
        assert [name for name in trace.names(rank) if name in SURVIVOR] == orders
        assert [event["state"] for event in trace.events("report", rank)] == states


@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize("keep", ["--keep", pytest.param("", marks=pytest.mark.full)])
def test_killed_ranks_get_new_processes_and_the_others_keep_theirs(
    leader: Backend, keep: str, tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """First the last rank, then, two steps later, rank 0, in whose process all meet."""
    directory, victims = tmp_path / "d", (2, 0)
    with used(leader, tmp_path, monkeypatch) as trace:
        done = finish(job(3, directory, *filter(None, [keep])), tmp_path, LASTGASP_FAULT=f"{KILLED};{LATER}", **POD)
        assert done.ok, done.output[-8000:]
        for rank in range(3):
            entered = lines(directory, rank)
            assert [step for _, step in entered] == [0, 8, 10]
            anew = [entered[i][0] != entered[i + 1][0] for i in range(2)]
            assert anew == [rank == victim for victim in victims]
        if leader is TORCH:
            check_orders(trace, 3, victims)
    assert differences(undisturbed(3), directory / "final.pt") == []
    assert len(list(directory.glob("*.pt"))) == 1  # nothing was saved
    found = incidents(directory)
    for incident, victim, step in zip(found, victims, (8, 10), strict=True):
        ended = (incident.ending, incident.rung, incident.step_saved, incident.steps_lost)
        assert ended == ("in_place", "replace", step, 0) and incident.led_by == "MindIO in TaskD"
        assert [fault.rank for fault in incident.faults] == [victim]


def lightning(directory: Path) -> list[str]:
    """A job of three ranks."""
    directory.mkdir()
    (directory / "go").touch()
    return mindx.command(LIGHTNING, "--dir", directory, ranks=3)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a Lightning job without a fault."""
    directory = tmp_path_factory.mktemp("fitted") / "d"
    directory.mkdir()
    (directory / "go").touch()
    command = torchrun(LIGHTNING, "--dir", directory, ranks=3)
    assert finish(command, directory, LASTGASP_WARM="off", LASTGASP_BACKEND="embedded").ok
    return directory


@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
def test_lightnings_fit_gets_new_processes_and_the_others_keep_theirs(
    leader: Backend, tmp_path: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As above; each row of the log and each plain value is there once."""
    directory, victims = tmp_path / "d", (2, 0)
    with used(leader, tmp_path, monkeypatch) as trace:
        faults = {"LASTGASP_FAULT": f"{KILLED};{LATER}", "LASTGASP_RECOVERY": "auto"}
        done = finish(lightning(directory), tmp_path, **POD, **faults)
        assert done.ok, done.output[-8000:]
        for rank in range(3):
            entered = lines(directory, rank)
            assert [step for _, step in entered] == [0, 8, 10]
            anew = [entered[i][0] != entered[i + 1][0] for i in range(2)]
            assert anew == [rank == victim for victim in victims]
        if leader is TORCH:
            check_orders(trace, 3, victims)
    assert differences(fitted / "final.pt", directory / "final.pt") == []
    assert logged.rows(fitted / "logs/table") == logged.rows(directory / "logs/table")
    assert list(directory.glob("gasp-*")) == []
    found = incidents(directory)
    for incident, victim, step in zip(found, victims, (8, 10), strict=True):
        ended = (incident.ending, incident.rung, incident.step_saved, incident.steps_lost)
        assert ended == ("in_place", "replace", step, 0) and incident.led_by == "MindIO in TaskD"
        assert [fault.rank for fault in incident.faults] == [victim]


def values(directory: Path, rank: int) -> str:
    """What a rank's module and callbacks kept at the end."""
    text = (directory / f"rank-{rank}").read_text()
    return next(line for line in text.splitlines() if line.startswith("values "))


@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
def test_each_step_counts_once_in_what_users_of_lightning_keep(
    leader: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A survivor's lists and counters are put back, and the new process gets them."""
    expected, directory = tmp_path / "expected", tmp_path / "d"
    for folder in (expected, directory):
        folder.mkdir()
        (folder / "go").touch()
    assert finish(torchrun(VALUES, expected), tmp_path, LASTGASP_WARM="off", LASTGASP_BACKEND="embedded").ok
    with used(leader, tmp_path, monkeypatch):
        faults = {"LASTGASP_FAULT": "kind=sigkill,rank=1,step=8,phase=backward", "LASTGASP_RECOVERY": "auto"}
        done = finish(mindx.command(VALUES, directory, ranks=2), tmp_path, **POD, **faults)
        assert done.ok, done.output[-8000:]
    [incident] = incidents(directory)
    assert (incident.ending, incident.rung, incident.step_saved, incident.steps_lost) == ("in_place", "replace", 8, 0)
    assert [values(directory, rank) for rank in range(2)] == [values(expected, rank) for rank in range(2)]


OF_LIGHTNING = ["stop,0,self", "rebuild,2,self", "rollback,1,self", "kept,0,self", "handover,2,self"]


@pytest.mark.product("second")
@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize("second", OF_LIGHTNING)
def test_a_second_fault_of_lightning_is_answered_by_a_save_and_a_restart(
    leader: Backend, second: str, tmp_path: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    directory = tmp_path / "d"
    faults = {"LASTGASP_FAULT": KILLED, "LASTGASP_FAULT_LOG": str(tmp_path / "faults.log"), VARIABLE: second}
    with used(leader, tmp_path, monkeypatch):
        done = finish(lightning(directory), tmp_path, LASTGASP_RECOVERY="auto", **POD, **faults)
        assert done.ok, done.output[-8000:]
    assert (directory / "second").exists()
    *_, incident = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 8, 0), incident
    assert differences(fitted / "final.pt", directory / "final.pt") == []


@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
def test_a_rank_killed_in_its_last_step_gets_a_new_process_that_ends_with_the_others(
    leader: Backend, tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    directory, fault = tmp_path / "d", "kind=sigkill,rank=2,step=11,phase=step_end"
    with used(leader, tmp_path, monkeypatch):
        done = finish(job(3, directory), tmp_path, LASTGASP_FAULT=fault, **POD)
        assert done.ok, done.output[-8000:]
    wanted, found = (torch.load(path) for path in (undisturbed(3), directory / "final.pt"))
    del wanted["errors"], found["errors"]  # what the script does behind its last step is not done again
    assert all(torch.equal(value, found.pop(name)) for name, value in wanted.items()) and not found
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("in_place", 12, 0)


SECOND = [
    "stop,0,self", "clean,1,self", "rebuild,0,self", "rebuild,2,self", "rollback,1,self", "kept,0,self",
    "function called,2,self", "handover,2,self", "handover,0,self", "state taken,1,self", "first step,2,self",
]  # fmt: skip


@pytest.mark.product("second")
@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize("second", SECOND)
def test_a_second_fault_is_answered_by_a_save_and_a_restart(
    leader: Backend, second: str, tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    directory = tmp_path / "d"
    variables = {"LASTGASP_FAULT": KILLED, "LASTGASP_FAULT_LOG": str(tmp_path / "faults.log"), VARIABLE: second}
    with used(leader, tmp_path, monkeypatch):
        done = finish(job(3, directory), tmp_path, **POD, **variables)
        assert done.ok, done.output[-8000:]
    assert (directory / "second").exists()
    *_, incident = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 8, 0), incident
    assert differences(undisturbed(3), directory / "final.pt") == []


@pytest.mark.full
def test_what_is_refused_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindIO does not offer it to MindX then: the step is dumped."""
    directory = tmp_path / "d"
    with used(TORCH, tmp_path, monkeypatch) as trace:
        done = finish(job(3, directory), tmp_path, LASTGASP_FAULT=KILLED, LASTGASP_RECOVERY="retry", **POD)
        assert done.ok, done.output[-8000:]
        assert "strategy recover is refused: LASTGASP_RECOVERY=retry" in done.output
        assert trace.events("rebuild_group") == []
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 8, 0), incident
