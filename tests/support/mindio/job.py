"""Jobs of the adapter on the drop-in: their command lines and environment, and what they have noted."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lastgasp.testing.jobs import Finished, run_job
from support.launchers import Running, running, until

ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "plugins/mindio"
PATHS = (ROOT / "tests", PLUGIN, PLUGIN / "lastgasp_mindio/dropin")
SCRIPTS = Path(__file__).parent
GO = 2
"""The step behind which the ranks wait for the launcher."""
OFFER = "a fault can be answered in place, as incarnation 1"
READY = "a restart will fork its ranks from a warm process"
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
    script: str = "train_replicated.py"

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
        environ = os.environ | self._environment(faults) | variables
        return run_job(self._command(), self.folder / "log", timeout=LIMIT, environ=environ)

    @contextmanager
    def running(
        self, faults: str, recover: str, dies: str = "", *, warm: bool = True, gate: int | None = None
    ) -> Iterator[Running]:
        """The same, while the test does something; its faults come once dead ranks can be replaced.

        Args:
            recover: MindIO's switches, `retry`, `recover` and `zit`.
            dies: a rank and the handler in which it is killed in the first attempt.
            warm: dead ranks can be replaced; else the faults come once the launcher can answer them.
            gate: a step behind which the ranks wait until `go` is called with it.
        """
        gates = " ".join(map(str, [GO, *([gate] if gate is not None else [])]))
        more = {"LASTGASP_LOG": "debug", "LASTGASP_WARM": "auto" if warm else "off", "JOB_WAITS": gates,
                "JOB_RECOVER": recover, "JOB_DIES": dies}  # fmt: skip
        with running(self.folder, self._command(), **self._environment(faults), **more) as [started]:
            what = READY if warm else OFFER
            until(lambda: what in started.output, what)
            self.go(GO)
            yield started

    def go(self, gate: int) -> None:
        """Let the ranks pass it."""
        (self.folder / f"go-{gate}").touch()

    def _command(self) -> list[str]:
        command = [sys.executable, "-m", "lastgasp", "run", "--nproc-per-node", str(self.world)]
        return [*command, str(SCRIPTS / self.script), "--final", str(self.final), "--steps", str(self.steps)]

    def _environment(self, faults: str) -> dict[str, str]:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        own = {"LASTGASP_FAULT": faults, "LASTGASP_FAULT_LOG": str(self.folder / "fired")} if faults else {}
        return environment(self.checkpoints, self.folder / "notes") | own

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
