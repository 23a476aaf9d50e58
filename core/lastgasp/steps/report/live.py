"""The report while the job runs: read what was appended, show it, wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .job import Job, JobReader
from .sources import Place, locate

INTERVAL_S = 2.0
"""Seconds between two readings. Rows of lastgasp reach the disk within one second, TaskD's within ten."""
SHARE = 0.2
"""Share of the time that reading may take: a big job is read less often."""


@dataclass(frozen=True)
class Watch:
    """How long and how often; the clock and the wait are given, so that tests need no time.

    Attributes:
        seconds: end after so many; None: only the wait ends it, by raising KeyboardInterrupt (Ctrl-C).
        now: seconds on a clock that never goes back.
        wait: waits so many seconds.
    """

    now: Callable[[], float]
    wait: Callable[[float], object]
    seconds: float | None = None
    interval: float = INTERVAL_S


def follow(reader: JobReader, place: Place, directory: Path, watch: Watch, show: Callable[[Job], object]) -> None:
    """Read and show until the time is over or the user interrupts.

    Args:
        reader: of `place`; ranks that come later are read as well.
        place: the task, which stays the same where a newer one begins.
        directory: as the user gave it.
        show: called with what has been read so far, each time.

    Raises:
        ConfigError: the task's files have gone.
    """
    begun = watch.now()
    try:
        while True:
            at = watch.now()
            reader.read()
            show(reader.job())
            took = watch.now() - at
            pause = max(watch.interval, took / SHARE - took)
            left = pause if watch.seconds is None else begun + watch.seconds - watch.now()
            if left <= 0:
                return
            watch.wait(min(pause, left))
            reader.follow(locate(directory, place.task))
    except KeyboardInterrupt:
        return
