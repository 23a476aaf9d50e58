"""Jobs of a launcher on real processes: their command lines, and what a test does while they run."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lastgasp.events import Incident, decode_incident
from lastgasp.testing.jobs import MARK, Finished, kill_marked, marked, run_job
from support import card, lean

SUPPORT = Path(__file__).parent
LIMIT = 300.0
"""Seconds for one job with its restarts, on a loaded machine."""
PATIENCE = 150.0
"""Seconds that something which must happen may take."""


def run(*more: object, ranks: int = 2) -> list[str]:
    """`lastgasp run`."""
    return [lean.python(), "-m", "lastgasp", "run", "--nproc-per-node", str(ranks), *map(str, more)]


def torchrun(*more: object, ranks: int = 2) -> list[str]:
    """Plain torchrun on one node."""
    torch = [lean.python(), "-m", "torch.distributed.run", "--standalone"]
    return [*torch, "--nproc-per-node", str(ranks), *map(str, more)]


def environment(**more: str) -> dict[str, str]:
    """Workers find the test's helpers; nothing of the shell's own jobs gets through."""
    paths = os.pathsep.join(filter(None, [str(SUPPORT.parent), os.environ.get("PYTHONPATH", "")]))
    shell = {name: value for name, value in os.environ.items() if not name.startswith(("LASTGASP_DIR", "PET_"))}
    asked = {} if card.KIND == "cpu" else {"LASTGASP_RECOVERY": "auto"}  # on a GPU it is not the default
    return shell | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | asked | more


def finish(command: list[str], folder: Path, **variables: str) -> Finished:
    """Run one job to its end; nothing of it may be left."""
    done = run_job(command, folder / "log", timeout=LIMIT, environ=environment(**variables))
    assert done.left == (), done.output[-4000:]
    return done


def undisturbed_jobs(
    factory: pytest.TempPathFactory, command: Callable[..., list[str]], result: str = "final.pt"
) -> Callable[..., Path]:
    """Results of jobs without a fault, each made when it is first asked for.

    Args:
        command: command line for a directory, and for what the test asks with.
        result: what of the directory is given.
    """
    found: dict[tuple[Any, ...], Path] = {}

    def make(*key: Any) -> Path:
        if key not in found:
            folder = factory.mktemp("undisturbed")
            (folder / "go").touch()
            words = command(folder, *key)
            same = tuple(word.replace(str(folder), "") for word in words)
            if same not in _undisturbed:
                assert finish(words, folder, LASTGASP_WARM="off").ok
                _undisturbed[same] = folder
            found[key] = _undisturbed[same]
        return found[key] / result

    return make


_undisturbed: dict[tuple[str, ...], Path] = {}
"""By their command lines: other modules of this run may want the same."""


class Running:
    """A job that the test does things to."""

    def __init__(self, command: list[str], folder: Path, mark: str, variables: Mapping[str, str]) -> None:
        self.log = folder / f"log-{uuid.uuid4().hex[:6]}"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                command, env=environment(**variables) | {MARK: mark}, stdout=file, stderr=file, stdin=subprocess.DEVNULL
            )

    def code(self) -> int:
        """The launcher's exit code."""
        return self.process.wait(LIMIT)

    @property
    def output(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")


@contextmanager
def running(folder: Path, *commands: list[str], **variables: str) -> Iterator[list[Running]]:
    """Start launchers; afterwards no process of theirs is left."""
    mark = uuid.uuid4().hex
    jobs: list[Running] = []
    try:
        jobs += [Running(command, folder, mark, variables) for command in commands]
        yield jobs
        until(lambda: not list(marked(MARK, mark)), "no process left")
    finally:
        kill_marked(MARK, mark)
        for job in jobs:
            job.process.wait()


def until(condition: Any, what: str, patience: float = PATIENCE) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience:g} s for: {what}"
        time.sleep(0.02)


def incidents(directory: Path) -> list[Incident]:
    """All records, oldest first."""
    found = [decode_incident(path.read_bytes()) for path in (directory / "incidents").glob("*.json")]
    return sorted(found, key=lambda incident: incident.id)
