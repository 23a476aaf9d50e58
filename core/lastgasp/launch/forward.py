"""Forwards SIGTERM to the ranks of this host even while the launcher's main thread is blocked.

Python runs a signal's handler on the main thread only, and not while that is inside a call of the rendezvous store.
The C-level handler notifies this thread at once, through the wake-up descriptor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable

log = logging.getLogger("lastgasp.launch")

STUCK = 1.0
"""Seconds for the main thread to act on a signal itself."""
_STOPS = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))


class Forwarder:
    """A thread of the launcher. Create and close it on the main thread; elsewhere it does nothing.

    Args:
        acting: whether the main thread has begun to stop the ranks itself.
        pids: the running ranks that use lastgasp.
    """

    def __init__(self, acting: threading.Event, pids: Callable[[], Iterable[int]]) -> None:
        self._acting, self._pids = acting, pids
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._main = threading.current_thread() is threading.main_thread()
        self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False) if self._main else -1
        self._thread = threading.Thread(target=self._run, name="lastgasp-forward", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while numbers := self._reader.recv(64):
            if self._previous >= 0:
                with contextlib.suppress(OSError):  # it is full, or was closed
                    os.write(self._previous, numbers)
            if _STOPS.intersection(numbers) and not self._acting.wait(STUCK):
                self._forward()

    def _forward(self) -> None:
        try:
            found = list(self._pids())
        except Exception:  # this thread must survive
            log.exception("the ranks of this host could not be found")
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
        if found:
            log.warning("asked to stop: the ranks of this host were told to save; the launcher itself is held up")

    def close(self) -> None:
        """End the thread; restore the wake-up descriptor."""
        if self._main:
            theirs = signal.set_wakeup_fd(self._previous, warn_on_full_buffer=False)
            if theirs != self._writer.fileno():
                signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        self._acting.set()
        self._writer.close()
        self._thread.join(5)
        self._reader.close()
