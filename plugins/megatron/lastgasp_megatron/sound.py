"""Whether the optimizer's tensors are what a checkpoint takes them for, whatever options there are.

Some options keep fp32 weights in another form between two steps (MindSpeed's --reuse-fp32-param: bf16 and a residual in
their memory) or elsewhere (--swap-optimizer). Read as fp32 they would be saved, verified, loaded and make the loss NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lastgasp_megatron.steps import parts_of

_WHY = "some option keeps it in another form or elsewhere between two steps (as --reuse-fp32-param of MindSpeed does)"


@dataclass(frozen=True)
class _Held:
    """What the optimizer holds of one parameter: `main` is what it updates, `live` what the model computes with."""

    main: Tensor
    live: Tensor
    state: Mapping[str, Tensor]


def unsound(optimizer: Any, settled: bool) -> str:
    """Why the optimizer's tensors on this rank cannot be saved as they are, in words; empty when they can.

    The memory of each must be there; fp32 weights must round to the weights that the model computes with; where those
    are finite, all else must be finite, and second moments not below zero. Enters no collective.

    Args:
        optimizer: Megatron's.
        settled: the weights of the model have been copied from the fp32 weights since the last update.
    """
    with torch.no_grad():
        found = (held for one in parts_of(optimizer) for held in _all_held(one))
        return next((f"{said}: {_WHY}" for held in found for said in _problems(held, settled)), "")


def _all_held(optimizer: Any) -> Iterator[_Held]:
    inner = optimizer.optimizer
    live = {id(main): model for main, model in _copies(optimizer)}
    for group in inner.param_groups:
        for main in group["params"]:
            state = {
                name: value
                for name, value in inner.state.get(main, {}).items()
                if isinstance(value, Tensor) and name != "step"
            }
            yield _Held(main.detach(), live.get(id(main), main).detach(), state)


def _copies(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """What the inner optimizer updates, and the part of the model's weights that is copied from it."""
    for kinds in getattr(optimizer, "gbuf_ranges", ()):
        for ranges in (ranges for buckets in kinds.values() for ranges in buckets):
            for param, where in ranges["param_map"].items():
                group, index = optimizer.model_param_group_index_map[param]
                part = where["param"]
                main = optimizer.optimizer.param_groups[group]["params"][index]
                yield main, param.detach().view(-1)[part.start : part.end]
    models, mains = (getattr(optimizer, name, []) for name in ("float16_groups", "fp32_from_float16_groups"))
    for model_group, main_group in zip(models, mains, strict=True):
        yield from zip(main_group, model_group, strict=True)


def _problems(held: _Held, settled: bool) -> Iterator[str]:
    shape = tuple(held.main.shape)
    named = {"fp32 weight": held.main, **held.state}
    absent = [name for name, tensor in named.items() if not _is_there(tensor)]
    if absent or not _is_there(held.live):
        yield f"the memory of {absent[0] if absent else 'a weight'} {shape} is not there"
        return
    if not held.main.numel():
        return
    if settled and held.live is not held.main and not _rounds_to(held.main, held.live):
        yield f"an fp32 weight {shape} does not round to the {_type(held.live)} weight that the model computes with"
    if not _finite(held.live):
        return  # training itself has come to this
    for name, tensor in named.items():
        if name == "exp_avg_sq":
            if not bool(tensor.min() >= 0):  # NaN is not, either
                yield f"{name} {shape} has elements that are not squares"
        elif not _finite(tensor):
            yield f"{name} {shape} is not finite, and the model's weights are"


def _is_there(tensor: Tensor) -> bool:
    """Whether there is memory behind it: reading what was swapped out may end the process."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() >= needed


def _rounds_to(main: Tensor, live: Tensor) -> bool:
    rounded = main.to(live.dtype).view(live.shape)
    return torch.equal(rounded, live) or bool(((rounded == live) | (rounded.isnan() & live.isnan())).all())


def _finite(tensor: Tensor) -> bool:
    low, high = torch.aminmax(tensor)  # one pass without a copy; NaN comes through
    return bool((low.isfinite() & high.isfinite()).item())


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
