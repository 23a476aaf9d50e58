"""The launcher's TCP connections, which torch's rendezvous store has opened: bounded, and a source of addresses.

The store gives no deadline to most of its calls: with a host that has lost its power they wait for as long as the
kernel retransmits, which is a quarter of an hour. So the kernel is told to give up sooner.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from lastgasp.gasp.addresses import is_loopback
from lastgasp.gasp.lifeline import keep_alive


def guard_connections() -> int:
    """Have every TCP connection of this process end some seconds after its other host was last heard of.

    Returns:
        How many there are.
    """
    count = 0
    for connection in _connections():
        keep_alive(connection)
        count += 1
    return count


def own_address(port: int) -> str:
    """The address by which the other hosts reach this one: that of a connection of the store which listens on `port`.

    Returns:
        A loopback address where all connections are this machine's own; empty where there is no connection.
    """
    found = []
    for connection in _connections():
        here, there = connection.getsockname(), connection.getpeername()
        if port in (here[1], there[1]):
            found.append((_plain(here[0]), _plain(there[0])))
    outside = [here for here, there in found if here != there] + [here for here, _ in found]
    return next((here for here in outside if not is_loopback(here)), next(iter(outside), ""))


def _plain(address: str) -> str:
    """An IPv4 address that a socket of both families has."""
    return address.removeprefix("::ffff:")


def _connections() -> Iterator[socket.socket]:
    """Duplicates of the connected TCP sockets of this process: options that are set on them are set on these."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is no connection
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    found.getpeername()
                    yield found
