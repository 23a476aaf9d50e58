"""Slices become Megatron's own `distrib_optim.pt`, and fp32 weights become the model's: what an all-gather would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lastgasp_megatron.shards import Slice, state_keys


@dataclass(frozen=True)
class Layout:
    """How the slices of an optimizer become whole rows.

    Args:
        keys: names of the tensors.
        buffers: of each buffer its elements without padding, and those of its buckets.
    """

    keys: tuple[str, ...]
    buffers: tuple[tuple[int, tuple[int, ...]], ...]


def layout_of(optimizer: Any) -> Layout:
    """That of a DistributedOptimizer."""
    return Layout(
        state_keys(optimizer),
        tuple(
            (buffer.numel_unpadded, tuple(bucket.numel_unpadded for bucket in buffer.buckets))
            for buffer in optimizer.buffers
        ),
    )


Merged = dict[Any, Any]
"""A whole optimizer's state, as DistributedOptimizer.get_parameter_state_dp_zero returns it."""


def merged(layout: Layout, slices: list[Slice], weights_only: bool = False) -> Merged:
    """What a `distrib_optim.pt` holds of one optimizer.

    Args:
        slices: of all parts, in order.
        weights_only: without moments, for who writes no more than the model.
    """
    keys = layout.keys[:1] if weights_only else layout.keys
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for number, (size, buckets) in enumerate(layout.buffers):
        kinds = slices[0][number]
        state[number] = {
            kind: _world(keys, size, buckets, [one[number][kind] for one in slices]) for kind in kinds
        }
    return state


def _world(
    keys: tuple[str, ...], size: int, buckets: tuple[int, ...], parts: list[list[dict[str, Tensor]]]
) -> dict[str, Any]:
    world: dict[str, Any] = {}
    for key in keys:
        complete = torch.empty(size, dtype=torch.float32, device="cpu")
        begin = 0
        for index, elements in enumerate(buckets):
            _fill(complete[begin : begin + elements], [part[index][key] for part in parts])
            begin += elements
        world[key] = complete
    world["numel_unpadded"] = size
    return world


def _fill(row: Tensor, pieces: list[Tensor]) -> None:
    """One after another; what exceeds the row is padding."""
    at = 0
    for piece in pieces:
        fits = min(piece.numel(), row.numel() - at)
        row[at : at + fits].copy_(piece[:fits])
        at += fits


class Weight(Protocol):
    """What stands for a parameter of the model until its fp32 weights are complete."""

    def value(self, states: Sequence[Merged]) -> Tensor:
        """The parameter, rounded as Megatron rounds it, by what `merged` returns of each optimizer: none has slices, or
        all have.
        """


@dataclass(frozen=True)
class CutOut:
    """A parameter that lies in buffer `buffer` of an optimizer from `begin` to `end`, padding left out."""

    optimizer: int
    buffer: int
    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def value(self, states: Sequence[Merged]) -> Tensor:
        """As `Weight` says."""
        (world,) = states[self.optimizer][self.buffer].values()
        flat: Tensor = world["param"][self.begin : self.end]
        return flat.to(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Rounded:
    """A parameter whose fp32 weights one rank has."""

    main: Tensor
    dtype: torch.dtype

    def value(self, states: Sequence[Merged]) -> Tensor:
        """As `Weight` says."""
        return self.main.detach().to(self.dtype)


def weights_of_merged(optimizer: Any, place: int = 0) -> dict[int, Weight]:
    """id of each parameter in the buffers of a distributed optimizer, which is at `place` -> what will be its value."""
    found: dict[int, Weight] = {}
    for number, buffer in enumerate(optimizer.buffers):
        begins = _unpadded_begins(buffer)
        for param, (start, end, bucket) in buffer.param_index_map.items():
            begin = begins[bucket] + start - buffer.buckets[bucket].offset
            found[id(param)] = CutOut(place, number, begin, begin + end - start, param.dtype, tuple(param.shape))
    return found


def _unpadded_begins(buffer: Any) -> list[int]:
    begins, at = [], 0
    for bucket in buffer.buckets:
        begins.append(at)
        at += bucket.numel_unpadded
    return begins


def weights_of_masters(optimizer: Any) -> dict[int, Weight]:
    """The same for an optimizer that has all of it: parameters that have an fp32 copy."""
    found: dict[int, Weight] = {}
    models = getattr(optimizer, "float16_groups", [])
    masters = getattr(optimizer, "fp32_from_float16_groups", [])
    for model_group, main_group in zip(models, masters, strict=True):
        for model, main in zip(model_group, main_group, strict=True):
            found[id(model)] = Rounded(main, model.dtype)
    return found


def with_values(content: Mapping[str, Any], states: Sequence[Merged]) -> dict[str, Any]:
    """The content of a rank's file with the weights themselves: that of its models is one level deep."""
    return {
        key: {name: _value(one, states) for name, one in part.items()} if key.startswith("model") else part
        for key, part in content.items()
    }


def _value(one: Any, states: Sequence[Merged]) -> Any:
    return one.value(states) if isinstance(one, CutOut | Rounded) else one
