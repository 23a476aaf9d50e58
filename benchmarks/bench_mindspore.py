"""What protection costs a MindSpore training: added time per step, the gasp, verified loading.

Everything runs in the real MindSpore on a CPU, in one process each. The added time has two parts. The callbacks: blocks
of steps alternate with them at work and with them returning at once, and a pair's difference is one sample. The two
counters in the compiled step (`gate.py`): one network with them and one without take turns. Each is taken on a model
whose step takes about 50 ms, and on a tiny one, where it can be told from noise.

A gasp is compared with `mindspore.save_checkpoint` of the same parameters and fsync, verified loading with
`mindspore.load_checkpoint` alone.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Measure, Options, interval, paired

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from support.mindspore import place  # noqa: E402
from support.mindspore.job import Job  # noqa: E402

SCRIPT = Path(__file__).with_name("mindspore_job.py")
LIMIT = 900.0
"""Seconds for one of the jobs."""
TARGET_PERCENT, STEP_MS = 1.0, 50.0
MIDDLE, TINY, LARGE = (1024, 4, 64), (8, 1, 4), (3072, 5, 4)
"""Width, layers, batch; the large one has 570 MB of state."""
PAIRS, LENGTH = 100, 12
TINY_PAIRS, TINY_LENGTH = 150, 60
ROUNDS = 7
Samples = dict[str, list[float]]


def measure(options: Options) -> list[Measure]:
    """The complete content.

    Raises:
        RuntimeError: MindSpore is not installed, or a job failed.
    """
    if place.missing():
        raise RuntimeError(place.missing())
    quick = options.quick
    middle, tiny = ((3, 6), (3, 6)) if quick else ((PAIRS, LENGTH), (TINY_PAIRS, TINY_LENGTH))
    large, rounds = (TINY, 2) if quick else (LARGE, ROUNDS)
    found = []
    for name, model, shape in (("middle", TINY if quick else MIDDLE, middle), ("tiny", TINY, tiny)):
        added = _job(options.folder / f"{name}-added", "added", (*shape, *model))
        gate = _job(options.folder / f"{name}-gate", "gate", (*shape, *model))
        found += _of_steps(name, added, gate)
    gasp = _job(options.folder / "gasp", "gasp", (rounds, 0, *large))
    return [*found, *_of_saves(gasp), *_of_loads(gasp)]


def _job(folder: Path, mode: str, shape: Sequence[int]) -> Samples:
    folder.mkdir()
    job = Job(folder=folder, ranks=1, launcher="start", script=SCRIPT)
    samples = folder / "samples.json"
    own = {"BENCH_MODE": mode, "BENCH_SHAPE": ",".join(map(str, shape)), "BENCH_OUT": str(samples)}
    done = job.run(own, timeout=LIMIT)
    if not done.ok or not samples.exists():
        raise RuntimeError(f"the job in {folder} failed:\n{done.output[-4000:]}")
    found: Samples = json.loads(samples.read_text())
    return found


def _of_steps(model: str, added: Samples, gate: Samples) -> list[Measure]:
    """What both parts add, in us and as part of 50 ms."""
    base = [ns / 1e6 for ns in added["off wall"]]
    found = [Measure(name=f"{model} model: step without lastgasp", unit="ms", samples=base)]
    parts = {
        "callbacks add, wall": [(a - b) / 1e3 for a, b in zip(added["on wall"], added["off wall"], strict=True)],
        "callbacks add, CPU": [(a - b) / 1e3 for a, b in zip(added["on cpu"], added["off cpu"], strict=True)],
        "counters in the graph add, wall": [1e6 * (a - b) for a, b in zip(gate["gated"], gate["plain"], strict=True)],
    }
    for name, samples in parts.items():
        low, high = interval(samples)
        found += [
            Measure(name=f"{model} model: {name}", unit="us", samples=samples),
            Measure(name=f"{model} model: {name}, 95 % interval of the median, from", unit="us", samples=[low]),
            Measure(name=f"{model} model: {name}, 95 % interval of the median, to", unit="us", samples=[high]),
        ]
    both = sum(statistics.median(parts[name]) for name in parts if name.endswith("wall"))
    name = f"{model} model: both, as part of {STEP_MS:g} ms"
    return [*found, Measure(name=name, unit="%", samples=[both / (10 * STEP_MS)], target=TARGET_PERCENT)]


def _of_saves(samples: Samples) -> list[Measure]:
    size = f"{statistics.median(samples['bytes']) / 1e6:.3g} MB"
    return [
        Measure(name=f"{size}: save_checkpoint + fsync", unit="s", samples=samples["own"]),
        Measure(name=f"{size}: gasp, published", unit="s", samples=samples["gasp"]),
        paired("gasp / save_checkpoint + fsync", samples, "gasp", "own", 1.0),
    ]


def _of_loads(samples: Samples) -> list[Measure]:
    found = []
    for temperature in ("cold", "warm"):
        plain, mine = f"load {temperature}", f"verify + load {temperature}"
        found += [Measure(name=f"{name}: load_checkpoint", unit="s", samples=samples[name]) for name in (plain, mine)]
        found.append(paired(f"verify + load / load, {temperature}", samples, mine, plain, 1.3))
    return found
