"""Find the address by which other hosts reach this one."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

_LOOPBACK = "127.0.0.1"


def address_towards(host: str) -> str:
    """This host's address on the route to `host`; empty where there is none, or the name is unknown."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # connecting a UDP socket sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    """Whether no other host can reach it."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def loopback() -> str:
    """The address by which this host's processes reach each other; IPv6's only where there is no other."""
    for family, address in ((socket.AF_INET, _LOOPBACK), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return address
    return _LOOPBACK
