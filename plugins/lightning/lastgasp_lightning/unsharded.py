"""A module as it was before `configure_model()`: with `fully_shard` it gets other classes, parameters and hooks.

`fully_shard` cannot be applied to a module twice. So an entry of `fit` begins with modules that are as those of a new
process, but for the values of parameters, which come from arenas. The original parameters are not kept, as they are
those of all ranks together: empty ones of the same shape take their places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.fsdp import FullyShardedDataParallel

_INTERNAL = ("_parameters", "_buffers", "_modules")


class KeptParts:
    """The modules of a model before anything of it was sharded."""

    def __init__(self, model: nn.Module) -> None:
        made: dict[int, _Empty] = {}
        self._modules = [(one, type(one), *_own(one), _parameters(one, made)) for one in model.modules()]
        self._made = list(made.values())

    def renew(self) -> None:
        """Have them again, with new parameters of which nobody has written the values."""
        fresh = {empty: empty.make() for empty in self._made}
        known: Any = getattr(_composable_state, "_module_state_mapping", {})  # a private name of torch 2.13
        for module, cls, attributes, inner, parameters in self._modules:
            own = vars(module)
            own.clear()
            own.update(attributes)
            for there, content in inner:
                there.clear()
                there.update(content)
            module._parameters.update({name: fresh[one] if one else None for name, one in parameters.items()})
            module.__class__ = cls
            known.pop(module, None)


class _Empty:
    """What is known of a parameter; the same one for all its places."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._like = torch.empty_like(parameter, device="meta")
        self._device, self._trained = parameter.device, parameter.requires_grad
        self._attributes = dict(vars(parameter))

    def make(self) -> nn.Parameter:
        found = nn.Parameter(torch.zeros_like(self._like, device=self._device), self._trained)
        vars(found).update(self._attributes)
        return found


def cannot_shard_again(model: nn.Module) -> str:
    """Why a model could not be sharded once more after a fault; empty if it can."""
    path: str
    module: nn.Module
    for path, module in model.named_modules():
        wrapped = isinstance(module, FullyShardedDataParallel)
        if wrapped or own_class(module) is not type(module) or of_sharding(module):
            return f"{path or type(model).__name__} is sharded already, and not in configure_model()"
        for name, one in module._parameters.items():
            if one is not None and (type(one) is not nn.Parameter or one.is_sparse):
                kind = "a sparse tensor" if type(one) is nn.Parameter else f"of type {type(one).__name__}"
                return f"{path}.{name} is {kind}, which could not be made anew after a fault".lstrip(".")
    return ""


def own_class(module: nn.Module) -> type:
    """The class of a module as its author knows it."""
    cls = type(module)
    place = getattr(cls, "_orig_cls_mro_index", None)
    return cls.__mro__[place] if isinstance(place, int) else cls


def of_sharding(module: nn.Module) -> frozenset[str]:
    """The attributes that torch's composable functions, such as `fully_shard`, have added to a module."""
    return frozenset(name for name in vars(module) if name.startswith(("__composable_api_", "_is_fsdp_", "_fsdp_")))


def _own(module: nn.Module) -> tuple[dict[str, Any], list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Its attributes; and those dictionaries of torch's, which are changed in place, with their content."""
    own = dict(vars(module))
    inner = [value for name, value in own.items() if isinstance(value, dict) and _is_torchs(name, value)]
    return own, [(one, {} if one is own["_parameters"] else dict(one)) for one in inner]


def _is_torchs(name: str, value: dict[str, Callable[..., Any]]) -> bool:
    return name in _INTERNAL or name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))


def _parameters(module: nn.Module, made: dict[int, _Empty]) -> dict[str, _Empty | None]:
    found: dict[str, _Empty | None] = {}
    for name, one in module._parameters.items():
        if one is not None and id(one) not in made:
            made[id(one)] = _Empty(one)
        found[name] = made[id(one)] if one is not None else None
    return found
