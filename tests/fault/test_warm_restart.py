"""Ranks of a restart are forked from a warm process: no step lost, bit-equal, and started as ever where that fails."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import MARK, marked, read_proc
from lastgasp.testing.weights import differences
from support import prefork
from support.hosts import needs_hosts
from support.launchers import SUPPORT, Running, finish, incidents, run, running, torchrun, until
from support.prefork import Prefork

WORKER = SUPPORT / "warm_worker.py"
READY, REFUSED = "a restart will fork its ranks from a warm process", "a restart will start its ranks anew"
KILL = "kind=sigkill,rank=1,step=9,phase=backward"
OWN = ("pid", "draws", "seeds")
"""Facts that no two processes share."""

pytestmark = [pytest.mark.cold, pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def killed(command: list[str], folder: Path, **variables: str) -> Iterator[tuple[Running, Path]]:
    """A job whose rank 1 is killed in backward after step 9, which comes once the test opens the gate."""
    directory, log = folder / "d", folder / "faults.log"
    faults = {"LASTGASP_FAULT": KILL, "LASTGASP_FAULT_LOG": str(log), "LASTGASP_LOG": "debug", "LASTGASP_WARM": "auto"}
    faults["LASTGASP_RECOVERY"] = "restart"
    with running(folder, command, **faults, **variables) as [job]:
        yield job, directory
        (directory / "go").touch()
        assert job.code() == 0, job.output[-4000:]
    assert [(fault["at_rank"], fault["at_step"]) for fault in read_log(log)] == [(1, 9)], job.output[-4000:]
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 9, 0)


def restart_of(directory: Path) -> str:
    """How the job was restarted, as its incident says."""
    [incident] = incidents(directory)
    return incident.restart


def facts(directory: Path, what: str, rank: int, attempt: int) -> Any:
    """What a rank wrote about itself."""
    return json.loads((directory / f"{what}-{rank}-{attempt}.json").read_text())


@pytest.mark.parametrize(
    ("shape", "launcher"), [("lightning", run), pytest.param("loop", torchrun, marks=pytest.mark.full)]
)
def test_ranks_are_forked_after_a_kill(
    shape: str, launcher: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with killed(launcher(WORKER, shape, tmp_path / "d"), tmp_path) as (job, directory):
        until(lambda: READY in job.output, "the warm process is ready")
    assert restart_of(directory) == "warm"
    assert "restarted warm" in job.output

    before, after = ([facts(directory, "rank", rank, attempt) for rank in (0, 1)] for attempt in (0, 1))
    for cold, warm in zip(before, after, strict=True):
        assert {k: v for k, v in warm.items() if k not in OWN} == {k: v for k, v in cold.items() if k not in OWN}
    seeds = [seed for rank in (*before, *after) for seed in rank["seeds"]]
    assert len(set(seeds)) == len(seeds) == 12
    if shape == "lightning":
        assert [facts(directory, "read", rank, 1) for rank in (0, 1)] == [[0, 0], [1, 1]]

    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "go").touch()
    monkeypatch.setattr(prefork.images, "on", Prefork().on)  # of this job only the numbers count
    assert finish(torchrun(WORKER, shape, undisturbed), tmp_path, LASTGASP_WARM="off").ok
    assert differences(directory / "final.pt", undisturbed / "final.pt") == []


@contextmanager
def gated(folder: Path, command: tuple[str, ...] = (), **variables: str) -> Iterator[tuple[Running, Path]]:
    """A job without torch in its ranks; one kills itself after step 3, which comes once the test opens the gate.

    Args:
        command: what starts it, in place of its Python.
    """
    directory = folder / "d"
    python, *words = run(SUPPORT / "launch_worker.py", directory, "gated", 3)
    command = (*(command or (python,)), *words)
    loud = {"LASTGASP_LOG": "debug", "LASTGASP_WARM": "auto"}
    with running(folder, [*command], **loud, **variables) as [job]:
        yield job, directory
        (directory / "go").touch()
        assert job.code() == 0, job.output[-4000:]
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 3, 0)


def test_an_import_that_starts_a_thread_is_reported_and_ranks_start_as_before(tmp_path: Path) -> None:
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "culprit.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    paths = os.pathsep.join((str(library), str(SUPPORT.parent)))
    with gated(tmp_path, PYTHONPATH=paths, LAUNCH_WORKER_IMPORT="culprit") as (job, directory):
        until(lambda: REFUSED in job.output, "the warm process was given up")
    [line] = [line for line in job.output.splitlines() if REFUSED in line]
    assert line.endswith("an import has started a thread")
    assert restart_of(directory) == "cold: an import has started a thread"


@needs_hosts
def test_the_first_process_of_a_container_without_a_home_forks_its_ranks(tmp_path: Path) -> None:
    """matplotlib made a folder in each process there; and the warm process counted as left by the dead ranks."""
    alone = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child", sys.executable)
    folders = set(Path(tempfile.gettempdir()).glob("*matplotlib*"))
    places = {"HOME": "/dev/null", "XDG_CONFIG_HOME": "", "XDG_CACHE_HOME": "", "MPLCONFIGDIR": ""}
    with gated(tmp_path, alone, LAUNCH_WORKER_IMPORT="matplotlib", **places) as (job, directory):
        until(lambda: READY in job.output or REFUSED in job.output, "the warm process is ready")
    assert restart_of(directory) == "warm", job.output[-4000:]
    assert "left running" not in job.output
    assert set(Path(tempfile.gettempdir()).glob("*matplotlib*")) == folders


def test_the_death_of_the_warm_process_costs_nothing(tmp_path: Path) -> None:
    with gated(tmp_path) as (job, directory):
        until(lambda: READY in job.output, "the warm process is ready")
        mark = dict(line.split(b"=", 1) for line in read_proc(str(job.process.pid), "environ").split(b"\0") if line)
        [pid] = [pid for pid, line in marked(MARK, mark[MARK.encode()].decode()) if "warm_server" in line]
        os.kill(pid, signal.SIGKILL)
        lost = "no lost rank gets a new process now, and the next restart will start its ranks anew"
        until(lambda: lost in job.output, "its death was seen")
    assert restart_of(directory) == "cold: the warm process is gone (killed by SIGKILL)"
