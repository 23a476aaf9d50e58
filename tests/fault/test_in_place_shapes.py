"""Loops of all kinds inside of `train`: entered again with the same numbers, or restarted with one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support.launchers import SUPPORT, finish, incidents, run, running, torchrun, until
from support.ports import free_port

WORKER = SUPPORT / "train_again_shapes.py"
WORKERS = ("persistent", "compiled", "worker dies", "worker dies later", "persistent worker dies")
"""Shapes whose data come from worker processes, which draw no random numbers here."""
OFFER = "a fault can be answered in place, as incarnation 1\n"

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("shape", "line"),
    [
        ("persistent", ""),
        ("compiled", ""),
        ("two", ""),
        ("generator", "that was made before the function was called again"),
        ("counting", "the loader does not give what it gave before"),
        ("once", "cannot set number of interop threads"),
        ("address", ""),
    ],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank(shape: str, line: str, victim: int, tmp_path: Path) -> None:
    goes_on(tmp_path, shape, f"kind=sigkill,rank={victim},step=8,phase=backward", "replace", line)


@pytest.mark.parametrize(
    ("shape", "line"), [("worker dies", ""), ("persistent worker dies", "DataLoader worker")]
)
def test_a_killed_worker_of_a_loader(shape: str, line: str, tmp_path: Path) -> None:
    goes_on(tmp_path, shape, "", "retry", line)


def test_a_killed_worker_of_a_survivors_loader_is_a_second_fault(tmp_path: Path) -> None:
    fault = "kind=sigkill,rank=0,step=8,phase=backward"
    goes_on(tmp_path, "worker dies later", fault, "replace", "DataLoader worker")


def goes_on(tmp_path: Path, shape: str, fault: str, rung: str, line: str) -> None:
    """A job with a fault ends with the numbers of one without; `line` says why it restarted, where it did."""
    calm, directory, log = tmp_path / "calm", tmp_path / "d", tmp_path / "faults.log"
    for place in (calm, directory):
        place.mkdir()
        (place / "port").write_text(str(free_port()))
    (calm / "go").touch()
    (calm / "died").touch()
    options = [WORKER, "--shape", shape]
    reference = torchrun(*options, "--dir", calm, "--final", calm / "final.pt")
    assert finish(reference, tmp_path, LASTGASP_WARM="off").ok
    command = run(*options, "--dir", directory, "--final", directory / "final.pt")
    variables = {
        "LASTGASP_FAULT": fault, "LASTGASP_FAULT_LOG": str(log),
        "LASTGASP_WARM": "auto", "LASTGASP_LOG": "debug",
    }  # fmt: skip
    with running(tmp_path, command, **variables) as [started]:
        until(lambda: OFFER in started.output or started.process.poll() is not None, "a fault can be answered in place")
        (directory / "go").touch()
        assert started.code() == 0, started.output[-6000:]
    assert len(read_log(log)) == bool(fault)
    first, *more = incidents(directory)
    assert (first.ending, first.rung) == ("in_place", rung), started.output[-6000:]
    assert all(incident.steps_lost == 0 for incident in (first, *more)), started.output[-6000:]
    assert bool(more) == bool(line), started.output[-6000:]
    assert line in started.output
    workers = ["random numbers that worker processes of a DataLoader draw are not restored"] * (shape in WORKERS)
    assert [note.partition(":")[0] for note in first.notes] == workers
    assert differences(calm / "final.pt", directory / "final.pt") == []
