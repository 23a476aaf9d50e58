"""Every clock reading goes through here, so that tests can inject time."""

from __future__ import annotations

import time


def monotonic() -> float:
    """Seconds on a clock that never goes back; for deadlines."""
    return time.monotonic()


def wall_ns() -> int:
    """Nanoseconds since the epoch; for records that people read."""
    return time.time_ns()
