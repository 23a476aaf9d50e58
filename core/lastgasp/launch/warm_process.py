"""The launcher's end of a warm process: starts it, orders ranks from it, and ends it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lastgasp.gasp.process_monitor import describe_exit
from lastgasp.launch.forked import ForkedProcess
from lastgasp.launch.warm_child import Order
from lastgasp.launch.warm_imports import memory_of
from lastgasp.launch.warm_server import BOOT
from lastgasp.memory_file import memory_file

FORK_LIMIT = 5.0
"""Seconds that one fork may take; then a process is started instead."""
ROOM = 1024
"""Bytes that the ranks' command lines may be longer than that of the first one."""
_PR_SET_CHILD_SUBREAPER = 36
_LIMITS = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]


def in_use(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Bytes of all warm processes on this host, and how many there are, as far as this user may see them."""
    found = []
    for process in proc.iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if BOOT.encode() in (process / "cmdline").read_bytes().split(b"\0"):
                    found.append(memory_of(str(process)))
    return sum(found), len(found)


class NoFork(Exception):
    """No rank can be forked; why is its text."""


class WarmProcess:
    """Close it when the job ends. Its ranks are children of this process, and outlive it.

    Args:
        command: of a rank: executable, -u, script or -m module, arguments.
        environment: of this process; what each rank has its own value of is left out.
        plan: for `warm_imports.prepare`.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], plan: Mapping[str, Any]) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end, room = str(theirs.fileno()), "." * (sum(map(len, command)) + ROOM)
        with theirs:
            self._process = subprocess.Popen(
                [command[0], "-u", "-c", BOOT, end, str(os.getpid()), room],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.ready = False
        self._order(json.dumps(plan).encode())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def gone(self) -> str:
        """How it has ended, or has been ended; empty while it runs."""
        pid, code = self._process.pid, self._process.returncode
        if code is None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return ""
        self.close()
        return f"the warm process is gone ({describe_exit(self._process.returncode)})"

    def look(self) -> int | None:
        """Whether it has become ready since the last look. Does not wait.

        Returns:
            The bytes of memory that it takes, once; None otherwise.

        Raises:
            NoFork: it must not be forked, or is gone.
        """
        if self.ready or not _readable(self._connection, 0):
            return None
        self.ready = True
        return int(self._answer()["bytes"])

    def fork(self, order: Order, streams: Sequence[int]) -> ForkedProcess:
        """A rank, forked and started.

        Args:
            streams: what it gets as stdin, stdout and stderr.

        Raises:
            NoFork: none has been started, and none will be.
        """
        if not self.ready:
            raise NoFork("the warm process is not ready yet")
        with ExitStack() as stack:
            reading, writing = os.pipe()
            stack.callback(os.close, writing)  # the child ends where this is closed and nothing was written
            stack.callback(os.close, reading)
            folder = os.open(".", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, folder)
            with _collecting_orphans():
                self._order(order.encoded(), *streams, folder, reading)
                if not _readable(self._connection, FORK_LIMIT):
                    self.close()
                    raise NoFork(f"the warm process did not answer within {FORK_LIMIT:g} s")
                try:
                    forked = ForkedProcess(int(self._answer()["pid"]))
                except ChildProcessError:
                    raise NoFork("an orphan did not become a child of the launcher") from None
            os.write(writing, b"x")  # only now may it end, and leave orphans of its own
            return forked

    def close(self) -> None:
        """End it, and wait for that; ranks are not affected. Idempotent."""
        self.ready = False
        self._connection.close()
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):  # what its imports have started goes with it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _order(self, data: bytes, *descriptors: int) -> None:
        memory = memory_file("lastgasp-order")
        try:
            os.write(memory, data)
            socket.send_fds(self._connection, [b"x"], [memory, *descriptors])
        except OSError as error:
            raise NoFork(self._end()) from error
        finally:
            os.close(memory)

    def _answer(self) -> dict[str, Any]:
        """The next one. Raises NoFork where it says why not, or is none."""
        try:
            data = self._connection.recv(4096)
        except OSError:
            data = b""
        if not data:
            raise NoFork(self._end())
        answer: dict[str, Any] = json.loads(data)
        if why := answer.get("why"):
            raise NoFork(why)
        return answer

    def _end(self) -> str:
        """It does not answer any more."""
        self.close()
        return self.gone


@contextmanager
def _collecting_orphans() -> Iterator[None]:
    """Meanwhile orphans of this process's descendants become its children.

    Raises:
        NoFork: the kernel does not do that.
    """
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise NoFork("this system lets nobody but init collect orphans")
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def order_for(command: Sequence[str], environment: Mapping[str, str]) -> Order:
    """What to fork, with what else children of this process inherit."""
    with open("/proc/self/status") as file:
        umask = next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), 0o022)
    limits = [[which, *resource.getrlimit(which)] for which in _LIMITS]
    return Order(command=list(command), environment=dict(environment), umask=umask, limits=limits)


def _readable(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
