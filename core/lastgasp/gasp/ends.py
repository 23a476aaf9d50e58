"""How far a rank had come when it ended, and how it ended: what its heartbeats could no longer report."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from lastgasp.crash_safe_buffer import newest_step
from lastgasp.events import FaultKind

log = logging.getLogger("lastgasp.controller")


def newest_in(buffer_fds: Iterable[int]) -> int:
    """The newest step recorded in these crash-safe buffers, or -1. Negative descriptors are skipped."""
    return max((_newest(buffer_fd) for buffer_fd in buffer_fds if buffer_fd >= 0), default=-1)


def _newest(buffer_fd: int) -> int:
    try:
        step = newest_step(buffer_fd)
    except OSError as error:
        log.warning("a crash-safe buffer cannot be read: %s", error)
        return -1
    return -1 if step is None else step


def kind_of_end(how: str) -> FaultKind:
    """Return exit for a process that exited with a code; killed for a signal, or while the cause is unknown.

    Args:
        how: what is known, as `process_monitor.describe_exit` formats it; may be empty.
    """
    return "exit" if how.startswith("exited with code") else "killed"
