"""What a process is to be, and how a forked one becomes it."""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lastgasp.launch import warm_child

ROOM = "TESTS_PREFORK_ROOM"
"""A variable of the image that is nothing but room for longer environments."""
NATIVE = (
    "PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "MALLOC_", "GLIBC_", "LC_", "LANG", "TZ", "TORCH_CPP_",
    "GLOG_", "MS_",
)  # fmt: skip
COPIED = ("TQDM_", "FSSPEC_")
"""Beginnings of the names of variables that interpreter and libraries in C read when they are loaded; and of those that
a library looks for among all (`server.COPYING`)."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What `subprocess.Popen` was asked for.

    Attributes:
        command, environment, umask, limits: as in `lastgasp.launch.warm_child.Order`.
        parent: process id of who asks.
        session: it is to lead a session of its own.
        ends_with_parent: it is to end when who asks does (`lastgasp.testing.jobs.ends_with_its_parent`).
        ignored, blocked: signals.
        nested: it may start processes of the same image.
        passed: numbers of other descriptors that it gets.
    """

    command: list[str]
    environment: dict[str, str]
    umask: int
    limits: list[list[int]]
    parent: int
    session: bool
    ends_with_parent: bool
    ignored: list[int]
    blocked: list[int]
    nested: bool
    passed: list[int]

    def encoded(self) -> bytes:
        """For the other side."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Order:
        """Of what `encoded` has made."""
        return cls(**json.loads(data))

    @property
    def unbuffered(self) -> bool:
        """As -u and PYTHONUNBUFFERED have it."""
        return self.command[1] == "-u" or bool(self.environment.get("PYTHONUNBUFFERED"))

    def differs(
        self, image: Mapping[str, str], read: Mapping[str, str | None], imported: Mapping[str, str | None]
    ) -> str:
        """Why the image is no stand-in: a variable that its imports have read has another value. Empty if it is one.

        Args:
            image: the image's environment.
            read: what was read while it imported.
            imported: what was set; a process that was forked from the image passes it on.
        """
        for name, value in read.items():
            if self.environment.get(name) not in (value, imported.get(name, value)):
                return f"{name} was read by an import"
        for name in {*image, *self.environment}:
            if name.startswith(NATIVE + COPIED) and image.get(name) != self.environment.get(name):
                return f"{name} is read by interpreter or libraries"
        return ""


def become(order: Order, descriptors: Sequence[int], imported: Mapping[str, str | None]) -> None:
    """Give this forked process all that a fresh one would have; its program has not begun yet.

    Args:
        descriptors: of stdin, stdout, stderr and the working directory; closed.
        imported: variables that imports have set (None: deleted).
    """
    plain = warm_child.Order(
        command=order.command, environment=order.environment, umask=order.umask, limits=order.limits
    )
    warm_child.become(plain, descriptors, imported)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in order.ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, order.blocked)
    show_environment(order.environment)
    if order.unbuffered:
        sys.stdout, sys.stderr = (_unbuffered(number) for number in (1, 2))
    importlib.invalidate_caches()


def _unbuffered(number: int) -> io.TextIOWrapper:
    old = sys.stdout if number == 1 else sys.stderr
    raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True)


def room_for(environment: Mapping[str, str]) -> int:
    """Bytes that it takes in /proc/PID/environ."""
    return len(_block(environment))


def show_environment(environment: Mapping[str, str]) -> None:
    """Let those who look for a job's processes by a variable find this one, as if it had been started with it.

    It stands where the kernel has put the image's; nothing points there any more since `os.environ` was filled anew.
    """
    with open("/proc/self/stat") as file:
        begin, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    block = _block(environment)[: end - begin]
    ctypes.memmove(begin, block.ljust(end - begin, b"\0"), end - begin)


def _block(environment: Mapping[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
