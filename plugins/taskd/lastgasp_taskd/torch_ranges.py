"""`torch.npu.mstx` where there is no torch_npu: the guides' edit of the training loop calls it."""

from __future__ import annotations

import importlib.util
import weakref
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lastgasp.adapter.worker import session_here

from .ranges import Ranges
from .worker import Here


class Npu(ModuleType):
    """The part of `torch.npu` that the guides use: no device, mstx, and a current stream to hand to it."""

    __lastgasp__ = True

    def __init__(self, ranges: Ranges) -> None:
        super().__init__("torch.npu", "lastgasp-taskd's; there is no NPU here.")
        self.mstx = ranges

    def is_available(self) -> bool:
        """No."""
        return False

    def device_count(self) -> int:
        """None."""
        return 0

    def current_stream(self, device: Any = None) -> object:
        """Something that is not None: the range then has rows of the device."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"torch.npu.{name}: torch_npu is not installed; lastgasp-taskd has mstx alone")


def serve(worker: Here) -> None:
    """Put it in place, except where torch_npu has its own; count steps, where the script marks none."""
    if getattr(getattr(torch, "npu", None), "__lastgasp__", False):
        return
    _Steps(worker)
    if hasattr(torch, "npu") or importlib.util.find_spec("torch_npu") is not None:
        return
    vars(torch)["npu"] = Npu(Ranges(worker, session_here))


class _Steps:
    """Counts the updates of the busiest optimizer, until the script's own ranges tell steps."""

    def __init__(self, worker: Here) -> None:
        self._worker, self._updates = worker, weakref.WeakKeyDictionary[Any, int]()
        register_optimizer_step_post_hook(self._updated)

    def _updated(self, optimizer: Any, args: Any, options: Any) -> None:
        if self._worker.told or session_here():
            return  # torch walks over its hooks now, so this one stays
        self._updates[optimizer] = count = self._updates.get(optimizer, 0) + 1
        if count == max(self._updates.values()):
            self._worker.updated(count)
