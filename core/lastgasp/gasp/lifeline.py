"""Kernel options that detect a lost host at either end of a connection, without a thread that the GIL could starve."""

from __future__ import annotations

import contextlib
import socket

LOST_AFTER = 13.0
"""Seconds without an answer after which a connection is given up.

Retransmissions back off to 6.3 and 12.7 s after the first loss, so anything below the latter gives up a link that was
cut for seven seconds; twelve seconds more would be too long for a host that has lost its power.
"""
_IDLE, _INTERVAL = 4, 2
_RTO_MAX_MS, _RETRANSMIT_EVERY_MS = 44, 2000  # TCP_RTO_MAX_MS, of Linux 6.15


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel close a TCP connection `LOST_AFTER` seconds after the other host was last heard of."""
    limit = int(LOST_AFTER * 1000)
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit),
        (socket.IPPROTO_TCP, _RTO_MAX_MS, _RETRANSMIT_EVERY_MS),
    ):
        with contextlib.suppress(OSError):  # an older kernel, or no TCP: the other options still help
            connection.setsockopt(level, option, value)
