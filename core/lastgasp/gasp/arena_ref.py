"""How a rank's arena is opened by a process that was not given it."""

from __future__ import annotations

import msgspec


class ArenaRef(msgspec.Struct, frozen=True, kw_only=True):
    """The arena of `rank`: `/proc/PID/fd/FD` of a process that keeps it open, on the host of who is told of it."""

    rank: int
    pid: int = 0
    fd: int = -1
    identity: bytes = b""
