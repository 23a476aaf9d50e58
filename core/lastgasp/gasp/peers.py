"""The controller's end of each rank's connection."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from lastgasp import _clock

from . import lifeline
from . import messages as m
from .again import Again
from .ends import BROKE

CLOSED = "its connection closed"
"""The evidence where a rank has closed its connection and its process has not been seen to die."""
READ_OUT = 10.0
"""Seconds for reading a dead process's last messages: they are on this host already, but it may be overloaded."""
TURNS = 3
"""Idle turns of the event loop after which all messages have been handled: one to read, one to process."""


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
    address: str = ""
    """From which it has connected."""
    death: tuple[str, int] | None = None
    """Evidence of its process's death and when it was seen; its connection may not have ended yet."""
    silent: str = ""
    """Why its connection broke, where its host or its link does not answer any more."""

    @property
    def end(self) -> tuple[str, int]:
        """What shows that the rank is gone, and when that was seen."""
        return self.death or (f"{BROKE}: {self.silent}" if self.silent else CLOSED, _clock.wall_ns())


def number_after(peers: Mapping[int, Peer], again: Again, rank: int, pid: int) -> list[int]:
    """What number a process has in the next incarnation, which some do not enter.

    `rank` is its launcher's number, by which nobody can tell whether that has counted anew already.
    """
    before = next((number for number, peer in peers.items() if pid and peer.pid == pid), None)
    if before is None:
        return [rank]
    return [] if before in again.lost else [again.members.index(before)]


def unread(writer: asyncio.StreamWriter) -> bool:
    """Whether data, or the end of the connection, waits in its socket."""
    number = writer.get_extra_info("socket").fileno()
    if number < 0:
        return False
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(0))


def terminate(peers: Iterable[Peer]) -> None:
    """Send SIGTERM to those of this host that are connected."""
    for pid in [peer.pid for peer in peers if peer.writer is not None and peer.pid is not None]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)


async def read_out(peer: Peer | None) -> None:
    """Read everything a dead process sent: its Goodbye or its exception may still be in the socket.

    Its death is noticed before its connection ends, because the kernel frees its memory first.
    """
    deadline, quiet = _clock.monotonic() + READ_OUT, 0
    while peer is not None and peer.writer is not None and quiet < TURNS and _clock.monotonic() < deadline:
        quiet = 0 if unread(peer.writer) else quiet + 1
        await asyncio.sleep(0)


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
