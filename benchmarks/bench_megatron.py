"""What protection costs a Megatron training: added time per iteration, the gasp of its shards, verified loading.

Everything runs in the real `megatron.training` on a CPU. The added time is taken in one process under `lastgasp run`:
blocks of iterations alternate with all hooks in place and with all of them taken out, and a pair's difference is one
sample. Two models: one whose iteration takes about 50 ms, and a tiny one, where the hooks' own time can be told from
noise. The CPU time of lastgasp's own threads is given as well, since they run in both kinds of blocks.

A gasp is compared with `torch.save` of the same content with fsync: the whole state on one rank, and the distributed
optimizer's state in two slices that two ranks bring together.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import Measure, Options, interval, paired

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from support.megatron import place  # noqa: E402
from support.megatron.job import DIST_OPT, GptJob  # noqa: E402

SCRIPT = Path(__file__).with_name("megatron_job.py")
LIMIT = 1500.0
"""Seconds for one of the four jobs."""
TARGET_PERCENT, ITERATION_MS = 0.5, 50.0
PAIRS, LENGTH = 150, 12
TINY_PAIRS, TINY_LENGTH = 200, 30
"""Pairs of blocks, and iterations of a block."""
ROUNDS = 7
TINY = "--num-layers 1 --hidden-size 16 --ffn-hidden-size 16 --micro-batch-size 1 --global-batch-size 2"
MIDDLE = """--num-layers 4 --hidden-size 128 --ffn-hidden-size 512 --seq-length 128 --max-position-embeddings 128
--micro-batch-size 4 --global-batch-size 4"""
LARGE = "--num-layers 6 --hidden-size 1024 --ffn-hidden-size 4096"
"""About 1 GB of state."""
Samples = dict[str, list[float]]


def measure(options: Options) -> list[Measure]:
    """The complete content.

    Raises:
        RuntimeError: Megatron is not installed, or a job failed.
    """
    if place.missing():
        raise RuntimeError(place.missing())
    quick = options.quick
    shape = (3, 6) if quick else (PAIRS, LENGTH)
    middle = _added(options.folder / "middle", MIDDLE, shape)
    tiny = _added(options.folder / "tiny", TINY, (3, 6) if quick else (TINY_PAIRS, TINY_LENGTH))
    model, rounds = (TINY, 2) if quick else (LARGE, ROUNDS)
    whole = _job(options.folder / "whole", f"--bf16 {model}", "gasp", (rounds, rounds))
    slices = _job(options.folder / "slices", f"--bf16 {DIST_OPT} {model}", "gasp", (rounds, 0), ranks=2)
    return [*_of_middle(middle), *_of_tiny(tiny), *_of_saves("whole state", whole), *_of_saves("two slices", slices),
            *_of_loads(whole)]  # fmt: skip


def _added(folder: Path, model: str, shape: tuple[int, int]) -> Samples:
    iterations = 2 * shape[0] * shape[1] + 1
    flags = f"--bf16 {model} --log-interval 1000 --train-iters {iterations} --lr-decay-iters {iterations}"
    return _job(folder, flags, "added", shape, last=iterations)


def _job(
    folder: Path, flags: str, mode: str, shape: tuple[int, int], *, ranks: int = 1, last: int = 1000
) -> Samples:
    """Run one; `last` is more than it trains where it shall not end by itself."""
    folder.mkdir()
    if mode == "gasp":
        flags += " --train-iters 2 --lr-decay-iters 2 --lr-warmup-iters 1"
    job = GptJob(folder=folder, ranks=ranks, flags=flags, last=last, every=last + 1)
    job = replace(job, script=SCRIPT, launcher="run" if mode == "added" else "torchrun")
    samples = folder / "samples.json"
    own = {"BENCH_MODE": mode, "BENCH_SHAPE": f"{shape[0]},{shape[1]}", "BENCH_OUT": str(samples), "LOSSES_DIR": ""}
    done = job.run(own, timeout=LIMIT)
    if not done.ok or not samples.exists():
        raise RuntimeError(f"the job in {folder} failed:\n{done.output[-4000:]}")
    found: Samples = json.loads(samples.read_text())
    return found


def _percent(samples: Samples, clock: str) -> list[float]:
    return [100 * (on / off - 1) for on, off in zip(samples[f"on {clock}"], samples[f"off {clock}"], strict=True)][1:]


def _of_middle(samples: Samples) -> list[Measure]:
    found = []
    for clock, name in (("wall", "wall"), ("cpu", "CPU of the training thread")):
        added, without = _percent(samples, clock), _scaled(samples[f"off {clock}"], 1e6)
        found += [
            Measure(name=f"{name}: iteration without lastgasp", unit="ms", samples=without),
            Measure(name=f"{name}: lastgasp adds to it", unit="%", samples=added, target=TARGET_PERCENT),
            *_interval(f"{name}: 95 % interval of this median", "%", added, TARGET_PERCENT),
        ]
    share = [100 * control / wall for control, wall in zip(samples["on control"], samples["off wall"], strict=True)]
    return [*found, Measure(name="CPU of lastgasp's own threads", unit="%", samples=share[1:], target=TARGET_PERCENT)]


def _of_tiny(samples: Samples) -> list[Measure]:
    """What is added, in us and as part of 50 ms."""
    pairs = zip(samples["on wall"], samples["off wall"], strict=True)
    added = [(on - off) / 1e3 for on, off in pairs][1:]
    share = [100 * us / (1e3 * ITERATION_MS) for us in added]
    return [
        Measure(name="tiny model: iteration without lastgasp", unit="ms", samples=_scaled(samples["off wall"], 1e6)),
        Measure(name="tiny model: lastgasp adds", unit="us", samples=added),
        *_interval("tiny model: 95 % interval of this median", "us", added, None),
        Measure(name=f"tiny model: as part of {ITERATION_MS:g} ms", unit="%", samples=share, target=TARGET_PERCENT),
    ]


def _interval(name: str, unit: str, samples: Sequence[float], target: float | None) -> list[Measure]:
    low, high = interval(samples)
    return [
        Measure(name=f"{name}, from", unit=unit, samples=[low]),
        Measure(name=f"{name}, to", unit=unit, samples=[high], target=target),
    ]


def _of_saves(what: str, samples: Samples) -> list[Measure]:
    size = f"{what}, {statistics.median(samples['bytes']) / 1e6:.3g} MB"
    return [
        Measure(name=f"{size}: torch.save + fsync", unit="s", samples=samples["torch.save"]),
        Measure(name=f"{size}: gasp, published", unit="s", samples=samples["gasp"]),
        paired(f"{what}: gasp / torch.save", samples, "gasp", "torch.save", 1.0),
    ]


def _of_loads(samples: Samples) -> list[Measure]:
    found = []
    for temperature in ("cold", "warm"):
        plain, mine = f"load {temperature}", f"verify + load {temperature}"
        found += [Measure(name=f"{name}: Megatron's files", unit="s", samples=samples[name]) for name in (plain, mine)]
        found.append(paired(f"verify + load / load, {temperature}", samples, mine, plain, 1.3))
    return found


def _scaled(samples: Sequence[float], by: float) -> list[float]:
    return [value / by for value in samples]
