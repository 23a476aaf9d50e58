"""The image: imports once, then forks processes until who has started it is gone. One thread, no device, no file."""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from lastgasp.launch import warm_checks, warm_child
from lastgasp.launch.warm_server import _content, _receive, _send
from lastgasp.testing.jobs import ends_with_its_parent
from support.prefork.order import Order, become

BOOT = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); sys.path.insert(0, sys.argv[3]); "
    "from support.prefork.server import main; sys.path.pop(0); main(int(sys.argv[1]), sys.argv[2])"
)
"""For `python -c`; the arguments are its end of the connection, the modules, and the folder that this package is in."""
_PR_SET_PDEATHSIG = 1
RENEWED = frozenset({"RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK"})
"""Variables that some imports read, and that are read again in the child (`warm_child.renew_ranks`)."""

COPYING = ("tqdm.utils", "fsspec.config")


def main(descriptor: int, modules: str) -> None:
    """Import, serve until the connection is closed; returns only in a forked process whose program has ended."""
    connection, before = socket.socket(fileno=descriptor), dict(os.environ)
    with _recording() as read:
        why = _imported(modules.split(","))
    changed = {name for name in (*before, *os.environ) if before.get(name) != os.environ.get(name)}
    image = Image(before, read, {name: os.environ.get(name) for name in changed})
    why = why or warm_checks.fork_once() or warm_checks.unsafe({0, 1, 2, descriptor})
    gc.collect()
    gc.freeze()
    _send(connection, why=why)
    if not why:
        image.serve(connection)


def _imported(modules: Sequence[str]) -> str:
    """Import them; why that fails, or empty."""
    try:
        for name in modules:
            importlib.import_module(name)
        inspect.getmodule(sys._getframe())  # knows the files of all modules then, for which torchrun takes a second
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Image:
    """What it was started with, and what its imports have read and set, of variables."""

    def __init__(self, before: dict[str, str], read: dict[str, str | None], imported: dict[str, str | None]) -> None:
        self._before, self._imported = before, imported
        self._read = {n: value for n, value in read.items() if n not in RENEWED and value == before.get(n)}

    def serve(self, connection: socket.socket) -> None:
        """Fork at each order; returns in a forked process, once its program has ended."""
        while True:
            data, descriptors = _receive(connection)
            if not data:
                os._exit(0)
            order = Order.decoded(_content(descriptors[0]))
            why = warm_checks.unsafe({0, 1, 2, connection.fileno(), *descriptors})
            why = why or order.differs(self._before, self._read, self._imported)
            if why:
                _send(connection, why=why)
            elif between := _forked():
                self._start(order, between, descriptors[1:], connection)
                return
            for number in descriptors[1:]:
                os.close(number)

    def _start(self, order: Order, between: int, descriptors: Sequence[int], connection: socket.socket) -> None:
        """In a forked process: become what was ordered, say so, and begin at the parent's word."""
        streams, start, passed = descriptors[:4], descriptors[4], descriptors[5:]
        if order.session:
            os.setsid()
        while (parent := os.getppid()) != order.parent:
            if parent != between:
                os._exit(1)  # the parent is gone
            time.sleep(0.001)
        if order.ends_with_parent:
            ends_with_its_parent()
            if os.getppid() != order.parent:
                os._exit(1)
        nested = self._nested(connection, descriptors) if order.nested else None
        try:
            become(order, streams, self._imported)
        except Exception as error:
            if nested is not None:
                nested.close()  # ends it
                os.wait()
            _send(connection, pid=os.getpid(), why=f"{type(error).__name__}: {error}")
            os._exit(1)
        _send(connection, pid=os.getpid())
        connection.close()
        if not os.read(start, 1):
            os._exit(0)  # given up
        os.close(start)
        for descriptor, number in zip(passed, order.passed, strict=True):
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
        if nested is not None:
            from support.prefork.client import serve_nested

            serve_nested(nested)
        run(order.command)

    def _nested(self, outer: socket.socket, others: Sequence[int]) -> socket.socket:
        """An image of its own for what this process is going to start: a child of it that dies with it."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if os.fork() == 0:
            _die_with(parent)
            mine.close()
            outer.close()
            for number in others:
                os.close(number)
            self.serve(theirs)
            sys.exit()  # a process that was forked from here has ended
        theirs.close()
        return mine


def run(command: Sequence[str]) -> None:
    """The program."""
    rest = command[2:] if command[1] == "-u" else command[1:]
    if rest[0] == "-c":  # the warm process
        warm_child.pose([command[0], "-u", "-c", *rest[2:]])
        sys.path.insert(0, "")
        exec(rest[1], vars(sys.modules["__main__"]))
        return
    if rest[0] == "-m":
        sys.modules.pop(rest[1], None)  # runpy warns of a module that was imported before it is run
    warm_child.run([command[0], "-u", *rest])


def _forked() -> int:
    """Fork twice: the second child is left to who collects orphans, the one who asks.

    Returns:
        In that child the process id of the one in between; 0 in the image.
    """
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return 0
    mine = os.getpid()
    if os.fork():
        os._exit(0)
    return mine


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _copies(frame: FrameType | None) -> bool:
    """It is read because all of them are, by a module that looks at the beginning of their names."""
    while frame is not None and frame.f_code.co_filename in ("<frozen os>", "<frozen _collections_abc>"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") in COPYING


@contextmanager
def _recording() -> Iterator[dict[str, str | None]]:
    """Which variables are read, and what each is then."""
    found: dict[str, str | None] = {}
    kind = type(os.environ)
    original = kind.__getitem__

    def getitem(self: os._Environ[str], name: str) -> str:
        value, known = None, isinstance(name, bytes) or _copies(sys._getframe(1))
        try:
            value = original(self, name)
            return value
        finally:
            if not known:
                found.setdefault(name, value)

    kind.__getitem__ = getitem  # type: ignore[method-assign]
    try:
        yield found
    finally:
        kind.__getitem__ = original  # type: ignore[method-assign]
