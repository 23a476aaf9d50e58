"""Which socket is at the other end of a TCP connection of this host: its inode, by which /proc/PID/fd names it."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable

Address = tuple[str, int]
"""As `socket.getsockname` gives it, without what IPv6 adds."""
Ends = tuple[Address, Address]
"""Of a connection: the address of the socket, and that of its peer."""

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")
"""struct nlmsghdr: length, type, flags, sequence number, port."""
_REQUEST = struct.Struct("=BBBxI")
"""struct inet_diag_req_v2 before its socket id: family, protocol, extensions, states."""
_ID = struct.Struct("!HH16s16sIQ")
"""struct inet_diag_sockid: ports, addresses, interface, cookie."""
_NO_COOKIE = (1 << 64) - 1
_INODE = struct.Struct("=I")
_INODE_AT = _HEADER.size + 4 + _ID.size + 16
"""struct inet_diag_msg: four bytes, the socket id, four numbers, then the inode."""
_TIMEOUT = 1.0
"""Seconds for an answer. The kernel gives it before `send` returns."""


class SocketInodes:
    """Asks the kernel (man 7 sock_diag). Close it.

    Raises (constructor):
        OSError: it must not be asked here.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
        self._socket.settimeout(_TIMEOUT)
        self._number = 0

    def find(self, ends: Ends) -> str:
        """The inode; empty where there is no such connection, or the kernel does not say."""
        self._number += 1
        try:
            body = _request(ends)
            length = _HEADER.size + len(body)
            self._socket.send(_HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, self._number, 0) + body)
            while True:
                answer = self._socket.recv(4096)
                _, kind, _, number, _ = _HEADER.unpack_from(answer)
                if number == self._number:
                    break
        except (OSError, struct.error):
            return ""
        found = kind == _SOCK_DIAG_BY_FAMILY and len(answer) >= _INODE_AT + _INODE.size
        return str(*_INODE.unpack_from(answer, _INODE_AT)) if found else ""

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


def _request(ends: Ends) -> bytes:
    (here, port), (there, other) = map(_plain, ends)
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    packed = [socket.inet_pton(family, address.partition("%")[0]) for address in (here, there)]
    return _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0xFFFFFFFF) + _ID.pack(port, other, *packed, 0, _NO_COOKIE)


def listed() -> Callable[[Ends], str]:
    """As `SocketInodes.find`, from a list of all TCP connections of this host, which /proc gives."""
    found = {}
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as file:
            next(file, "")
            for line in file:
                words = line.split()
                found[_address(words[1]), _address(words[2])] = words[9]
    return lambda ends: found.get((_plain(ends[0]), _plain(ends[1])), "")


def _plain(address: Address) -> Address:
    """An IPv4 address that is written as one of IPv6: the other end may have the shorter form."""
    return address[0].removeprefix("::ffff:") if "." in address[0] else address[0], address[1]


def _address(text: str) -> Address:
    """From the kernel's words of 32 bits, each with the bytes in this machine's order."""
    numbers, _, port = text.partition(":")
    raw = b"".join(struct.pack("=I", int(numbers[at : at + 8], 16)) for at in range(0, len(numbers), 8))
    family = socket.AF_INET6 if len(raw) == 16 else socket.AF_INET
    return _plain((socket.inet_ntop(family, raw), int(port, 16)))
