"""A tiny GPT of Megatron's on 2 ranks, 2 instances of the distributed optimizer: from the kill to the next iteration.

By turns with `recovery=auto` and `recovery=restart`, each rank killed in its backward pass; the clock starts when the
fault is fired, on the rank that is killed, and stops when the slower rank has completed the iteration that was
disturbed. The numbers that all jobs compute in each iteration are compared with those of one without faults.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import Measure, Options
from benchmarks.in_place_times import gate, lost_between, require

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from support.megatron import place  # noqa: E402
from support.megatron.job import TWO_INSTANCES, GptJob  # noqa: E402

SCRIPT = Path(__file__).with_name("in_place_megatron_job.py")
RANKS, APART, FAULTS, LIMIT = 2, 8, 6, 600.0
TARGETS = {"auto": 2.0, "restart": None}
NAMES = {"auto": "in place", "restart": "recovery=restart, warm"}


def measure(options: Options) -> list[Measure]:
    """Seconds, for `FAULTS` of each way; and how many losses differ.

    Raises:
        RuntimeError: Megatron is not installed, a job failed, or was not answered as it should be.
    """
    if place.missing():
        raise RuntimeError(place.missing())
    folder, faults = options.folder, 1 if options.quick else FAULTS
    calm = _job(folder / "megatron-calm", "auto", 0, faults)
    times: dict[str, list[float]] = {}
    differ = []
    for way in TARGETS:
        job = _job(folder / f"megatron-{way}", way, faults, faults)
        require(way, job.folder, job.checkpoints)
        times[way] = [lost_between(job.folder, n, _step(n) + 1, RANKS) for n in range(faults)]
        differ.append(float(_differ(calm, job)))
    found = [
        Measure(name=f"Megatron, 2 instances, SIGKILL -> next completed iteration: {NAMES[way]}", unit="s",
                samples=samples, target=TARGETS[way])
        for way, samples in times.items()
    ]  # fmt: skip
    losses = "Megatron, iterations of a rank whose losses differ from the undisturbed job"
    return [*found, Measure(name=losses, unit="iterations", samples=differ, target=0.0)]


def _step(fault: int) -> int:
    return APART * (fault + 1)


def _job(folder: Path, way: str, faults: int, room: int) -> GptJob:
    last = _step(room)
    flags = f"--bf16 {TWO_INSTANCES} --train-iters {last} --lr-decay-iters {last}"
    job = GptJob(folder=folder, ranks=RANKS, flags=flags, last=last, every=10 * last, launcher="run")
    job = replace(job, script=SCRIPT, launch_options=("--framework", "megatron"))
    folder.mkdir()
    number = "incarnation" if way == "auto" else "attempt"
    plan = [f"kind=sigkill,rank={n % RANKS},step={_step(n)},phase=backward,{number}={n}" for n in range(faults)]
    variables = {"LASTGASP_RECOVERY": way, "LASTGASP_FAULT": ";".join(plan), "LASTGASP_WARM": "auto"}
    variables |= {"LASTGASP_FAULT_LOG": str(folder / "faults"), "LASTGASP_LOG": "debug", "HOLD": str(folder / "go")}
    with gate(folder, "log-*"):
        done = job.run(variables | {"TIMES_DIR": str(folder)}, timeout=LIMIT)
    if not done.ok or done.left:
        raise RuntimeError(f"{folder.name}: exit code {done.returncode}, {done.left}\n{done.output[-4000:]}")
    return job


def _differ(calm: GptJob, job: GptJob) -> int:
    expected, found = calm.losses(), job.losses()
    # The iteration that was cut short and the one that was done again are one in the log of a process.
    return sum(
        key not in found or found[key][-1][-len(times[0]) :] != times[0] for key, times in expected.items()
    )
