"""The controller's end of each rank's connection."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import socket
from dataclasses import dataclass

from . import lifeline

log = logging.getLogger("lastgasp.controller")


@dataclass
class Peer:
    """One rank's connection, and what outlives it."""

    rank: int
    writer: asyncio.StreamWriter | None
    pid: int | None = None
    """Its process, where it runs on this host."""
    box: int = -1
    """Our own descriptor of the rank's black box; it outlives the rank."""
    death: tuple[str, int] | None = None
    """The evidence that its process has died, and when that was seen; its connection may not have ended yet."""


def unread(writer: asyncio.StreamWriter) -> bool:
    """Something, or the end, waits in its socket."""
    number = writer.get_extra_info("socket").fileno()
    if number < 0:
        return False
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(0))


def open_descriptor(pid: int, number: int) -> int:
    """Our own descriptor of a rank's black box, which outlives the rank; -1 when it cannot be had."""
    if number < 0:
        return -1
    try:
        return os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        log.warning("the black box of process %d cannot be opened (%s): its random state dies with it", pid, error)
        return -1


def keep_alive(sock: socket.socket) -> None:
    """Small messages go at once, and the kernel finds a lost host."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lifeline.keep_alive(sock)


def plain(error: BaseException) -> str:
    """Why a connection ended, for people."""
    if isinstance(error, asyncio.IncompleteReadError):
        return "ended in the middle of a frame" if error.partial else "ended"
    return str(error) or type(error).__name__
