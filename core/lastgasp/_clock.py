"""All clock readings go through here, so that tests can inject time."""

from __future__ import annotations

import os
import time


def monotonic() -> float:
    """Return monotonic seconds, for deadlines."""
    return time.monotonic()


def wall_ns() -> int:
    """Return nanoseconds since the epoch, for records that people read."""
    return time.time_ns()


def born(pid: int) -> int:
    """Return when a process of this host began, in the kernel's ticks since boot; -1 if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1


def process_age() -> float:
    """Return seconds since this process began, or was forked; infinite where the kernel does not say."""
    begun = born(os.getpid())
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return float("inf") if begun < 0 else now - begun / os.sysconf("SC_CLK_TCK")
