"""From the kill to the next completed step of the Lightning example: ranks forked from a warm process, or started anew.

Two gloo ranks of `examples/lightning_digits`, rank 1 is killed in the backward pass. Before that rank 0 sleeps, so that
the warm process is ready: what is measured is not how long that takes. Both times come from the incident's record.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Measure, Options, interleave
from lastgasp.events import Incident, decode_incident
from lastgasp.testing.faults import ENV_FAULT, ENV_LOG
from lastgasp.testing.jobs import run_job

SCRIPT = Path(__file__).parents[1] / "examples" / "lightning_digits" / "train.py"
ROUNDS, STEPS, EVERY, SLEEP_STEP, FAULT_STEP = 7, 20, 10, 5, 7
PAUSE_S = 60
"""Long enough for the imports on a busy machine; the job that does without sleeps as long."""
TARGET_S = 1.5
LIMIT = 300.0


def measure(options: Options) -> list[Measure]:
    """Seconds from the fault to the first new step, both in each round."""
    jobs = _Jobs(options.folder)
    rounds = 1 if options.quick else ROUNDS
    seconds = interleave({"warm": lambda: jobs.restart("auto"), "cold": lambda: jobs.restart("off")}, rounds)
    name = "Lightning example, 2 ranks, kill -> next completed step"
    return [
        Measure(name=f"{name}: warm", unit="s", samples=seconds["warm"], target=TARGET_S),
        Measure(name=f"{name}: cold", unit="s", samples=seconds["cold"]),
        Measure(name="of the warm one: fault -> released", unit="s", samples=jobs.released),
        Measure(name="of the warm one: released -> first rank joins", unit="s", samples=jobs.joined),
        Measure(name="of the warm one: first rank joins -> first step", unit="s", samples=jobs.stepped),
    ]


@dataclass
class _Jobs:
    folder: Path
    count: int = 0
    released: list[float] = field(default_factory=list)
    joined: list[float] = field(default_factory=list)
    stepped: list[float] = field(default_factory=list)

    def restart(self, switch: str) -> float:
        """One job with one fault."""
        self.count += 1
        place = self.folder / str(self.count)
        place.mkdir()
        command = [sys.executable, "-m", "lastgasp", "run", "--nproc-per-node", "2", str(SCRIPT), "--dir",
                   str(place / "ckpts"), "--steps", str(STEPS), "--every", str(EVERY)]  # fmt: skip
        pause = f"kind=sleep:{PAUSE_S},rank=0,step={SLEEP_STEP},phase=data"
        faults = f"{pause};kind=sigkill,rank=1,step={FAULT_STEP},phase=backward"
        environ = os.environ | {"OMP_NUM_THREADS": "1", "LASTGASP_WARM": switch, "LASTGASP_RECOVERY": "restart"}
        environ[ENV_FAULT] = faults
        environ[ENV_LOG] = str(place / "fault.log")
        done = run_job(command, place / "log", timeout=LIMIT, environ=environ)
        if done.returncode != 0:
            raise RuntimeError(f"{switch}: exit code {done.returncode}\n{done.output[-4000:]}")
        [path] = (place / "ckpts" / "incidents").glob("*.json")
        return self._times(decode_incident(path.read_bytes()), switch)

    def _times(self, incident: Incident, switch: str) -> float:
        phases = incident.phases
        moments = (phases.fault, phases.released, phases.restarted, phases.first_step)
        fault, released, restarted, stepped = (-1 if moment is None else moment for moment in moments)
        if min(fault, released, restarted, stepped) < 0 or (incident.restart == "warm") != (switch == "auto"):
            raise RuntimeError(f"{switch}: restarted {incident.restart or 'in an unknown way'}, {phases}")
        if switch == "auto":
            self.released.append((released - fault) / 1e9)
            self.joined.append((restarted - released) / 1e9)
            self.stepped.append((stepped - restarted) / 1e9)
        return (stepped - fault) / 1e9
