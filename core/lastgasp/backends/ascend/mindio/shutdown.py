"""Leaving MindIO at a normal end: its destroy may never return (facts/mindio_tft.md §16.1)."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger("lastgasp")

LIMIT = 10.0
"""Seconds that a destroy gets; a clean one takes milliseconds, one in three hangs with a live controller."""


def destroy(api: Any, limit: float = LIMIT) -> bool:
    """Tell the controller that this rank leaves well, on a thread of its own.

    Returns:
        Whether it came back. If not, the package's own exit hook is taken out, which would hang the same way, and the
        process will end by `os._exit` when Python has run its other hooks.
    """
    done = threading.Event()

    def run() -> None:
        try:
            api.tft_destroy_processor()
        except BaseException as error:
            log.warning("MindIO's processor did not end well: %s: %s", type(error).__name__, error)
        finally:
            done.set()

    threading.Thread(target=run, name="lastgasp-mindio-destroy", daemon=True).start()
    if done.wait(limit):
        return True
    log.warning("MindIO's processor did not end in %g s: left alone, the process ends without it", limit)
    atexit.unregister(api.tft_destroy_processor)
    _end_hard()
    return False


_hangs = threading.Event()


def _end_hard() -> None:
    """Its C++ threads and destructors must not keep the process."""
    _hangs.set()


def _end(leave: Callable[[int], Any] = os._exit) -> None:
    """Python runs its hooks from the newest to the oldest, and none behind this one."""
    if not _hangs.is_set():
        return
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass
    leave(1 if getattr(sys, "last_value", None) is not None else 0)


atexit.register(_end)  # when MindIO is first thought of: what the job registers from then on is not lost
