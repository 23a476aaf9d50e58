"""A launcher that is asked to stop once training is over: the ranks write their results, and are let for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torch.distributed.elastic.multiprocessing.api import SignalException

from lastgasp import _clock

log = logging.getLogger("lastgasp.launch")

FINISH = 20.0
"""Seconds for them to end on their own. Kubernetes kills a pod 30 s after it has asked it to stop."""
REST = 8
"""Seconds from their own SIGTERM to SIGKILL: nothing of the training is left to be saved."""
_LOOK = 0.05


def let_finish(running: Callable[[], bool]) -> None:
    """Wait until none of them is `running`, for `FINISH` seconds, or until the launcher is asked once more."""
    if not running():
        return
    log.warning("asked to stop: training is over, and its ranks get %g s for what they still do", FINISH)
    deadline = _clock.monotonic() + FINISH
    try:
        while running() and _clock.monotonic() < deadline:
            time.sleep(_LOOK)
    except SignalException:
        log.warning("asked to stop once more: not waiting for the ranks")
