"""All clock readings go through here, so that tests can inject time."""

from __future__ import annotations

import time


def monotonic() -> float:
    """Return monotonic seconds, for deadlines."""
    return time.monotonic()


def wall_ns() -> int:
    """Return nanoseconds since the epoch, for records that people read."""
    return time.time_ns()
