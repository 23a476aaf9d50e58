"""What this package says once: what the real one accepts, and this one does without."""

from __future__ import annotations

import logging

log = logging.getLogger("lastgasp")

_said: set[str] = set()


def say(text: str, rank: int = 0, level: int = logging.WARNING) -> None:
    """Log a line, once in a process and on rank 0 alone (a controller outside of the ranks is -1).

    Args:
        text: the same each time, so without a step's number.
    """
    if rank <= 0 and text not in _said:
        _said.add(text)
        log.log(level, "mindio_ttp: %s", text)
