"""The drop-in `mindio_ttp`: from a kill to the first call of a save handler, and what a step costs.

The job of tests/support/mindio: four gloo ranks, two for each half of the optimizer's state, and an adapter of
MindSpeed-LLM's shape. A rank is killed in the backward pass, each in turn, once in every attempt of the job. The clock
starts just before the kill, on the rank that is killed. Before the save handler come the stop handler, the main
threads' way out of their collectives, and the clean handler, as in the measurement of MindIO TFT
(docs/facts/mindio_tft.md §17).

A step: `tft_start_updating_os` and `tft_end_updating_os` of a protected rank, and nothing in between.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Measure, Options
from lastgasp.testing.faults import read_log

ROOT = Path(__file__).parents[1]
JOB = Path(__file__).with_name("mindio_step_job.py")
RANKS, JOBS, KILLS, EVERY, LIMIT = 4, 2, 10, 2, 180.0
TFT = "MindIO TFT: {} ms (median of 5, 4 ranks, 2 busy cores)"
TFT_STEP = "MindIO TFT: about 3 us"


def measure(options: Options) -> list[Measure]:
    """Milliseconds from the kill to the first stop and to the first save; microseconds of a step."""
    jobs, kills = (1, 1) if options.quick else (JOBS, KILLS)
    found = [once(options.folder / f"job-{number}", kills) for number in range(jobs)]
    stops, saves = ([sample for pair in found for sample in pair[which]] for which in (0, 1))
    return [
        Measure(name="drop-in: SIGKILL of a rank -> first stop handler", unit="ms", samples=stops,
                neighbour=TFT.format("10 851")),
        Measure(name="drop-in: SIGKILL of a rank -> first save handler", unit="ms", samples=saves, target=50.0,
                neighbour=TFT.format("10 923")),
        Measure(name="drop-in: tft_start_updating_os + tft_end_updating_os", unit="us", samples=steps(options.quick),
                target=2.0, neighbour=TFT_STEP),
    ]  # fmt: skip


def once(folder: Path, kills: int) -> tuple[list[float], list[float]]:
    """One job with so many kills, one in each attempt; to the first stop and to the first save of each."""
    sys.path.append(str(ROOT / "tests"))
    try:
        from support.mindio.job import DropInJob
    finally:
        sys.path.remove(str(ROOT / "tests"))
    folder.mkdir()
    faults = [
        f"kind=sigkill,rank={n % RANKS},step={EVERY * (n + 1)},phase=backward,attempt={n}" for n in range(kills)
    ]
    job = DropInJob(folder, RANKS, steps=EVERY * (kills + 1))
    done = job.run(";".join(faults), LASTGASP_WARM="auto")
    if not done.ok:
        raise RuntimeError(f"{folder.name}: exit code {done.returncode}, {done.left}\n{done.output[-4000:]}")
    killed = {int(str(fault["attempt"])): int(str(fault["wall_ns"])) for fault in read_log(folder / "fired")}
    stops, saves = list[float](), list[float]()
    for attempt, at in sorted(killed.items()):
        for what, samples in (("stop", stops), ("save", saves)):
            first = min(note.at_ns for note in job.notes() if (note.attempt, note.what) == (attempt, what))
            samples.append((first - at) / 1e6)
    return stops, saves


def steps(quick: bool) -> list[float]:
    """Microseconds of a pair of calls, in a process of its own: this one has no package of that name."""
    paths = [ROOT / "plugins/mindio", ROOT / "plugins/mindio/lastgasp_mindio/dropin"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(JOB), "2" if quick else "101"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-4000:])
    return [float(line) for line in done.stdout.split()]
