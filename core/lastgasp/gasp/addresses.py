"""Find the address by which other hosts reach this one."""

from __future__ import annotations

import ipaddress
import socket


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
