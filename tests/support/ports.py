"""Ports for programs that cannot be given a socket."""

from __future__ import annotations

import itertools
import os
import socket

# Below those that the system gives to whoever connects: none of these is taken between the choice and the use.
_FIRST, _COUNT = 10_000, 20_000
# Processes that were made one after the other begin hundreds of ports apart.
_turn = itertools.count(os.getpid() * 12_361)


def free_port() -> int:
    """A port that nobody listens on; each process of tests begins somewhere else and takes none twice."""
    while True:
        port = _FIRST + next(_turn) % _COUNT
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("0.0.0.0", port))
            except OSError:
                continue
        return port
