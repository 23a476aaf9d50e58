"""Communication marks of Megatron: torch's functions under the names that its modules gave them, and coalesced ones.

`core` wraps torch.distributed's functions while the marks are on (`lastgasp.pytorch.collectives`). Megatron copies
some of them at import, and reduces gradients inside `_coalescing_manager`, where torch only collects them. Both are
wrapped here, at the same times.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
import wrapt
from torch.distributed import distributed_c10d

from lastgasp.adapter import Undo, replace_attribute
from lastgasp.adapter.hooks import Function, holders_of
from lastgasp.adapter.torch import Collectives, CommunicationMarks, Sink, key_of

log = logging.getLogger("lastgasp")

_now = time.monotonic_ns
_HOMES = ("megatron.", "mindspeed", "mindspeed_llm")
_MANAGER = "_coalescing_manager"
_COALESCED = {
    "all_reduce": "HcclAllReduce",
    "reduce_scatter_tensor": "HcclReduceScatter",
    "reduce_scatter_single": "HcclReduceScatter",
    "all_gather_into_tensor": "HcclAllGather",
    "all_gather_single": "HcclAllGather",
}
"""What torch's manager can coalesce -> its name in HCCL; two of them have had two names."""


class MegatronCommunication:
    """Follows the switch; `look` is called once a step on the training thread, `close` at the end.

    Args:
        marks: where ranges go.
    """

    def __init__(self, marks: Sink) -> None:
        self._names = CommunicationMarks(marks)
        self._torch = Collectives(self._names)
        self._undo: list[Undo] = []
        self._told = False

    def look(self) -> None:
        """Wrap or unwrap as the switch says."""
        if self._names.on != self._torch.installed:
            self._torch.look()
            if self._torch.installed:
                self._harmless(self._wrap_copies)
            else:
                self._restore()

    def close(self) -> None:
        """Put everything back. Idempotent."""
        self._torch.close()
        self._restore()

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _wrap_copies(self) -> None:
        """Only in Megatron's own modules."""
        ours: dict[int, Function] = {
            id(function.__wrapped__): function
            for function in vars(dist).values()
            if issubclass(type(function), wrapt.FunctionWrapper)  # what a proxy says of itself may warn
        }
        originals: list[Function] = [function.__wrapped__ for function in ours.values()]
        manager = getattr(distributed_c10d, _MANAGER, None)
        if manager is not None:
            originals.append(manager)
            ours[id(manager)] = self._around_manager(manager)
        for key, holders in holders_of(originals).items():
            for module, name in holders:
                if module.__name__.startswith(_HOMES):
                    self._undo.append(replace_attribute(module, name, partial(_instead, ours[key])))

    def _around_manager(self, original: Function) -> Function:
        @contextmanager
        def _coalescing_manager(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
            begun = _now()
            with original(group, device, async_ops) as handle:
                yield handle
                collected = self._harmless(_collected, group) or []
            if self._names.on and collected:
                self._harmless(self._put, begun, group, collected, handle if async_ops else None)

        return _coalescing_manager

    def _harmless(self, call: Callable[..., Any], *args: Any) -> Any:
        """A failing mark must not fail the call."""
        try:
            return call(*args)
        except Exception:
            if not self._told:
                self._told = True
                log.exception("a collective could not be marked (has torch changed?); training continues without it")
            return None

    def _put(self, begun: int, group: Any, collected: list[Any], handle: Any) -> None:
        name = getattr(collected[0].op, "__name__", "")
        operation = _COALESCED.get(name, name)
        kind = (operation, collected[0].tensor.dtype, key_of(group))
        count = sum(_given(one).numel() for one in collected)
        _at_end(handle, lambda: self._names.put(begun, _now(), count, kind))


def _collected(group: Any) -> list[Any]:
    """What torch has collected so far; empty if this version keeps it elsewhere."""
    state = getattr(getattr(distributed_c10d, "_world", None), "pg_coalesce_state", None) or {}
    return list(state.get(group if group is not None else dist.group.WORLD) or ())


def _given(one: Any) -> Any:
    """Elements are counted as in HCCL: what each rank contributes, or, for a reduce-scatter, receives."""
    scattered = getattr(one.op, "__name__", "").startswith("reduce_scatter")
    return one.dst_tensor if scattered and one.dst_tensor is not None else one.tensor


def _instead(ours: Function, original: Function) -> Function:
    return ours


def _at_end(handle: Any, put: Callable[[], None]) -> None:
    """Call `put` when the last of the work is done, if the handle reports that; otherwise now."""
    works = getattr(handle, "works", None)
    if works:
        try:
            works[-1].get_future().add_done_callback(lambda _: put())
            return
        except RuntimeError:  # this backend has no futures for this operation
            pass
    put()
