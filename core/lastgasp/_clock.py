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


def process_age() -> float:
    """Return seconds since this process began, or was forked; infinite where the kernel does not say."""
    try:
        with open("/proc/self/stat") as file:
            begun = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - begun
    except (OSError, ValueError, IndexError):
        return float("inf")
