"""Whether a process may be forked, and by what it would do harm. Runs in the warm process; computes nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

HARMLESS = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
DEVICES = ("/dev/nvidia", "/dev/davinci", "/dev/hisi", "/dev/kfd", "/dev/dri/", "/dev/infiniband/", "/dev/accel")
READ_AGAIN = frozenset(
    {"lightning.fabric.utilities.rank_zero", "lightning_fabric.utilities.rank_zero", "torchmetrics.utilities.prints"}
)
"""Modules that take a rank from the environment when they are imported, and whose value is renewed in the child
(`warm_child.renew_ranks`)."""


def threads() -> int:
    """How many threads this process has; those of native libraries, too."""
    return len(os.listdir("/proc/self/task"))


def files() -> dict[int, str]:
    """What this process has open, by descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # that of the listing itself
            pass
    return found


def children() -> str:
    """Process ids of the children, separated by blanks."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().strip()


def unsafe(own: Collection[int]) -> str:
    """Why this process must not be forked now; empty when it may.

    Args:
        own: descriptors that the child closes, or gets its own of.
    """
    more = {number: name for number, name in files().items() if number not in own and name not in HARMLESS}
    devices = [name for name in more.values() if name.startswith(DEVICES)]
    if devices or _device_in_use():
        return f"an import has opened a device ({', '.join(devices) or 'torch has initialized one'})"
    if threads() > 1:
        return "an import has started a thread"
    if children():
        return "an import has started a process"
    if more:
        return f"an import keeps a file or a connection open ({', '.join(sorted(more.values())[:3])})"
    return ""


def fork_once() -> str:
    """Fork a child that ends at once; why its children must not train, or empty.

    Libraries that look after forks (OpenBLAS) end their threads before one, and start them again when they need them.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(int(_device_is_broken()))
    _, status = os.waitpid(pid, 0)
    return "an import has initialized a device, which a fork would break" if status else ""


def _device_in_use() -> bool:
    return any(module.is_initialized() for module in _devices())


def _device_is_broken() -> bool:
    return any(getattr(module, "_is_in_bad_fork", bool)() for module in _devices())


def _devices() -> Iterator[Any]:
    torch = sys.modules.get("torch")
    for name in ("cuda", "npu", "xpu"):
        module = getattr(torch, name, None)
        if module is not None and hasattr(module, "is_initialized"):
            yield module


@contextmanager
def watching_environment(names: Collection[str]) -> Iterator[dict[str, str]]:
    """Notice which modules read variables that each rank has its own value of, by the name of the module.

    `READ_AGAIN` is left out.
    """
    found: dict[str, str] = {}
    kind = type(os.environ)
    original: Callable[..., str] = kind.__getitem__

    def getitem(self: object, name: str) -> str:
        if name in names:
            reader = _importing(sys._getframe(1))
            if reader and reader not in READ_AGAIN:
                found.setdefault(reader, name)
        return original(self, name)

    kind.__getitem__ = getitem  # type: ignore[method-assign]
    try:
        yield found
    finally:
        kind.__getitem__ = original  # type: ignore[method-assign]


def _importing(frame: FrameType | None) -> str:
    """The innermost module whose top level is running."""
    while frame is not None:
        if frame.f_code.co_name == "<module>":
            return str(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    return ""
