"""From the kill to the first new step: `lastgasp run` against bare torchrun with a checkpoint at hand.

Two gloo ranks, rank 0 is killed in the backward pass of a step between two periodic checkpoints. The clock
starts when the fault is written to the log of the fault kit, just before the kill, and ends with the first
completed step of the restarted job. Most of it is the import of torch and Lightning, which is the same in
both and takes several times as long on a busy machine, so the difference is also given without it. Bare
torchrun does not save: it goes back to the periodic checkpoint, and the steps that it has to do again are
not counted against it.

torch 2.13 gives a restarted attempt the store of the dead one, and the restart then often fails; bare
torchrun runs with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, which avoids that, so that it gets its best.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Measure, Options, interleave
from lastgasp.events import decode_incident
from lastgasp.testing.faults import ENV_FAULT, ENV_LOG, read_log
from lastgasp.testing.jobs import run_job

SCRIPT = Path(__file__).with_name("restart_job.py")
ROUNDS, STEPS, EVERY, FAULT_STEP = 7, 30, 10, 15
WIDTH = 1448
"""Gives a checkpoint of 25 MB."""
TARGET_S = 0.5
LIMIT = 180.0
LAUNCHERS = {
    "bare": ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"],
    "lastgasp": ["-m", "lastgasp", "run"],
}
BARE = {"LASTGASP_DISABLE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

COLD = {"LASTGASP_WARM": "off"}
"""bench_warm has the other; here the fault comes before a warm process could be ready."""


def measure(options: Options) -> list[Measure]:
    """Seconds from the kill to the first new step of both, and their difference within each round."""
    rounds, width = (1, 64) if options.quick else (ROUNDS, WIDTH)
    jobs = _Jobs(options.folder, width)
    variants: dict[str, Callable[[], float]] = {
        "bare": lambda: jobs.restart("bare"),
        "lastgasp": lambda: jobs.restart("lastgasp"),
    }
    seconds = interleave(variants, rounds)
    more = _more(seconds)
    return [
        Measure(name="bare torchrun: kill -> first step after the restart", unit="s", samples=seconds["bare"]),
        Measure(name="lastgasp run: the same, the gasp included", unit="s", samples=seconds["lastgasp"]),
        Measure(name="lastgasp run minus bare torchrun", unit="s", samples=more, target=TARGET_S),
        Measure(
            name="lastgasp run minus bare torchrun, without importing torch and Lightning",
            unit="s",
            samples=_more(jobs.net),
        ),
        Measure(name="kill -> gasp committed", unit="s", samples=jobs.saved),
        Measure(name="bare torchrun: steps to do again", unit="steps", samples=jobs.again["bare"]),
        Measure(name="lastgasp run: steps to do again", unit="steps", samples=jobs.again["lastgasp"], target=0.0),
    ]


@dataclass
class _Jobs:
    """Runs jobs with one kill each; remembers what else they tell."""

    folder: Path
    width: int
    saved: list[float] = field(default_factory=list)
    again: dict[str, list[float]] = field(default_factory=lambda: {"bare": [], "lastgasp": []})
    net: dict[str, list[float]] = field(default_factory=lambda: {"bare": [], "lastgasp": []})

    def restart(self, kind: str) -> float:
        """Seconds from the kill to the first step of the restarted job."""
        place = self.folder / f"{kind}-{len(self.again[kind])}"
        place.mkdir()
        log, ckpts = place / "fault.log", place / "ckpts"
        command = [sys.executable, *LAUNCHERS[kind], "--nproc-per-node", "2", str(SCRIPT), "--dir", str(ckpts),
                   "--width", str(self.width), "--steps", str(STEPS), "--every", str(EVERY)]  # fmt: skip
        command += ["--lastgasp"] if kind == "lastgasp" else []
        environ = os.environ | {"OMP_NUM_THREADS": "1", ENV_LOG: str(log)} | (BARE if kind == "bare" else COLD)
        environ[ENV_FAULT] = f"kind=sigkill,rank=0,step={FAULT_STEP},phase=backward"
        done = run_job(command, place / "log", timeout=LIMIT, environ=environ)
        if done.returncode != 0:
            raise RuntimeError(f"{kind}: exit code {done.returncode}\n{done.output[-4000:]}")
        [fault] = read_log(log)
        killed = int(str(fault["wall_ns"]))
        step, at, imports = _restarted(done.output)
        self.again[kind].append(FAULT_STEP + 1 - step)
        self.net[kind].append((at - killed - imports) / 1e9)
        if kind == "lastgasp":
            self.saved.append((_committed(ckpts) - killed) / 1e9)
        return (at - killed) / 1e9


def _restarted(output: str) -> tuple[int, int, int]:
    """Number and time of the first step after the restart, and how long the imports took; all times in ns."""
    found = re.search(
        r"begun attempt ([1-9]\d*) at (\d+).*imported attempt \1 at (\d+).*first step (\d+) of attempt \1 at (\d+)",
        output,
        re.S,
    )
    if found is None:
        raise RuntimeError(f"the job was not restarted\n{output[-4000:]}")
    _, begun, imported, step, at = map(int, found.groups())
    return step, at, imported - begun


def _more(seconds: dict[str, list[float]]) -> list[float]:
    return [a - b for a, b in zip(seconds["lastgasp"], seconds["bare"], strict=True)]


def _committed(directory: Path) -> int:
    [path] = (directory / "incidents").glob("*.json")
    committed = decode_incident(path.read_bytes()).phases.committed
    if committed is None:
        raise RuntimeError(f"nothing was saved: see {path}")
    return committed
