"""Objects made outside of the function that `train` calls: each call of it gets them as a new process would have them.

A checkpoint holds parameters, optimizer states and the like. In a process that goes on these objects have more than
that: gradients of a step that was broken off, the mode of an evaluation, a scaler in the middle of a step.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from lastgasp.pytorch.loop.state import TorchState


class KeptModules:
    """The modes of modules and parameters; does not keep them alive."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = [(weakref.ref(each), each.training) for each in module.modules()]
        self._parameters = [(weakref.ref(p), p.requires_grad) for p in module.parameters()]

    def renew(self) -> None:
        """Those modes again, and no gradients."""
        for module, training in self._modules:
            if (found := module()) is not None:
                found.training = training
        for reference, flag in self._parameters:
            if (kept := reference()) is not None:
                kept.grad = None
                kept.requires_grad_(flag)


class KeptObjects:
    """What is known of the objects of a `train`, from the first call of its function; does not keep them alive.

    Attributes:
        as_set: what the script has set. Optimizers and schedulers that are made outside have trained by the next call.
    """

    def __init__(self, state: TorchState) -> None:
        self._modules, self.as_set = KeptModules(state.container), state.as_set

    def enter(self, state: TorchState) -> None:
        """The next call has made `state`."""
        state.as_set = self.as_set

    def renew(self, state: TorchState) -> None:
        """Before the next call: `state` is that of the call that has ended."""
        for parameter in _trained(state):
            parameter.grad = None
        self._modules.renew()
        if state.scaler is not None:
            renew_scaler(state.scaler)


def renew_scaler(scaler: Any) -> None:
    """In the middle of a step it takes gradients for unscaled that are not."""
    stages: Any = vars(scaler).get("_per_optimizer_states")
    if stages is not None:
        stages.clear()


def _trained(state: TorchState) -> list[nn.Parameter]:
    groups = [group for optimizer in state.optimizers.values() for group in optimizer.param_groups]
    return [*state.container.parameters(), *(p for group in groups for p in group["params"])]
