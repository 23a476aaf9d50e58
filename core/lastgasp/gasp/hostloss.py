"""Whether a rank waits in vain for a host that has vanished together with the controller. Pure."""

from __future__ import annotations

import errno
import ssl

from .lifeline import LOST_AFTER

_VANISHED = frozenset((errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN))


def vanished(error: BaseException) -> bool:
    """The other host no longer answers; a process of it that has ended would have closed its connection."""
    return isinstance(error, OSError) and not isinstance(error, ssl.SSLError) and error.errno in _VANISHED


class HostLoss:
    """No FIN comes from a host without power, so a collective with its ranks waits for as long as its library likes.

    The controller's host has ranks of the job. Once the kernel has given up the connection to it, a training thread
    that has not moved for as long as that took waits for them; one that moves on does not.
    """

    def __init__(self) -> None:
        self._ticks, self._since = 0, 0.0
        self._lost = False

    def lost(self) -> None:
        """The controller's host has vanished."""
        self._lost = True

    def look(self, ticks: int, now: float) -> bool:
        """True once: the training thread waits in vain.

        Args:
            ticks: its progress so far; 0 before training.
            now: seconds on the monotonic clock.
        """
        if ticks != self._ticks:
            self._ticks, self._since = ticks, now
        found = self._lost and ticks > 0 and now - self._since >= LOST_AFTER
        self._lost = self._lost and not found
        return found
