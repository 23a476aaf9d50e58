"""Leaving MindIO at a normal end: its destroy may never return (docs/facts/mindio_tft.md §16.1)."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import signal
import threading
from typing import Any

log = logging.getLogger("lastgasp")

LIMIT = 2.0
"""Seconds that a destroy gets; a clean one takes milliseconds, one in three hangs with a live controller, and all ranks
have come to the end of training before: the end of a good job is not kept waiting for it."""
END_LIMIT = 60
"""Whole seconds that Python's own end gets behind the last exit hook, where a destroy hangs."""


def destroy(api: Any, limit: float = LIMIT) -> bool:
    """Tell the controller that this rank leaves well, on a thread of its own.

    Returns:
        Whether it came back. If not, the package's own exit hook is taken out, which would hang the same way, and the
        process will end, with the code that Python ends it with, before the package's C++ destructors are run.
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


def hangs() -> bool:
    """A destroy did not come back."""
    return _hangs.is_set()


def _end_hard() -> None:
    """Its C++ threads and destructors must not keep the process."""
    _hangs.set()


def _bound_the_end() -> None:
    """One of the last hooks that Python runs; nobody knows the exit code yet, nor could set it (`sys.exit` is over).

    So it is left to Python, which runs the hooks from before this one, too, and hands the code to C's `exit`. That
    calls first what was registered last: `_exit`, which by `on_exit` is given the code. Whatever still hangs before
    that is ended by the alarm, and counts as failed.
    """
    if not _hangs.is_set():
        return
    with contextlib.suppress(ValueError):  # not the main thread: an embedded interpreter, whose end is not ours
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        signal.alarm(END_LIMIT)
    libc = ctypes.CDLL(None)
    for stream in ("stdout", "stderr"):  # C's own buffers: `_exit` does not write them
        with contextlib.suppress(ValueError, AttributeError):
            libc.fflush(ctypes.c_void_p.in_dll(libc, stream))
    if hasattr(libc, "on_exit"):  # glibc's
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


atexit.register(_bound_the_end)  # when MindIO is first thought of: what it registers itself is run before this
