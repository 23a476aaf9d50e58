"""`lastgasp report DIR --json` on 1 GB of rows of eight ranks: seconds, and memory beside that on a quarter of it.

The rows are written by the recorder's own renderer, in files of 10 MiB, as a job with communication marks leaves them;
rank 5 waits for its data, and the report must say so. They are read from the page cache, where a job that runs has its
newest rows; once also from the disk, which tells more of the disk than of the report.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Measure, Options
from lastgasp.steps import bits
from lastgasp.steps import format as layout
from lastgasp.steps.ring import Name
from lastgasp.steps.rows import Origin, Renderer

RANKS, SLOW = 8, 5
SIZES, QUICK_SIZES = (250_000_000, 1_000_000_000), (2_000_000, 8_000_000)
ROUNDS = 3
TARGET_S, TARGET_MB = 30.0, 400.0
LIMIT = 600.0
"""Seconds for one report."""
EPOCH = 1_795_247_866
FILE_MAX = 10 * 1024 * 1024
CHUNK = 200
"""Steps written at a time."""
COLLECTIVE = json.dumps(
    {"streamId": "0", "count": "4718592", "dataType": "fp32", "groupName": "default_group", "opName": "HcclAllReduce"}
)
NAMES = [
    Name("dataloader", "default", bits.DATALOADER, False),
    Name("forward", "default", bits.FORWARD, True),
    Name("backward", "default", bits.FORWARD, True),
    Name(COLLECTIVE, "communication", bits.COMM, True),
    Name("optimizer", "default", bits.FORWARD, True),
    Name("step {}", "default", bits.STEP, True),
    Name("save_checkpoint", "default", bits.SAVE, False),
]
DATA, FORWARD, BACKWARD, COLLECTIVES, OPTIMIZER, STEP, SAVE = range(len(NAMES))
Record = tuple[int, int, int, int]
"""Name, begin, end (ns), value."""


@dataclass(frozen=True)
class Done:
    """One report: seconds, seconds of CPU, peak memory in MB."""

    wall: float
    cpu: float
    peak: float


def measure(options: Options) -> list[Measure]:
    """Reports on both sizes."""
    small, large = QUICK_SIZES if options.quick else SIZES
    rounds = 1 if options.quick else ROUNDS
    tasks = {size: options.folder / f"{size // 1_000_000}-MB" for size in (small, large)}
    for size, task in tasks.items():
        write(task, size)
    done = {size: [report(task) for _ in range(rounds)] for size, task in tasks.items()}
    forget(tasks[large])
    cold = report(tasks[large])
    at_small, at_large = (f"on {size / 1e9:.3g} GB of rows" for size in (small, large))
    return [
        Measure(name=f"report {at_large}", unit="s", samples=[one.wall for one in done[large]], target=TARGET_S),
        Measure(name=f"report {at_large}: CPU", unit="s", samples=[one.cpu for one in done[large]]),
        Measure(name=f"report {at_large}, once from the disk", unit="s", samples=[cold.wall]),
        Measure(name=f"report {at_small}", unit="s", samples=[one.wall for one in done[small]]),
        Measure(
            name=f"peak memory {at_large}", unit="MB", samples=[one.peak for one in done[large]], target=TARGET_MB
        ),
        Measure(name=f"peak memory {at_small}", unit="MB", samples=[one.peak for one in done[small]]),
    ]


def report(task: Path) -> Done:
    """Run it as a user does; its answer must be right."""
    with (task / "report.json").open("wb") as out:
        begin = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "lastgasp", "report", str(task), "--json"], stdout=out)
        late = threading.Timer(LIMIT, process.kill)
        late.start()
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.monotonic() - begin
        late.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"lastgasp report ended with {process.returncode}"
    answer = json.loads((task / "report.json").read_bytes())
    assert [(slow["rank"], slow["cause"]) for slow in answer["verdict"]["slow"]] == [(SLOW, "data")]
    assert sum(row["unreadable"] + row["unbegun"] + row["unended"] for row in answer["ranks"]) == 0
    return Done(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000)


def write(task: Path, size: int) -> None:
    """The files of all ranks: `size` bytes or a little more."""
    for rank in range(RANKS):
        directory = task / str(rank)
        directory.mkdir(parents=True)
        origin = Origin(pid=3000 + rank, device=rank, wall_offset=EPOCH * 10**9)
        renderer = Renderer(origin, lambda first: NAMES[first:])
        written = number = 0
        for steps in _chunks(rank):
            path = directory / str(EPOCH + number)
            records = bytearray()
            for name, begin, end, value in steps:
                written += 1
                records += layout.RECORD.pack(begin, end, written, value, 0, 0, name, 3000 + rank)
            with path.open("ab") as file:
                file.write(renderer.render(bytes(records)))
                number += file.tell() > FILE_MAX
            if _size(directory) >= size // RANKS:
                break


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def _chunks(rank: int) -> Iterator[list[Record]]:
    """Steps without end, some at a time; ranks leave their collectives together."""
    alone, together, at = random.Random(rank), random.Random(-1), 1
    step = 0
    while True:
        ranges: list[Record] = []
        for _ in range(CHUNK):
            step += 1
            lasts = 40_000_000 + int(together.expovariate(1 / 2_000_000))
            ranges += _step(step, at, at + lasts, rank, alone)
            at = ranges[-1][2] + 100_000
            if step % 100 == 0:
                ranges.append((SAVE, at, at + 60_000_000, 0)) if rank == 0 else None
                at += 60_000_000
        yield ranges


def _step(step: int, begin: int, end: int, rank: int, chance: random.Random) -> list[Record]:
    """What a rank does in a step whose length is that of all: the wait is in the collective."""
    ranges, at = list[Record](), begin
    for name, usual in ((DATA, 2_000_000), (FORWARD, 8_000_000), (BACKWARD, 12_000_000)):
        more = 10_000_000 if rank == SLOW and name == DATA else 0
        until = at + more + int(usual * chance.lognormvariate(0, 0.1))
        ranges.append((name, at, until, 0))
        at = until
    ready, done = ranges.pop()[2], max(at, end - 3_000_000)
    ranges += [(COLLECTIVES, ready - 1_000_000, done, 0), (BACKWARD, ranges[-1][2], done, 0)]
    return [*ranges, (OPTIMIZER, done, end, 0), (STEP, begin, end, step)]


def forget(task: Path) -> None:
    """Out of the page cache."""
    for path in task.glob("*/*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
