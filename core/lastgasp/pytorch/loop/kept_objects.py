"""Objects made outside of the function that `train` calls: each call of it gets them as a new process would have them.

A checkpoint holds parameters, optimizer states and the like. In a process that goes on these objects have more than
that: gradients of a step that was broken off, the mode of an evaluation, a scaler in the middle of a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from lastgasp.errors import UsageError
from lastgasp.pytorch.loop.kept_hooks import KeptHooks
from lastgasp.pytorch.loop.outside import averaged_by, known_to
from lastgasp.pytorch.loop.parts import ddp_of
from lastgasp.pytorch.loop.state import TorchState
from lastgasp.pytorch.unsaved import Values


class KeptModules:
    """The modes of modules and parameters; does not keep them alive.

    Args:
        module: with all below it.
        trained: addresses (`id`) of parameters that begin as trained ones, whatever they are now.
    """

    def __init__(self, module: nn.Module, trained: Collection[int] = ()) -> None:
        self._modules = [(weakref.ref(each), each.training) for each in module.modules()]
        self._parameters = [(weakref.ref(p), p.requires_grad or id(p) in trained) for p in module.parameters()]

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
        begun: what modules kept beside their state before they were trained (`Unsaved.since`).
    """

    begun: Values | None = None

    def __init__(self, state: TorchState, hooks: int) -> None:
        self.as_set, self._averaged = state.as_set, _averaged(state)
        whole = [known for ddp in _wrappers(state) if averaged_by(ddp) == len(known := known_to(ddp))]
        self._modules = KeptModules(state.container, {id(p) for known in whole for p in known})
        owners = *state.container.modules(), *state.container.parameters(), *state.optimizers.values()
        self._hooks = KeptHooks(owners, hooks)
        self._models = {name: weakref.ref(module) for name, module in state.modules.items()}

    def same(self, state: TorchState) -> tuple[str, ...]:
        """How names begin in those models of `state` that were there in the first call."""
        return tuple(f"{name}." for name, found in self._models.items() if found() is state.modules.get(name))

    def enter(self, state: TorchState, note: Callable[[str], object]) -> None:
        """The next call has made `state`, and opens its session.

        Raises:
            UsageError: a model that was made outside of the function is not as it was in the first call.
        """
        state.as_set = self.as_set
        if (now := _averaged(state)) != self._averaged:
            raise UsageError(f"DDP averages {now} gradients, and {self._averaged} when the function was called first: "
                             "a model that is made outside of it was partly frozen after DDP was made")  # fmt: skip
        if self._hooks.enter():
            note("hooks that were registered while the loop ran are still there: one that the loop registers again "
                 "counts twice. Register them before the session is opened")  # fmt: skip

    def renew(self, state: TorchState | None) -> None:
        """Before the next call: `state` is that of the call that has ended; None where that has trained nothing."""
        self._hooks.call()
        for parameter in _trained(state) if state is not None else ():
            parameter.grad = None
        self._modules.renew()
        if state is not None and state.scaler is not None:
            renew_scaler(state.scaler)


def renew_scaler(scaler: Any) -> None:
    """In the middle of a step it takes gradients for unscaled that are not."""
    stages: Any = vars(scaler).get("_per_optimizer_states")
    if stages is not None:
        stages.clear()


def _wrappers(state: TorchState) -> list[Any]:
    return [ddp for model in state.models.values() if (ddp := ddp_of(model)) is not None]


def _averaged(state: TorchState) -> list[int | None]:
    return [averaged_by(ddp) for ddp in _wrappers(state)]


def _trained(state: TorchState) -> list[nn.Parameter]:
    groups = [group for optimizer in state.optimizers.values() for group in optimizer.param_groups]
    return [*state.container.parameters(), *(p for group in groups for p in group["params"])]
