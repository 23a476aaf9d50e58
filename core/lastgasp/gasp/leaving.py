"""How long a rank may take to leave a training that is entered again from files, before it ends and the job restarts.

Its step is on disk by then. What a recovery in place saves is about what the start of a process takes, up to its
training: to wait for longer than that would cost more than it can save.
"""

from __future__ import annotations

from lastgasp import _clock

LEAST, MOST = 5.0, 30.0
"""Seconds; the second besides `finish_timeout`."""
_took: list[float] = []


def training_begins() -> None:
    """Measure the start of this process, the first time."""
    if not _took:
        _took.append(_clock.process_age())


def start_took() -> float:
    """Seconds from the beginning of this process to that of its first training; 0 before."""
    return _took[0] if _took else 0.0


def limit(finish_timeout: float) -> float:
    """Seconds."""
    return min(finish_timeout + MOST, max(LEAST, start_took()))
