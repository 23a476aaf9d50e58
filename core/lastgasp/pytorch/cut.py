"""Cuts the TCP connections between the ranks of a job.

Destroying a gloo group closes nothing as long as one of its collectives is stuck in a thread of its own, and a rank
whose neighbours have all left would wait for them until its timeout. Cut, their collectives raise on both sides.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable, Iterator

from lastgasp.pytorch.socket_inodes import Ends, SocketInodes, listed

_Connected = tuple[int, str, Ends]
"""Descriptor and inode of a socket of this process, and its two addresses."""


def cut_connections(pids: Iterable[int], ends: Iterable[str] = (), keep: int = 0) -> int:
    """Shut down each TCP connection of this process whose other end is in one of the processes `pids` of this host.

    Args:
        ends: the other ends of connections to other hosts that are cut as well (`outside`).
        keep: the port of the store where the ranks meet again, which one of them may have: others are there already.

    Returns:
        How many.
    """
    remote = frozenset(ends)
    own, cut = list(_connected()), 0
    theirs = {inode for pid in pids if pid != os.getpid() for _, inode in _sockets(pid)}
    with _other_end(own) as inode_of:
        for number, _, (here, there) in own:
            if keep in (here[1], there[1]):
                continue
            if inode_of((there, here)) in theirs or _word(there) in remote:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
    return cut


def cut_hosts(addresses: Iterable[str]) -> None:
    """Shut down each TCP connection of this process to one of these hosts.

    A host without power does not end its connections: who receives from there would wait for minutes.
    """
    gone = frozenset(address.removeprefix("::ffff:") for address in addresses)
    for number, _, (_, there) in _connected() if gone else ():
        if there[0].removeprefix("::ffff:") in gone:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def cut_from(port: int) -> None:
    """Shut down each TCP connection of this process to this port: whoever waits for what comes from there raises."""
    for number, _, (_, there) in _connected():
        if there[1] == port:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def outside() -> tuple[str, ...]:
    """This process's ends of its TCP connections to other hosts, as "address port". None where the job has one host."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return ()
    return tuple(_word(here) for _, _, (here, there) in _connected() if here[0] != there[0])


def _word(end: tuple[str, int]) -> str:
    return f"{end[0].removeprefix('::ffff:')} {end[1]}"


@contextlib.contextmanager
def _other_end(own: Iterable[_Connected]) -> Iterator[Callable[[Ends], str]]:
    """The inode of a connection by its addresses, empty where there is none.

    The kernel is asked for each, which takes microseconds. Where it cannot be asked (a container that forbids it, a
    kernel without that module, which says of every connection that there is none) all connections of the host are
    read: that takes milliseconds, and may miss one while others come and go.
    """
    try:
        inodes = SocketInodes()
    except OSError:
        inodes = None
    try:
        yield inodes.find if inodes and any(inodes.find(ends) == inode for _, inode, ends in own) else listed()
    finally:
        if inodes is not None:
            inodes.close()


def _connected() -> Iterator[_Connected]:
    for number, inode in _sockets(os.getpid()):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            if one.type == socket.SOCK_STREAM and one.family in (socket.AF_INET, socket.AF_INET6):
                yield number, inode, (one.getsockname()[:2], one.getpeername()[:2])


def _sockets(pid: int) -> Iterator[tuple[int, str]]:
    """Descriptor and inode of each socket of a process; none where it is gone."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{name}")
                if target.startswith("socket:["):
                    yield int(name), target[8:-1]
