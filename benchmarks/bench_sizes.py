"""How the rate of a verified save and of a verified load depends on the checkpoint's size, beside torch alone.

The same comparison as `checkpoint`, from 1 MB to 1 GB: below some size the fixed costs of a commit (fsync of files and
directories, renames) weigh most, above it the disk and the digests do. Loads are warm: cold ones tell of the disk.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.bench_checkpoint import bench_load, bench_save, make_state, save_lastgasp
from benchmarks.harness import Measure, Options

SIZES, ROUNDS = (1, 10, 100, 1000), 5
"""MB."""


def measure(options: Options) -> list[Measure]:
    """Seconds of each way to save and to load, for each size."""
    sizes, rounds = ((1, 10), 2) if options.quick else (SIZES, ROUNDS)
    measures: list[Measure] = []
    for size in sizes:
        state, path = make_state(size / 1000), options.folder / "step-1.ckpt"
        measures += _measures(f"save {size} MB", bench_save(state, path, rounds))
        save_lastgasp(state, path)
        del state
        measures += _measures(f"load {size} MB, warm", bench_load(path, rounds, cold=False))
    return measures


def _measures(title: str, samples: Mapping[str, list[float]]) -> list[Measure]:
    in_ms = {name: [1e3 * one for one in seconds] for name, seconds in samples.items()}
    return [Measure(name=f"{title}: {name}", unit="ms", samples=ms) for name, ms in in_ms.items()]
