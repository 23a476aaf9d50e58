"""Optimizer states come back in the dtype that they had.

torch gives each tensor of a state that it loads, but `step`, the dtype of its parameter: what an optimizer keeps in
another one (float32 master weights of bfloat16 parameters, NAdam's `mu_product`, states of 8 bits) is rounded then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_States = Mapping[str, Any]
_HOOKS = tuple(f"_optimizer_{when}" for when in (
    "state_dict_pre_hooks", "state_dict_post_hooks", "load_state_dict_pre_hooks", "load_state_dict_post_hooks",
))  # fmt: skip


def load_parts(
    modules: Mapping[str, nn.Module], models: _States, optimizers: Mapping[str, Any], states: _States
) -> None:
    """Load the states of modules and of their optimizers, each by its name."""
    alike = all(have_dtypes_of(module.state_dict(), models[name]) for name, module in modules.items())
    for name, module in modules.items():
        module.load_state_dict(models[name])
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(states[name])
        if alike:
            give_dtypes_back(optimizer, states[name])


def give_dtypes_back(optimizer: Any, stored: Mapping[str, Any]) -> None:
    """Behind `optimizer.load_state_dict(stored)`, where the parameters have the dtypes that they were saved with.

    An optimizer that saves or loads in a way of its own is left alone.
    """
    own = type(optimizer)
    if not isinstance(optimizer, Optimizer) or own.state_dict is not Optimizer.state_dict:
        return
    if own.load_state_dict is not Optimizer.load_state_dict or any(getattr(optimizer, name) for name in _HOOKS):
        return
    numbers = (number for group in stored["param_groups"] for number in group["params"])
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for parameter, number in zip(parameters, numbers, strict=True):
        live, saved = optimizer.state.get(parameter), stored["state"].get(number)
        if not isinstance(live, dict) or not isinstance(saved, Mapping):
            continue
        for name, value in saved.items():
            if type(value) is Tensor and type(now := live.get(name)) is Tensor and now.dtype != value.dtype:
                live[name] = value.detach().to(now.device, copy=True)


def have_dtypes_of(live: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Whether a model's state is in the dtypes of the stored one, as far as both have it."""
    pairs = ((value, stored.get(name)) for name, value in live.items())
    return all(a.dtype == b.dtype for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))
