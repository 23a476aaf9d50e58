"""What trust costs: a verified durable save, and verification before a load, against torch alone.

    python benchmarks/bench_checkpoint.py --gb 1 --rounds 5 --dir /data/tmp --json result.json

Variants of one comparison run in turn within each round, in changing order, so that a drifting disk hits
all of them. `cold` drops the file from the page cache with posix_fadvise before each run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lastgasp.checkpoint import Provenance, SingleFile, Staged, verify
from lastgasp.pytorch.io import load_verified, save_verified, without_crc32

LAYOUT = SingleFile()
Results = dict[str, list[float]]


def make_state(gigabytes: float) -> dict[str, torch.Tensor]:
    """A model-like state: 64 tensors of float32 that fill `gigabytes`."""
    count = int(gigabytes * 1e9 / 4 / 64)
    return {f"layer{number}.weight": torch.randn(count) for number in range(64)}


def save_plain(state: dict[str, torch.Tensor], path: Path) -> None:
    """torch.save and fsync: durable, not atomic, not verifiable."""
    with path.open("wb") as file:
        torch.save(state, file)
    _sync(path)


def save_plain_path(state: dict[str, torch.Tensor], path: Path) -> None:
    """torch.save(path), the usual call, and fsync."""
    torch.save(state, path)
    _sync(path)


def save_plain_without_crc(state: dict[str, torch.Tensor], path: Path) -> None:
    """As above without torch's CRC-32."""
    with without_crc32():
        save_plain_path(state, path)


def save_lastgasp(state: dict[str, torch.Tensor], path: Path) -> None:
    """Verified, atomic and durable."""
    with Staged(path, LAYOUT) as staged:
        save_verified(state, staged)
        staged.publish(Provenance(format="torch", step=1, kind="periodic", job="bench"))


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def drop_cache(path: Path) -> None:
    """Write the file back and drop its pages, so that the next read comes from the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` took; its result is freed outside of the clock."""
    begun = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - begun
    del result
    return seconds


def interleave(variants: dict[str, Callable[[], object]], rounds: int, before: Callable[[], object]) -> Results:
    """Run every variant once per round, in an order that rotates."""
    results: Results = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            before()
            results[name].append(timed(variants[name]))
    return results


def bench_save(state: dict[str, torch.Tensor], folder: Path, rounds: int) -> Results:
    """Seconds per save; old files are removed before each run."""
    path = folder / "step-1.ckpt"

    def clean() -> None:
        for old in folder.glob("step-1.ckpt*"):
            old.unlink()
        os.sync()

    return interleave(
        {
            "torch.save(path) + fsync": lambda: save_plain_path(state, path),
            "torch.save without crc + fsync": lambda: save_plain_without_crc(state, path),
            "lastgasp verified save": lambda: save_lastgasp(state, path),
        },
        rounds,
        clean,
    )


def bench_load(folder: Path, rounds: int, cold: bool) -> Results:
    """Seconds per load of the checkpoint that `bench_save` left or that is written now."""
    path = folder / "step-1.ckpt"
    return interleave(
        {
            "torch.load": lambda: torch.load(path),
            "lastgasp verify + torch.load": lambda: load_verified(path),
            "lastgasp verify alone": lambda: verify(path, LAYOUT),
        },
        rounds,
        (lambda: drop_cache(path)) if cold else (lambda: path.read_bytes()[:0]),
    )


def show(title: str, results: Results, gigabytes: float) -> dict[str, dict[str, float]]:
    """Print a table; returns the numbers. Ratios are to the first variant."""
    table = Table(title=title)
    for column in ("variant", "median s", "best s", "GB/s (median)", "ratio of medians", "median of ratios"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    base = next(iter(results.values()))
    numbers = {}
    for name, seconds in results.items():
        median = statistics.median(seconds)
        ratio = median / statistics.median(base)
        paired = statistics.median(a / b for a, b in zip(seconds, base, strict=True))
        cells = (median, min(seconds), gigabytes / median, ratio, paired)
        table.add_row(name, *(f"{cell:.3f}" for cell in cells))
        keys = ("median_s", "best_s", "gb_per_s", "ratio", "paired_ratio")
        numbers[name] = dict(zip(keys, cells, strict=True))
    Console().print(table)
    return numbers


def main() -> None:
    """Parse the command line, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the checkpoint in 1e9 bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None, help="where to write; on the disk to be measured")
    parser.add_argument("--json", type=Path, default=None, help="where to put the numbers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="lastgasp-bench-") as name:
        folder = Path(name)
        state = make_state(options.gb)
        numbers = {"save": show("save", bench_save(state, folder, options.rounds), options.gb)}
        save_lastgasp(state, folder / "step-1.ckpt")
        del state
        for title, cold in (("load, cold", True), ("load, warm", False)):
            numbers[title] = show(title, bench_load(folder, options.rounds, cold), options.gb)
    if options.json:
        options.json.write_text(json.dumps({"gb": options.gb, "rounds": options.rounds, **numbers}, indent=2))


if __name__ == "__main__":
    main()
