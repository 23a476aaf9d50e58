"""Many faults in one job, all answered in place: nothing is left of any of them, same numbers at the end."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support import logged
from support.held import COUNTED
from support.launchers import LIMIT, SUPPORT, incidents, run, running, until
from support.train_many_faults import faults

LOOP, LIGHTNING, DDP, TRAINER = (
    SUPPORT / f"train_many_faults{kind}.py" for kind in ("", "_lightning", "_ddp", "_transformers")
)
RANKS = 3
OFFER = "a fault can be answered in place, as incarnation {}\n"

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


LONG = (pytest.mark.full, pytest.mark.cold)
"""A rank that was forked makes the pages of its image its own one after the other, which looks like growth."""
NEEDS = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install '.[transformers]'")


@pytest.mark.parametrize(
    ("worker", "count", "after"),
    [
        pytest.param(LOOP, 6, 3, id="6 faults"),
        pytest.param(LOOP, 30, 5, marks=LONG, id="30 faults"),
        pytest.param(LIGHTNING, 12, 3, marks=LONG, id="12 faults of ModelParallelStrategy"),
        pytest.param(DDP, 30, 5, marks=LONG, id="30 faults of ddp"),
        pytest.param(TRAINER, 30, 5, marks=(*LONG, NEEDS), id="30 faults of Trainer"),
    ],
)
def test_nothing_grows_with_the_number_of_faults(worker: Path, count: int, after: int, tmp_path: Path) -> None:
    """Memory may grow by 20 MB, as its allocators like: a copy of the state kept for each fault would be 2.6 MB each,
    an arena 8 MB.

    Descriptors, threads and children may not grow at all. Processes and rings are looked for as after every test.
    """
    log = tmp_path / "faults.log"
    calm, directory = tmp_path / "calm", tmp_path / "d"
    job(tmp_path, worker, calm, count, after, LASTGASP_WARM="off")
    output = job(tmp_path, worker, directory, count, after, LASTGASP_WARM="auto", LASTGASP_LOG="debug",
                 LASTGASP_FAULT=faults(count), LASTGASP_FAULT_LOG=str(log), LASTGASP_HANG_TIMEOUT="20")  # fmt: skip
    assert len(read_log(log)) == count
    rungs = [incident.rung for incident in incidents(directory)]
    assert rungs == ["retry" if fault["kind"] == "exception" else "replace" for fault in read_log(log)], output[-6000:]
    assert [incident.steps_lost for incident in incidents(directory)] == [0] * count
    assert (directory / "more").read_text() == "", f"rank 1, launcher: {COUNTED}"
    assert differences(calm / "final.pt", directory / "final.pt") == []
    if worker == DDP:
        assert logged.rows(calm / "logs") == logged.rows(directory / "logs")


def job(folder: Path, worker: Path, directory: Path, count: int, after: int, **variables: str) -> str:
    """One job to its end; each fault comes once the launcher can answer it."""
    directory.mkdir()
    command = run(worker, "--dir", directory, "--faults", count, "--after", after, ranks=RANKS)
    command[0] = sys.executable if worker == TRAINER else command[0]
    variables["HF_HUB_OFFLINE"] = "1"  # what a script sets itself keeps its ranks from being forked
    with running(folder, command, **variables) as [started]:
        (directory / "launcher").write_text(str(started.process.pid))
        for number in range(count):
            if "LASTGASP_FAULT" in variables:
                ready = OFFER.format(number + 1)
                until(lambda: ready in started.output or started.process.poll() is not None, ready, LIMIT)  # noqa: B023
            (directory / f"go-{number}").touch()
        assert started.code() == 0, started.output[-6000:]
    return started.output
