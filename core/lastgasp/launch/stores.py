"""The launcher's TCP connections, opened by torch's rendezvous store: bounds their waits and finds addresses.

Most calls of the store have no deadline: with a host that lost its power they wait as long as the kernel
retransmits, a quarter of an hour. So the kernel is configured to give up sooner.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from lastgasp.gasp.addresses import is_loopback
from lastgasp.gasp.lifeline import keep_alive


def guard_connections() -> int:
    """Let every TCP connection of this process end some seconds after its peer was last heard of.

    Returns:
        Their number.
    """
    count = 0
    for connection in _connections():
        keep_alive(connection)
        count += 1
    return count


def own_address(port: int) -> str:
    """The address by which the other hosts reach this one, from a connection of the store that listens on `port`.

    Returns:
        A loopback address if all connections are local; empty if there is none.
    """
    found = []
    for connection in _connections():
        here, there = connection.getsockname(), connection.getpeername()
        if port in (here[1], there[1]):
            found.append((_plain(here[0]), _plain(there[0])))
    outside = [here for here, there in found if here != there] + [here for here, _ in found]
    return next((here for here in outside if not is_loopback(here)), next(iter(outside), ""))


def _plain(address: str) -> str:
    """Return the IPv4 address in a mapped IPv6 address."""
    return address.removeprefix("::ffff:")


def _connections() -> Iterator[socket.socket]:
    """Duplicates of this process's connected TCP sockets; options set on them apply to the originals."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:  # there is no /proc: torch's own deadlines are left
        return
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    found.getpeername()
                    yield found


def tell_newcomers(store: Any, handler: Any) -> None:
    """Publish where the ranks meet: torch does so only in its first round, and later hosts would wait in vain."""
    if (info := getattr(handler, "_bootstrap_store_info", None)) is not None and handler.use_agent_store:
        store.set(info.MASTER_ADDR_KEY, info.master_addr)
        store.set(info.MASTER_PORT_KEY, str(info.master_port))
