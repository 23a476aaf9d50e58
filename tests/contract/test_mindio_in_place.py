"""Real training whose processes stay, led by MindIO (its stand-in): no step is lost, same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lastgasp.testing.weights import differences
from support import logged
from support.again_faults import DEVICE, VARIABLE
from support.launchers import SUPPORT, finish, incidents, torchrun, undisturbed_jobs
from support.recovery_backends import LEADERS, TORCH, Backend, Trace, used

WORKER = SUPPORT / "train_again.py"
LIGHTNING = SUPPORT / "train_again_lightning.py"
ORDERS = ("stop", "clean", "repair", "rollback")

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final weights of a job without a fault, by its number of ranks."""
    return undisturbed_jobs(tmp_path_factory, lambda folder, ranks: job(ranks, folder))


def job(ranks: int, directory: Path, *more: str) -> list[str]:
    """Its command line."""
    directory.mkdir(exist_ok=True)
    (directory / "go").touch()
    return torchrun(WORKER, "--dir", directory, "--final", directory / "final.pt", *more, ranks=ranks)


def lines(directory: Path, rank: int, what: str) -> list[list[str]]:
    """What a rank has noted about itself."""
    return [line.split()[1:] for line in (directory / f"rank-{rank}").read_text().splitlines() if line.startswith(what)]


def check_orders(trace: Trace, ranks: int, trick: str) -> None:
    """MindIO's order on each rank, and what each has reported."""
    pair = (1, 2 % ranks) if trick == "memory" else ()
    assert trace.events("save_ckpt") == []
    for rank in range(ranks):
        given = [name for name in trace.names(rank) if name in ORDERS]
        assert given == [name for name in ORDERS if name != "repair" or rank in pair]
        state = "RS_NORMAL" if rank != 1 else "RS_UCE" if trick == "memory" else "RS_HCCL_FAILED"
        assert [event["state"] for event in trace.events("report", rank)] == [state]


@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize(
    ("ranks", "trick", "keep"),
    [
        pytest.param(2, "link", "--keep", marks=pytest.mark.full),
        (3, "memory", "--keep"),
        pytest.param(2, "memory", "", marks=pytest.mark.full),
    ],
)
def test_a_device_fault_is_repaired_and_the_step_done_again(
    leader: Backend, ranks: int, trick: str, keep: str, tmp_path: Path, undisturbed: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    directory = tmp_path / "d"
    with used(leader, tmp_path, monkeypatch) as trace:
        command = job(ranks, directory, "--trick", trick, *filter(None, [keep]))
        done = finish(command, tmp_path, LASTGASP_WARM="off")
        assert done.ok, done.output[-6000:]
        for rank in range(ranks):
            entered = lines(directory, rank, "entered")
            assert [(pid, step) for pid, step, _ in entered] == [(entered[0][0], "0"), (entered[0][0], "8")]
        if leader is TORCH:
            check_orders(trace, ranks, trick)
    assert differences(undisturbed(ranks), directory / "final.pt") == []
    assert len(list(directory.glob("*.pt"))) == 1  # nothing was saved
    [incident] = incidents(directory)
    assert (incident.ending, incident.rung, incident.step_saved, incident.steps_lost) == ("in_place", "retry", 8, 0)
    assert [fault.rank for fault in incident.faults] == [1] and incident.led_by == "MindIO"


@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
def test_lightnings_fit_is_entered_again(leader: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start of the same directory trains nothing, so that a run without a fault has one of its own."""
    ran = {}
    for name, text in (("undisturbed", ""), ("d", "SUSPECT REMOTE ERROR")):
        directory = ran[name] = tmp_path / name
        directory.mkdir()
        (directory / "go").touch()
        variables = {"LASTGASP_WARM": "off", "LASTGASP_RECOVERY": "retry", DEVICE: text}
        with used(leader, directory, monkeypatch):
            done = finish(torchrun(LIGHTNING, "--dir", directory, ranks=2), directory, **variables)
            assert done.ok, done.output[-6000:]
    for rank in range(2):
        entered = lines(ran["d"], rank, "entered")
        assert [(pid, step) for pid, step in entered] == [(entered[0][0], "0"), (entered[0][0], "8")]
        assert [pid for pid, _ in lines(ran["d"], rank, "left")] == [entered[0][0]]
    assert differences(ran["undisturbed"] / "final.pt", ran["d"] / "final.pt") == []
    assert logged.rows(ran["undisturbed"] / "logs/table") == logged.rows(ran["d"] / "logs/table")
    assert list(ran["d"].glob("gasp-*")) == []


FULL = pytest.mark.full
LATER = "kind=sigkill,rank=1,step=10,phase=backward,incarnation=1"
SECOND = [
    pytest.param("bad_link", "", "", id="the link fails again"),
    pytest.param("link", "", LATER, id="killed steps later", marks=FULL),
    pytest.param("link", "first step,0,self", "", id="killed before a new step", marks=FULL),
    pytest.param("memory", "function called,0,self", "", id="the giver of the state killed", marks=FULL),
    pytest.param("memory", "function called,1,self", "", id="the taker of the state killed", marks=FULL),
    pytest.param("link", "stop,0,self", "", id="killed in stop", marks=FULL),
    pytest.param("link", "clean,1,self", "", id="killed in clean", marks=FULL),
    pytest.param("link", "rollback,0,self", "", id="killed in rollback", marks=FULL),
    pytest.param("link", "kept,1,self", "", id="killed when let go", marks=FULL),
]


@pytest.mark.product("second")
@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize(("trick", "second", "fault"), SECOND)
def test_a_second_fault_is_answered_by_a_save_and_a_restart(
    leader: Backend, trick: str, second: str, fault: str, tmp_path: Path, undisturbed: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    directory, log = tmp_path / "d", tmp_path / "faults.log"
    variables = {"LASTGASP_FAULT": fault, "LASTGASP_FAULT_LOG": str(log), VARIABLE: second}
    with used(leader, tmp_path, monkeypatch):
        command = job(3, directory, "--trick", trick)
        done = finish(command, tmp_path, LASTGASP_WARM="off", **{k: v for k, v in variables.items() if v})
        assert done.ok, done.output[-6000:]
    assert not second or (directory / "second").exists()
    *repaired, incident = incidents(directory)
    assert [one.ending for one in repaired] in ([], ["in_place"])  # the second fault may come before the end of it
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 10 if fault else 8, 0), incident
    assert differences(undisturbed(3), directory / "final.pt") == []
