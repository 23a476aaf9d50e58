"""Gradients that one step leaves for an update of a later one: no checkpoint has them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lastgasp.pytorch.unsaved import some


class HeldGradients:
    """Gradients that one step leaves for an update of a later one: of an optimizer that is stepped less often than
    another, or where nothing clears them between two updates.

    Looked for behind steps 1, 2, 4, 8, ...: which are there, and not zeros, when the next backward pass begins, and are
    the same tensors when their optimizer uses them. What is cleared before its own backward pass is another by then, or
    zeros when that pass begins.

    Args:
        named: parameters with their names; optimizers: torch's.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._names = {id(parameter): name for name, parameter in named}
        self._optimizers = list(optimizers)
        self._steps, self._due = 0, False
        self._hooks, self._used = list[RemovableHandle](), list[RemovableHandle]()
        self._left: list[list[tuple[Tensor, weakref.ref[Tensor]]]] = []
        self._found: list[str] = []

    def step_over(self) -> None:
        """A step is complete."""
        self._steps += 1
        self._left = []
        self._due = not self._steps & (self._steps - 1)
        while self._used:  # torch is iterating over the hooks while it calls one
            self._used.pop().remove()

    def remove(self) -> None:
        """Training is over: leave the optimizers as they were."""
        for handle in self._hooks:
            handle.remove()

    def backward_begins(self) -> None:
        """Call before each backward pass."""
        if not (self._due or self._left) or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        for before in self._left:
            before[:] = [(one, ref) for one, ref in before if (grad := one.grad) is ref() and _counts(grad)]
        if not self._due:
            return
        self._due = False
        for optimizer in self._optimizers:
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            left = [(one, weakref.ref(one.grad)) for one in parameters if one.grad is not None and _counts(one.grad)]
            if left and hasattr(optimizer, "_optimizer_step_pre_hooks"):  # not of one that wraps another one
                self._look_again(optimizer, left)

    def note(self) -> str:
        """As of `Unsaved`."""
        return (
            f"gradients that a step leaves for an update of a later one are in no checkpoint: {some(self._found)}. "
            "Unless they are set to zero in between, a fault there loses them. Clear them, or use them, in their step"
        ) if self._found else ""  # fmt: skip

    def _look_again(self, optimizer: torch.optim.Optimizer, left: list[tuple[Tensor, weakref.ref[Tensor]]]) -> None:
        def uses(*_: Any) -> None:
            self._used.append(handle)
            used = [self._names.get(id(one), "?") for one, grad in left if one.grad is not None and one.grad is grad()]
            self._found += [name for name in used if name not in self._found]

        self._left.append(left)
        handle = optimizer.register_step_pre_hook(uses)
        self._hooks.append(handle)


def _counts(gradient: Tensor | None) -> bool:
    own = getattr(gradient, "_local_tensor", gradient)  # of a DTensor: no rank waits for another here
    try:
        return own is not None and own.layout is torch.strided and bool(own.any())
    except RuntimeError:  # of a type that torch cannot ask
        return False
