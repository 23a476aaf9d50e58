"""A copy of parameters and optimizer states from before the update in progress.

Loops that wait for other ranks between an update and the end of the step (several optimizers, an evaluation in between,
a loss that is averaged for the log, closures) can be stuck there by a fault; then this copy is what is saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Address = tuple[int, tuple[int, ...]]
"""Address and shape of a tensor: two views may begin at the same address."""


def address(tensor: Tensor) -> Address:
    """The key of a tensor; of a sparse one that of its values."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values().data_ptr(), tuple(tensor.shape)
    return (tensor if tensor.layout is torch.strided else tensor.values()).data_ptr(), tuple(tensor.shape)


class Copies:
    """Memory for one copy, refreshed before the first update of each step.

    Args:
        modules: whose parameters are copied.
        optimizers: whose states are copied.

    Attributes:
        valid: the copy holds the state at the end of the last step, and an update has begun since.
        nbytes: bytes that it takes.
    """

    def __init__(self, modules: Iterable[nn.Module], optimizers: Sequence[Any]) -> None:
        unique = {id(p): p for module in modules for p in module.parameters()}
        self._live: list[Tensor] = list(unique.values())
        self._optimizers = optimizers
        self._kept: list[Tensor] = []
        self._states: list[Any] = []
        self.valid = False
        self.nbytes = 0

    def take(self) -> None:
        """Copy. Memory is allocated by the first call, and when a state has grown."""
        tensors: list[Tensor] = [p.detach() for p in self._live]
        self._states = [_without_tensors(o.state_dict(), tensors) for o in self._optimizers]
        same = len(tensors) == len(self._kept) and all(
            a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
            for a, b in zip(tensors, self._kept, strict=True)
        )
        with torch.no_grad():
            if same:
                torch._foreach_copy_(self._kept, tensors)
            else:
                self._kept = [t.detach().clone() for t in tensors]
                self.nbytes = sum(t.numel() * t.element_size() for t in self._kept)
        self.valid = True

    def parameters(self) -> Iterable[tuple[Address, Tensor]]:
        """Key of the live parameter -> its copy."""
        return ((address(p), kept) for p, kept in zip(self._live, self._kept, strict=False))

    def optimizers(self) -> list[dict[str, Any]]:
        """What each optimizer's `state_dict` returned at that time."""
        return [_with_tensors(state, self._kept) for state in self._states]


class _At(int):
    """A placeholder for a tensor: its number."""


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return _At(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _without_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_without_tensors(item, tensors) for item in value)
    return value


def _with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _At):
        return tensors[value]
    if isinstance(value, dict):
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_with_tensors(item, tensors) for item in value)
    return value
