"""How far a rank had come when it ended, and how it ended: what its heartbeats could not tell any more."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from lastgasp.blackbox import newest_step
from lastgasp.events import FaultKind

log = logging.getLogger("lastgasp.controller")


def newest_in(boxes: Iterable[int]) -> int:
    """The newest step that is recorded in these black boxes; -1 where none is. Negative descriptors are skipped."""
    return max((_newest(box) for box in boxes if box >= 0), default=-1)


def _newest(box: int) -> int:
    try:
        step = newest_step(box)
    except OSError as error:
        log.warning("a black box cannot be read: %s", error)
        return -1
    return -1 if step is None else step


def kind_of_end(how: str) -> FaultKind:
    """exit for a process that ended with a code of its own; killed for a signal, and while nobody knows.

    Args:
        how: what is known, as `deathwatch.describe_exit` says it; may be empty.
    """
    return "exit" if how.startswith("exited with code") else "killed"
