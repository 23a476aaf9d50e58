"""The Lightning example on 2 ranks: from the kill of a rank to the next completed step of both.

By turns with `recovery=auto` and `recovery=restart`, each rank killed in its backward pass; the clock starts when the
fault is fired, on the rank that is killed, and stops when the slower rank has completed the step that was disturbed.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from benchmarks.harness import Measure
from lastgasp.events import decode_incident
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import run_job
from lastgasp.testing.weights import differences

SCRIPT = Path(__file__).with_name("in_place_lightning_job.py")
READY = "a restart will fork its ranks from a warm process"
RANKS, APART, LIMIT = 2, 15, 600.0
TARGETS = {"auto": 1.0, "restart": 1.5}
NAMES = {"auto": "in place", "restart": "recovery=restart, warm"}


def lightning(folder: Path, faults: int) -> list[Measure]:
    """Seconds, for so many faults of each way; and whether the jobs end with the same weights."""
    times: dict[str, list[float]] = {}
    calm = _job(folder / "lightning-calm", "auto", 0, faults)
    differ = []
    for way in TARGETS:
        place = _job(folder / f"lightning-{way}", way, faults, faults)
        differ.append(float(len(differences(calm / "final.pt", place / "final.pt"))))
        times[way] = [_lost(place, fault) for fault in range(faults)]
        _require(way, place)
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
    over = threading.Event()
    gate = threading.Thread(target=_open, args=(place, over))
    gate.start()
    try:
        done = run_job(command, place / "log", timeout=LIMIT, environ=os.environ | variables)
    finally:
        over.set()
        gate.join()
    if done.returncode != 0 or done.left:
        raise RuntimeError(f"{place.name}: exit code {done.returncode}, {done.left}\n{done.output[-4000:]}")
    return place


def _open(place: Path, over: threading.Event) -> None:
    """Let the faults come once the warm process is ready."""
    while not over.wait(0.1):
        if (place / "log").exists() and READY in (place / "log").read_text(errors="replace"):
            (place / "go").touch()
            return


def _lost(place: Path, fault: int) -> float:
    at, wanted = int(str(read_log(place / "faults")[fault]["wall_ns"])), str(_step(fault) + 1)
    moments = []
    for rank in range(RANKS):
        rows = [line.split() for line in (place / f"steps-{rank}").read_text().splitlines()]
        moments.append(min(int(moment) for moment, step in rows if step == wanted and int(moment) > at))
    return (max(moments) - at) / 1e9


def _require(way: str, place: Path) -> None:
    found = [decode_incident(path.read_bytes()) for path in sorted((place / "ckpts/incidents").glob("*.json"))]
    wanted = ("replace", None) if way == "auto" else ("", "warm")
    if any((one.rung, one.restart or None) != wanted for one in found):
        what = [(one.rung, one.restart, one.not_in_place) for one in found]
        raise RuntimeError(f"{place.name}: {what}\n{(place / 'log').read_text()[-4000:]}")
