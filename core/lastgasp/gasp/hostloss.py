"""Detects that a rank waits for a host that was lost together with the controller. Pure."""

from __future__ import annotations

import errno
import ssl

from .lifeline import LOST_AFTER

_VANISHED = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN))


def vanished(error: BaseException) -> bool:
    """Errors of a host that no longer answers; a process that merely ended would have closed its connection."""
    return isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno in _VANISHED


class HostLoss:
    """A host without power sends no FIN, so a collective with its ranks waits until its library times out.

    The controller's host also runs ranks of the job. Once the kernel has given up the connection to it, a training
    thread without progress for as long as that took is waiting for them; one that makes progress is not.
    """

    def __init__(self) -> None:
        self._ticks, self._since = 0, 0.0
        self._lost = False

    def lost(self) -> None:
        """Record that the controller's host was lost."""
        self._lost = True

    def look(self, ticks: int, now: float) -> bool:
        """Return True, once, when the training thread waits for the lost host.

        Args:
            ticks: its progress so far; 0 before training.
            now: seconds on the monotonic clock.
        """
        if ticks != self._ticks:
            self._ticks, self._since = ticks, now
        found = self._lost and ticks > 0 and now - self._since >= LOST_AFTER
        self._lost = self._lost and not found
        return found
