"""SIGTERM, seen while the training thread is stuck in a C++ collective (docs/how-it-works.md §10.14).

The C-level handler writes the signal's number to a wake-up descriptor at once (0.23 ms measured,
docs/facts/lightning.md); the control thread reads it. A forked child (data-loader worker) gets the default
handler back, or it could not be terminated, and would report its SIGTERM as this process's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class TermSignal:
    """Handles SIGTERM from `install` to `uninstall`; both on the main thread.

    Args:
        previous: the user's own handler, called on the main thread as well when Python gets to it.

    Attributes:
        seen: SIGTERM has come, and Python's handler was called.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        for end in (self._reader, self._writer):
            end.setblocking(False)
        self._previous: Handler = None
        self._previous_fd = -1
        self._users: Handler = None
        self.installed = self.seen = False
        _live.add(self)

    def install(self, users: Handler = None) -> TermSignal:
        """Replace the handler; `users` is called as well, after ours has noted the signal. Returns itself."""
        if self.installed:
            return self
        self._users = users
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.installed = True
        return self

    def uninstall(self) -> None:
        """Restore the previous handler, unless another one has been set since."""
        if not self.installed:
            return
        self.installed = False
        theirs = signal.set_wakeup_fd(self._previous_fd)
        if theirs != self._writer.fileno():
            signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            # None: a handler that was not set from Python, and that Python cannot restore.
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if callable(self._users):
            self._users(number, frame)

    def fileno(self) -> int:
        """For select: readable when a signal came."""
        return self._reader.fileno()

    def came(self) -> bool:
        """Read what the C-level handler wrote; True if SIGTERM was among it."""
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return False
        if self._previous_fd >= 0:
            with contextlib.suppress(OSError):  # it is full, or was closed
                os.write(self._previous_fd, numbers)  # another owner's wake-up descriptor (asyncio) still gets them
        return signal.SIGTERM in numbers

    def close(self) -> None:
        """Close the descriptors; after `uninstall`."""
        self._reader.close()
        self._writer.close()

    def _in_child(self) -> None:
        if self.installed:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.installed = False
        self.close()


_live: weakref.WeakSet[TermSignal] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for trigger in list(_live):
        trigger._in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
