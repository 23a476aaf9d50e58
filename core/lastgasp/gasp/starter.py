"""Whether the process that started this one is still alive: only it knows where a detached controller listens."""

from __future__ import annotations

import os


class Starter:
    """One process of this host; distinguished from a later one with the same id.

    Args:
        pid: of a process that is alive now. If it cannot be inspected it counts as alive.
    """

    def __init__(self, pid: int) -> None:
        try:
            self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._stat = -1

    def gone(self) -> bool:
        """It has ended, reaped or not."""
        if self._stat < 0:
            return False
        try:
            text = os.pread(self._stat, 1024, 0)
        except ProcessLookupError:
            return True
        return text[text.rfind(b")") + 2 :][:1] in (b"Z", b"X")
