"""Slices become Megatron's own `distrib_optim.pt`, and fp32 weights become the model's: what an all-gather would do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lastgasp_megatron.shards import Slice, state_keys


def merged(optimizer: Any, slices: list[Slice]) -> dict[Any, Any]:
    """The content of `distrib_optim.pt`, as DistributedOptimizer.get_parameter_state_dp_zero returns it.

    Args:
        optimizer: a DistributedOptimizer whose buffers have the layout of the slices.
        slices: of all parts, in order.
    """
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for number, buffer in enumerate(optimizer.buffers):
        kinds = slices[0][number]
        state[number] = {kind: _world(optimizer, buffer, [one[number][kind] for one in slices]) for kind in kinds}
    return state


def _world(optimizer: Any, buffer: Any, parts: list[list[dict[str, Tensor]]]) -> dict[str, Any]:
    world: dict[str, Any] = {}
    for key in state_keys(optimizer):
        complete = torch.empty(buffer.numel_unpadded, dtype=torch.float32, device="cpu")
        begin = 0
        for index, bucket in enumerate(buffer.buckets):
            _fill(complete[begin : begin + bucket.numel_unpadded], [part[index][key] for part in parts])
            begin += bucket.numel_unpadded
        world[key] = complete
    world["numel_unpadded"] = buffer.numel_unpadded
    return world


def _fill(row: Tensor, pieces: list[Tensor]) -> None:
    """One after another; what exceeds the row is padding."""
    at = 0
    for piece in pieces:
        fits = min(piece.numel(), row.numel() - at)
        row[at : at + fits].copy_(piece[:fits])
        at += fits


def weights_of_merged(optimizer: Any, state: dict[Any, Any]) -> dict[int, Tensor]:
    """id of each parameter in the buffers -> its value, rounded from the fp32 weights as Megatron rounds them."""
    found: dict[int, Tensor] = {}
    for number, buffer in enumerate(optimizer.buffers):
        (world,) = state[number].values()
        begins = _unpadded_begins(buffer)
        for param, (start, end, bucket) in buffer.param_index_map.items():
            begin = begins[bucket] + start - buffer.buckets[bucket].offset
            flat = world["param"][begin : begin + end - start]
            found[id(param)] = flat.to(param.dtype).view(param.shape)
    return found


def _unpadded_begins(buffer: Any) -> list[int]:
    begins, at = [], 0
    for bucket in buffer.buckets:
        begins.append(at)
        at += bucket.numel_unpadded
    return begins


def weights_of_masters(optimizer: Any) -> dict[int, Tensor]:
    """The same for an optimizer that has all of it: parameters that have an fp32 copy."""
    found: dict[int, Tensor] = {}
    models = getattr(optimizer, "float16_groups", [])
    masters = getattr(optimizer, "fp32_from_float16_groups", [])
    for model_group, main_group in zip(models, masters, strict=True):
        for model, main in zip(model_group, main_group, strict=True):
            found[id(model)] = main.detach().to(model.dtype)
    return found
