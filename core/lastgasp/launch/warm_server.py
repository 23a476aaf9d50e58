"""The warm process: imports what the ranks have imported, then forks ranks until its launcher closes the connection.

It has one thread, computes nothing and opens no device. A rank becomes the launcher's own child: it is forked by a
process in between that ends at once, and it starts only at the launcher's word.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from lastgasp import user_signals
from lastgasp.gasp.imported import at_start, origin
from lastgasp.launch import warm_checks
from lastgasp.launch.warm_child import Order, become, pose, run
from lastgasp.launch.warm_imports import memory_of, prepare, resting

BOOT = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); "
    "from lastgasp.launch.warm_server import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
"""For `python -u -c`: without the working directory on the path."""
OOM_SCORE = "/proc/self/oom_score_adj"
_PR_SET_PDEATHSIG = 1


class _Forked(NamedTuple):
    """In the child: what it is to become."""

    order: Order
    descriptors: list[int]


def main(descriptor: int, launcher: int) -> None:
    """Serve until the connection is closed. Returns in forked ranks only, once their program has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(0)
    user_signals.outlive()
    connection, before = socket.socket(fileno=descriptor), at_start()
    own = {0, 1, 2, descriptor}
    oom = _ended_first("1000")
    _, plans = _receive(connection)
    plan = json.loads(_content(plans[0]))
    pose(plan["command"])
    with resting():
        why = prepare(plan, own)
    names = {name for name in (*before, *os.environ) if before.get(name) != os.environ.get(name)}
    imported = {name: os.environ.get(name) for name in names}
    known = warm_checks.times({name: origin(module) for name, module in list(sys.modules.items())})
    _send(connection, why=why, bytes=memory_of())
    forked = None if why else _serve(connection, own, known)
    if forked is None:
        os._exit(0)
    _ended_first(oom)
    become(forked.order, forked.descriptors, imported)
    run(forked.order.command)


def _ended_first(score: str) -> str:
    """What memory runs out for ends the process with the highest score first. Returns the one before.

    Empty, and nothing is changed, where a sandbox does not let processes say that.
    """
    with contextlib.suppress(OSError), open(OOM_SCORE, "r+" if score else "r") as file:
        before = file.read()
        if score:
            file.write(score)
        return before
    return ""


def _serve(connection: socket.socket, own: set[int], known: Mapping[str, int]) -> _Forked | None:
    """Fork at each order; returns in a child what it is to become, and None once the launcher is gone.

    None also where what has been imported (`known`) is no longer what lies on disk: another warm process is made.
    """
    while True:
        data, descriptors = _receive(connection)
        if not data:
            return None
        order, streams, start = Order.decoded(_content(descriptors[0])), descriptors[1:5], descriptors[5]
        if why := warm_checks.changed_since(known):
            _send(connection, why=why)
            return None
        if why := warm_checks.unsafe(own | set(descriptors)):
            _send(connection, why=why)
        else:
            try:
                pid = _fork()
            except OSError as error:  # no memory, too many processes
                _send(connection, why=f"no process can be forked ({error.strerror})")
            else:
                if pid == 0:
                    connection.close()
                    if not os.read(start, 1):  # the launcher has given it up
                        os._exit(0)
                    os.close(start)
                    return _Forked(order, streams)
                _send(connection, pid=pid)
        for number in descriptors[1:]:
            os.close(number)


def _fork() -> int:
    """Fork twice: the second child is left to who collects orphans here, the launcher. 0 in that child.

    Raises:
        OSError: no process can be made.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        os.waitpid(between, 0)
        answer = os.read(reading, 16)
        os.close(reading)
        if not answer:
            raise OSError(0, "the second fork failed")
        return int(answer)
    os.close(reading)
    try:
        child = os.fork()
    except OSError:
        os._exit(1)
    if child:
        os._exit(0)
    os.setsid()
    os.write(writing, str(os.getpid()).encode())
    os.close(writing)
    return 0


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, 16, 8)
    except OSError:
        return b"", []
    return data, descriptors


def _content(memory: int) -> bytes:
    """Of a file in memory, which is closed."""
    with open(memory, "rb") as file:
        file.seek(0)
        return file.read()


def _send(connection: socket.socket, **answer: Any) -> None:
    connection.send(json.dumps(answer).encode())
