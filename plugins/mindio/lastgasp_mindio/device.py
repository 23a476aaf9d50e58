"""The accelerator of this rank, on threads of the engine: handlers expect it to be chosen there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_chosen: tuple[Any, int] | None = None


def remember() -> None:
    """On the training thread, once a device was chosen: the handlers' threads get the same one."""
    global _chosen
    module = _module()
    _chosen = (module, int(module.current_device())) if module is not None else None


def index() -> int:
    """The number of the device; 0 on a CPU."""
    return _chosen[1] if _chosen is not None else 0


@contextmanager
def current() -> Iterator[None]:
    """Choose it on this thread; each thread begins with device 0."""
    if _chosen is not None:
        _chosen[0].set_device(_chosen[1])
    yield


def _module() -> Any:
    torch: Any = sys.modules.get("torch")
    for name in ("npu", "cuda"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and module.is_initialized():
            return module
    return None
