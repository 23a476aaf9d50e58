"""What all benchmarks share: measures, the machine, a table, a JSON document."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

VERSION = 1
"""Of the JSON document."""
PACKAGES = ("lastgasp", "torch", "lightning", "msgspec", "xxhash")


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One quantity, with every sample that was taken of it.

    Attributes:
        name, unit: what and in what; a ratio or a difference is taken within each round, then the median.
        samples: in the order in which they were taken.
        target: what the median should not exceed; None for a quantity that is only there to compare with.
        neighbour: what another package needs for the same, with the source of the number; empty for none.
    """

    name: str
    unit: str
    samples: Sequence[float]
    target: float | None = None
    neighbour: str = ""

    @property
    def median(self) -> float:
        """Of all samples."""
        return statistics.median(self.samples)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        return None if self.target is None else self.median <= self.target

    def as_dict(self) -> dict[str, Any]:
        """For the JSON document."""
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.samples),
            "max": max(self.samples),
            "n": len(self.samples),
            "target": self.target,
            "met": self.met,
            "neighbour": self.neighbour,
            "samples": list(self.samples),
        }


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a benchmark is given.

    Attributes:
        quick: only show that it works: few rounds, small data. Its numbers mean nothing.
        folder: an empty directory of its own, on the disk that is to be measured.
    """

    quick: bool
    folder: Path


Bench = Callable[[Options], list[Measure]]


def paired(name: str, samples: Mapping[str, Sequence[float]], mine: str, base: str, target: float) -> Measure:
    """The ratio of two quantities that were measured side by side."""
    ratios = [a / b for a, b in zip(samples[mine], samples[base], strict=True)]
    return Measure(name=name, unit="ratio", samples=ratios, target=target)


def interleave(
    variants: Mapping[str, Callable[[], float]], rounds: int, before: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Take one sample of every variant per round, in an order that rotates, so that a drift hits all of them.

    Args:
        variants: each returns its sample.
        rounds: samples of each.
        before: called before each sample.
    """
    results: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            before()
            results[name].append(variants[name]())
    return results


def drop_cache(path: Path) -> None:
    """Write the file back and drop its pages, so that the next read comes from the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def warm_cache(path: Path) -> None:
    """Read the file once."""
    path.read_bytes()


def timed(action: Callable[[], object]) -> float:
    """Seconds that `action` took; its result is freed outside of the clock."""
    begun = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - begun
    del result
    return seconds


def interval(samples: Sequence[float], resamples: int = 4000, seed: int = 1) -> tuple[float, float]:
    """Bootstrap 95 % confidence interval of the median."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(samples, k=len(samples))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def run(name: str, bench: Bench, options: Options) -> dict[str, Any]:
    """Run one benchmark, print its table, return its document."""
    before = machine()
    measures = bench(options)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(name, measures, options.quick))
    for measure in measures:
        if measure.neighbour:
            console.print(f"{measure.name}; {measure.neighbour}")
    return {
        "version": VERSION,
        "benchmark": name,
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "quick": options.quick,
        "machine": before,
        "load_after": [round(x, 2) for x in os.getloadavg()],
        "measures": [measure.as_dict() for measure in measures],
    }


def write(document: Mapping[str, Any], folder: Path) -> Path:
    """Put a document where its benchmark's name says."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{document['benchmark']}.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path


def _table(name: str, measures: Sequence[Measure], quick: bool) -> Table:
    table = Table(title=f"{name} (quick: the numbers mean nothing)" if quick else name)
    table.add_column("measure")
    for column in ("median", "min", "max", "n", "target", "met"):
        table.add_column(column, justify="right", no_wrap=True)
    marks = {None: "", True: "yes", False: "NO"}
    for m in measures:
        numbers = [_number(value, m.unit) for value in (m.median, min(m.samples), max(m.samples))]
        target = "" if m.target is None else _number(m.target, m.unit)
        table.add_row(m.name, *numbers, str(len(m.samples)), target, marks[m.met])
    return table


def _number(value: float, unit: str) -> str:
    digits = 1 if abs(value) >= 10 else 3
    return f"{value:.{digits}f}" + ("" if unit == "ratio" else f" {unit}")
