"""From a fault to the next completed step of all ranks, where the other processes stay.

The DDP job of in_place_job.py, 4 gloo ranks: rank 0 and the last rank are killed in the backward pass, and one rank
raises there, by turns and several times in one job. The clock starts just before the kill, on the rank that is killed,
and stops when the slowest rank has completed the step that was disturbed. Beside it, in turns, the same job with
`recovery=restart` (forked from the warm process), and bare torchrun with a checkpoint at hand, whose steps that have to
be done again are not counted. Faults come once the warm process is ready.

After each round the final weights of the jobs with faults are compared with those of one without.

What it costs to be able to: steps of the same job without faults, in one process by turns with `recovery="auto"` and
with `recovery="restart"`; the difference of the mean step within each round, of rank 0.

Where nvidia-resiliency-ext is installed, the same model in its in-process restart, too (nvrx_job.py): `pip install
--no-deps nvidia-resiliency-ext==0.4.1 defusedxml nvidia-ml-py`, the folder in PYTHONPATH. The world shrinks by the dead
rank there, the state is the user's own business, and rank 0 must not die.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Measure, Options
from benchmarks.in_place_times import gate
from lastgasp.events import Incident, decode_incident
from lastgasp.testing.jobs import run_job
from lastgasp.testing.weights import differences

SCRIPT = Path(__file__).with_name("in_place_job.py")
RANKS, LAST, LIMIT = 4, 3, 600.0
APART = 30
"""Steps between two faults."""
PARTS = ("the function is called again", "process group", "DDP", "session")
LAUNCHERS = {
    "bare": ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "9"],
    "lastgasp": ["-m", "lastgasp", "run"],
    "nvrx": ["-m", "benchmarks.nvrx_job"],
}
NVRX = "nvidia-resiliency-ext"
"""Whose row is there where it is installed."""
BARE = {"LASTGASP_DISABLE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
FIRST, OTHER, RAISES = ("kill", 0), ("kill", LAST), ("exception", 1)
Fault = tuple[str, int]
Times = dict[tuple[str, str, Fault], list[float]]
"""Seconds by way, part and fault."""


@dataclass(frozen=True)
class Scale:
    """How much is done.

    Args:
        rounds: each starts every job once.
        faults: of each kind in one job; restarts: the same where the job restarts.
        width: of the model.
        blocks, steps: of the cost per step.
    """

    rounds: int = 2
    faults: int = 5
    restarts: int = 1
    width: int = 1000
    blocks: int = 15
    steps: int = 60


def measure(options: Options) -> list[Measure]:
    """Seconds from the fault to the next completed step, and what a step costs."""
    scale = Scale(1, 1, 1, 64, 2, 10) if options.quick else Scale()
    jobs = _Jobs(options.folder, scale)
    for number in range(scale.rounds):
        jobs.round(number)
    return [*jobs.measures(), *_costs(jobs.costs())]


@dataclass
class _Jobs:
    folder: Path
    scale: Scale
    times: Times = field(default_factory=dict)
    differ: list[float] = field(default_factory=list)

    def round(self, number: int) -> None:
        """Every job once."""
        kinds = [FIRST, OTHER, RAISES]
        many = kinds * self.scale.faults
        some = [FIRST, OTHER] * self.scale.restarts
        calm = self.job(f"calm-{number}", "lastgasp", [], many)
        for way, faults in (("auto", many), ("restart", some)):
            place = self.job(f"{way}-{number}", "lastgasp", faults, many, LASTGASP_RECOVERY=way)
            self.differ.append(float(len(differences(calm / "final.pt", place / "final.pt"))))
            self.note(way, place, faults)
        self.note("bare", self.job(f"bare-{number}", "bare", some, some), some)
        for again in range(self.scale.faults if _version() else 0):
            ends = [OTHER, RAISES]  # one rank can be killed in a job
            self.note("nvrx", self.job(f"nvrx-{number}-{again}", "nvrx", ends, ends), ends)

    def job(self, name: str, launcher: str, faults: Sequence[Fault], room: Sequence[Fault], **more: str) -> Path:
        """Run one; `room`: faults for which it has steps."""
        place = self.folder / name
        place.mkdir()
        plan = ",".join(f"{APART * n}:{rank}:{kind}" for n, (kind, rank) in enumerate(faults, 1))
        options = ["--steps", str(APART * (len(room) + 1)), "--faults", plan]
        options += ["--bare", str(APART // 2)] if launcher == "bare" else []
        self.run(place, launcher, options, more)
        return place

    def run(self, place: Path, launcher: str, options: Sequence[str], more: dict[str, str]) -> None:
        """To the end."""
        command = [sys.executable, *LAUNCHERS[launcher]]
        command += ["--nproc-per-node", str(RANKS), str(SCRIPT)] if launcher != "nvrx" else []
        command += ["--dir", str(place), "--width", str(self.scale.width), *options]
        warm = {"LASTGASP_WARM": "auto", "LASTGASP_LOG": "debug"}
        environ = os.environ | {"OMP_NUM_THREADS": "1"} | (BARE if launcher == "bare" else warm) | more
        with gate(place, "log"):
            done = run_job(command, place / "log", timeout=LIMIT, environ=environ)
        if done.returncode != 0 or done.left:
            raise RuntimeError(f"{place.name}: exit code {done.returncode}, {done.left}\n{done.output[-4000:]}")

    def note(self, way: str, place: Path, faults: Sequence[Fault]) -> None:
        """Take the times of one job."""
        ours, ranks = way not in ("bare", "nvrx"), RANKS - (way == "nvrx")
        paths = sorted((place / "ckpts" / "incidents").glob("*.json")) if ours else []
        found = [decode_incident(path.read_bytes()) for path in paths]
        if ours:
            _require(way, faults, found, place)
        for number, fault in enumerate(faults):
            step = APART * (number + 1)
            at = int((place / f"fault-{step}").read_text())
            parts = {part: _first(place, ranks, part, at) for part in PARTS} if way == "auto" else {}
            parts |= {"": _first(place, ranks, str(step), at)}
            if way == "auto" and (released := found[number].phases.released) is not None:
                parts = {"decided": released} | parts
            for part, moment in parts.items():
                self.times.setdefault((way, part, fault), []).append((moment - at) / 1e9)

    def measures(self) -> list[Measure]:
        """What was found."""
        names = {FIRST: "SIGKILL of rank 0", OTHER: "SIGKILL of the last rank", RAISES: "exception of one rank"}
        ways = {"auto": "in place", "restart": "recovery=restart, warm", "bare": "bare torchrun",
                "nvrx": f"{NVRX} {_version()}, in process, without the dead rank"}  # fmt: skip
        targets = {FIRST: 0.5, OTHER: 0.5, RAISES: 0.15}
        found = []
        for (way, part, fault), samples in self.times.items():
            name = f"{names[fault]} -> {part or 'next completed step'}: {ways[way]}"
            target = targets[fault] if (way, part) == ("auto", "") else None
            found.append(Measure(name=name, unit="s", samples=samples, target=target))
        bits = "tensors that differ from the undisturbed job, each job with faults"
        return [*found, Measure(name=bits, unit="tensors", samples=self.differ, target=0.0)]

    def costs(self) -> dict[str, list[tuple[float, float]]]:
        """Wall and CPU seconds of a step, by way."""
        place = self.folder / "costs"
        place.mkdir()
        options = ["--steps", str(self.scale.steps), "--rounds", str(self.scale.blocks)]
        self.run(place, "lastgasp", options, {})
        costs: dict[str, list[tuple[float, float]]] = json.loads((place / "costs.json").read_text())
        return costs


def _require(way: str, faults: Sequence[Fault], found: Sequence[Incident], place: Path) -> None:
    wanted = [{"kill": "replace", "exception": "retry"}[kind] if way == "auto" else "" for kind, _ in faults]
    restarts = {incident.restart for incident in found}
    if [incident.rung for incident in found] != wanted or (way == "restart" and restarts != {"warm"}):
        what = [(incident.rung, incident.restart, incident.not_in_place) for incident in found]
        raise RuntimeError(f"{place.name}: {what}\n{(place / 'log').read_text()[-4000:]}")


def _version() -> str:
    try:
        return importlib.metadata.version(NVRX)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _first(place: Path, ranks: int, what: str, after: int) -> int:
    """When the slowest rank had first done it after a fault."""
    return max(_of_rank(place, rank, what, after) for rank in range(ranks))


def _of_rank(place: Path, rank: int, what: str, after: int) -> int:
    rows = [line.split(" ", 1) for line in (place / f"steps-{rank}").read_text().splitlines()]
    moments = [int(at) for at, done in rows if done == what and int(at) > after]
    if not moments:
        raise RuntimeError(f"{place.name}: rank {rank} has not come to: {what}")
    return min(moments)


def _costs(found: Mapping[str, Sequence[tuple[float, float]]]) -> list[Measure]:
    names = ("wall", "CPU of the training thread")
    measures = []
    for which, name in enumerate(names):
        base = [cost[which] * 1e6 for cost in found["restart"]]
        more = [auto[which] * 1e6 - without for auto, without in zip(found["auto"], base, strict=True)]
        measures += [
            Measure(name=f"step with recovery=restart, {name}", unit="us", samples=base),
            Measure(name=f"being able to recover in place adds, {name}", unit="us", samples=more),
        ]
    return measures
