"""The controller's end of each rank's connection."""

from __future__ import annotations

import asyncio
import select
import socket
from dataclasses import dataclass

import msgspec

from lastgasp import _clock

from . import lifeline
from . import messages as m


@dataclass
class Peer:
    """One rank's connection, and data that outlives it."""

    rank: int
    writer: asyncio.StreamWriter | None
    pid: int | None = None
    """Its process, where it runs on this host."""
    buffer_fd: int = -1
    """Our own descriptor of the rank's crash-safe buffer; it outlives the rank."""
    elsewhere: tuple[str, int] | None = None
    """Its host and process, where it runs on another one."""
    death: tuple[str, int] | None = None
    """Evidence of its process's death and when it was seen; its connection may not have ended yet."""


def unread(writer: asyncio.StreamWriter) -> bool:
    """Whether data, or the end of the connection, waits in its socket."""
    number = writer.get_extra_info("socket").fileno()
    if number < 0:
        return False
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(0))


def keep_alive(sock: socket.socket) -> None:
    """Send small messages at once, and let the kernel detect a lost host."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lifeline.keep_alive(sock)


def plain(error: BaseException) -> str:
    """Why a connection ended, for people."""
    if isinstance(error, asyncio.IncompleteReadError):
        return "ended in the middle of a frame" if error.partial else "ended"
    return str(error) or type(error).__name__


def by_our_clock(peer: Peer | None, message: m.FromRank) -> m.FromRank:
    """A rank's message, with this host's times if the rank is on another one: clocks may differ by hours."""
    if peer is None or peer.elsewhere is None:
        return message
    if isinstance(message, m.Report):
        return msgspec.structs.replace(message, fault=msgspec.structs.replace(message.fault, seen_ns=_clock.wall_ns()))
    if isinstance(message, m.Saved):
        return msgspec.structs.replace(message, first_byte_ns=_clock.wall_ns())
    return message


async def read_frame(reader: asyncio.StreamReader, limit: int) -> bytes:
    """The body of the next frame.

    Raises:
        ProtocolError: it is longer than `limit` bytes.
        EOFError: the connection ended.
    """
    size = m.body_size(await reader.readexactly(m.HEADER), limit)
    return await reader.readexactly(size)
