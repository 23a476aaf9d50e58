"""Waiting for what another process or thread does, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 150.0
"""Seconds that something which must happen may take, on a loaded machine."""


def until(condition: Callable[[], bool], what: str = "another thread", seconds: float = PATIENCE) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for: {what}"
        time.sleep(0.02)
