"""Jobs of the adapter on the drop-in: their command lines and environment, and what they have noted."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from lastgasp.testing.jobs import Finished, run_job

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "plugins/mindio"
PATHS = (ROOT / "tests", PLUGIN, PLUGIN / "lastgasp_mindio/dropin")
SCRIPT = Path(__file__).with_name("train_replicated.py")
LIMIT = 500.0
"""Seconds for one job with its restarts, on a loaded machine."""


@dataclass(frozen=True)
class Note:
    """One line of a rank's."""

    at_ns: int
    attempt: int
    rank: int
    what: str
    more: str


@dataclass(frozen=True)
class DropInJob:
    """One job in a folder of its own."""

    folder: Path
    world: int = 4
    steps: int = 10

    @property
    def checkpoints(self) -> Path:
        """Where it saves."""
        return self.folder / "ckpts"

    @property
    def final(self) -> Path:
        """Its last weights and moments."""
        return self.folder / "final.pt"

    def run(self, faults: str = "", **variables: str) -> Finished:
        """Run it under `lastgasp run`, to its end."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "lastgasp", "run", "--nproc-per-node", str(self.world), str(SCRIPT)]
        own = {"LASTGASP_FAULT": faults, "LASTGASP_FAULT_LOG": str(self.folder / "fired")} if faults else {}
        environ = os.environ | environment(self.checkpoints, self.folder / "notes") | own | variables
        command += ["--final", str(self.final), "--steps", str(self.steps)]
        return run_job(command, self.folder / "log", timeout=LIMIT, environ=environ)

    def notes(self) -> list[Note]:
        """What its ranks have noted, in order."""
        found = []
        for line in (self.folder / "notes").read_text().splitlines():
            at, attempt, rank, what, *more = line.split(" ", 4)
            found.append(Note(int(at), int(attempt), int(rank), what, more[0] if more else ""))
        return sorted(found, key=lambda note: note.at_ns)


def environment(checkpoints: Path, notes: Path) -> dict[str, str]:
    """The drop-in is found, and nobody else's `mindio_ttp`."""
    paths = os.pathsep.join([*map(str, PATHS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        "PYTHONPATH": paths,
        "OMP_NUM_THREADS": "1",
        "JOB_SAVE": str(checkpoints),
        "JOB_NOTES": str(notes),
        "LASTGASP_DIR": str(checkpoints),
    }
