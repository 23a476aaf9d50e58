"""The Lightning example on 2 ranks: from the kill of a rank to the next completed step of both.

By turns with `recovery=auto` and `recovery=restart`, each rank killed in its backward pass; the clock starts when the
fault is fired, on the rank that is killed, and stops when the slower rank has completed the step that was disturbed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.harness import Measure, Options
from benchmarks.in_place_times import gate, lost_between, require
from lastgasp.testing.jobs import run_job
from lastgasp.testing.weights import differences

SCRIPT = Path(__file__).with_name("in_place_lightning_job.py")
RANKS, APART, FAULTS, LIMIT = 2, 15, 6, 600.0
TARGETS = {"auto": 1.0, "restart": 1.5}
NAMES = {"auto": "in place", "restart": "recovery=restart, warm"}


def measure(options: Options) -> list[Measure]:
    """Seconds, for `FAULTS` of each way; and whether the jobs end with the same weights."""
    times: dict[str, list[float]] = {}
    folder, faults = options.folder, 1 if options.quick else FAULTS
    calm = _job(folder / "lightning-calm", "auto", 0, faults)
    differ = []
    for way in TARGETS:
        place = _job(folder / f"lightning-{way}", way, faults, faults)
        differ.append(float(len(differences(calm / "final.pt", place / "final.pt"))))
        require(way, place, place / "ckpts")
        times[way] = [lost_between(place, fault, _step(fault) + 1, RANKS) for fault in range(faults)]
    found = [
        Measure(name=f"Lightning example, SIGKILL -> next completed step: {NAMES[way]}", unit="s", samples=samples,
                target=TARGETS[way])
        for way, samples in times.items()
    ]  # fmt: skip
    bits = "Lightning example, tensors that differ from the undisturbed job"
    return [*found, Measure(name=bits, unit="tensors", samples=differ, target=0.0)]


def _step(fault: int) -> int:
    return APART * (fault + 1)


def _job(place: Path, way: str, faults: int, room: int) -> Path:
    place.mkdir()
    number = "incarnation" if way == "auto" else "attempt"
    plan = [f"kind=sigkill,rank={n % RANKS},step={_step(n)},phase=backward,{number}={n}" for n in range(faults)]
    variables = {"LASTGASP_RECOVERY": way, "LASTGASP_FAULT": ";".join(plan), "LASTGASP_WARM": "auto"}
    variables |= {"LASTGASP_FAULT_LOG": str(place / "faults"), "LASTGASP_LOG": "debug", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lastgasp", "run", "--nproc-per-node", str(RANKS), str(SCRIPT)]
    command += ["--dir", str(place), "--steps", str(_step(room))]
    with gate(place, "log"):
        done = run_job(command, place / "log", timeout=LIMIT, environ=os.environ | variables)
    if done.returncode != 0 or done.left:
        raise RuntimeError(f"{place.name}: exit code {done.returncode}, {done.left}\n{done.output[-4000:]}")
    return place
