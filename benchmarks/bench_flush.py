"""What the flusher costs: CPU time of its thread at 1000 ranges a second, and the time from mark to disk.

A thread marks at an even pace, as a training would; the kernel's clock of the flusher's thread tells what that used.
Half of the ranges have a stream (four rows), as steps and forward passes do, half have none (two rows).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness import Measure, Options
from lastgasp.steps.rankfiles import RankFiles, profiling_files
from lastgasp.steps.recorder import RecorderOptions, StepRecorder

RATE = 1000
"""Ranges a second."""
SECONDS = 20
CPU_TARGET, DISK_TARGET = 1.0, 1.0
"""Per cent of one core; seconds."""
Writes = list[tuple[int, int]]
"""When each write of rows was over (wall ns), and how many rows it had."""


def measure(options: Options) -> list[Measure]:
    """CPU per second of training, and the age of each range when it is on disk."""
    logging.disable(logging.WARNING)
    seconds = 2 if options.quick else SECONDS
    with timed_writes() as writes:
        recorder = StepRecorder.open(
            RecorderOptions(rank=0, world_size=1, base=options.folder, task="bench", switch_path=Path("/nowhere"))
        )
        with recorder:
            clock = time.pthread_getcpuclockid(flusher_thread().ident or 0)
            cpu = [busy(recorder, clock) for _ in range(seconds + 1)][1:]
    ages = [age / 1e9 for age in ages_on_disk(recorder.directory, writes)]
    assert len(ages) == RATE * (seconds + 1), "a range was lost"
    per_second = [max(ages[i : i + RATE]) for i in range(0, len(ages), RATE)]
    name = f"flusher at {RATE} ranges/s"
    return [
        Measure(name=f"{name}: CPU of one core", unit="%", samples=cpu, target=CPU_TARGET),
        Measure(name=f"{name}: CPU per range", unit="us", samples=[c / 100 / RATE * 1e6 for c in cpu]),
        Measure(name="from mark to disk", unit="s", samples=ages[::100], target=DISK_TARGET),
        Measure(name="from mark to disk, the last of each second", unit="s", samples=per_second, target=DISK_TARGET),
    ]


def busy(recorder: StepRecorder, clock: int) -> float:
    """Mark for one second; returns per cent of it that the flusher's thread ran."""
    stream, host = recorder.marks.mark("forward"), recorder.marks.mark("dataloader")
    before, begin = time.clock_gettime_ns(clock), time.monotonic_ns()
    for number in range(RATE):
        with stream if number % 2 else host:
            pass
        wait = begin + (number + 1) * (10**9 // RATE) - time.monotonic_ns()
        if wait > 0:
            time.sleep(wait / 1e9)
    return 100 * (time.clock_gettime_ns(clock) - before) / (time.monotonic_ns() - begin)


def flusher_thread() -> threading.Thread:
    """That of the only recorder."""
    (found,) = (thread for thread in threading.enumerate() if thread.name == "lastgasp-marks")
    return found


@contextmanager
def timed_writes() -> Iterator[Writes]:
    """Note when each write was over."""
    real, writes = RankFiles.append, Writes()

    def append(files: RankFiles, rows: bytes) -> None:
        real(files, rows)
        writes.append((time.time_ns(), rows.count(b"\n")))

    RankFiles.append = append  # type: ignore[assignment,method-assign]
    try:
        yield writes
    finally:
        RankFiles.append = real  # type: ignore[method-assign]


def ages_on_disk(directory: Path, writes: Writes) -> list[int]:
    """How old each range was, in ns since its end, when its row of that end was on disk."""
    lines = [line for path in profiling_files(directory) for line in path.read_bytes().splitlines()]
    ages, at = [], 0
    for written, count in writes:
        rows = map(json.loads, lines[at : at + count])
        ages += [written - row["Timestamp"] for row in rows if row["Flag"] in (4, 32) and row["SourceKind"] == 0]
        at += count
    return ages
