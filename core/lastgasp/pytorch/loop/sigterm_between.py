"""SIGTERM between two calls of the function that `train` calls, when no session takes it."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

from lastgasp.gasp.rank_status import RankStatus


class SigtermBetween:
    """Notes SIGTERM from now until `over`, and then raises it again. On the main thread.

    A mask of this thread would not do: the kernel gives the signal to any thread that does not block it.

    Args:
        status: of the session that has ended, which may have seen the signal after the recovery was agreed on.
        users: the user's own handler, or None.
    """

    def __init__(self, status: RankStatus, users: Any) -> None:
        self._status, self._users, self._came = status, users, False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = True

    def step_aside(self) -> None:
        """The handler that was there before comes back; a session may take its place."""
        if signal.getsignal(signal.SIGTERM) == self._note:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._users is None else self._users)

    def over(self) -> None:
        """A session takes the signal again, or nobody will."""
        self.step_aside()
        came, self._came = self._came or self._status.asked_to_stop, False
        if came:
            os.kill(os.getpid(), signal.SIGTERM)
