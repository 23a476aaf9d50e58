"""Cuts the TCP connections between ranks of one host.

Destroying a gloo group closes nothing as long as one of its collectives is stuck in a thread of its own, and a rank
whose neighbours have all left would wait for them until its timeout. Cut, their collectives raise on both sides.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator

_Ends = tuple[str, str]
"""Local and remote address of a connection, as the kernel writes them."""


def cut_connections(pids: Iterable[int]) -> int:
    """Shut down each TCP connection of this process whose other end is in one of the processes `pids`.

    Returns:
        How many.
    """
    theirs = {inode for pid in pids if pid != os.getpid() for _, inode in _sockets(pid)}
    by_ends = dict(_table())
    ends_of, cut = {inode: ends for ends, inode in by_ends.items()}, 0
    for number, inode in _sockets(os.getpid()):
        local, remote = ends_of.get(inode, ("", ""))
        if by_ends.get((remote, local), "") in theirs:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def _sockets(pid: int) -> Iterator[tuple[int, str]]:
    """Descriptor and inode of each socket of a process; none where it is gone."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{name}")
                if target.startswith("socket:["):
                    yield int(name), target[8:-1]


def _table() -> Iterator[tuple[_Ends, str]]:
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as file:
            next(file, "")
            for line in file:
                words = line.split()
                yield (words[1], words[2]), words[9]
