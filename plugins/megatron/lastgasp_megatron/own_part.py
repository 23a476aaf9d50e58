"""`distrib_optim.pt` without Gloo groups: each rank reads its own part of it, in place of a scatter from rank 0.

With --disable-gloo-process-groups Megatron itself can load only torch_dist, and gasps are of format torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lastgasp.adapter import CheckpointError, Undo
from lastgasp_megatron.shards import state_keys
from lastgasp_megatron.steps import parts_of, wrap


def without_gloo(optimizer: Any) -> Undo:
    """Make each rank of a distributed optimizer without a Gloo group load its own part; returns the undo."""
    parts = parts_of(optimizer)
    one: Any = parts[0] if len(parts) == 1 else None  # of several `settings` says no
    needed = hasattr(one, "gbuf_ranges") and getattr(one, "data_parallel_group_gloo", one) is None
    if not needed or not hasattr(one, "_set_main_param_and_optimizer_states"):
        return lambda: None

    def around(original: Callable[..., Any], args: Any, kwargs: Any) -> None:
        if kwargs.get("update_legacy_format"):
            return original(*args, **kwargs)  # type: ignore[no-any-return]
        group = one.data_parallel_group
        load_own_part(one, args[0] if args else kwargs["filename"], group.rank(), group.size())
        return None

    return wrap(one, "load_parameter_state", around)


def load_own_part(optimizer: Any, filename: str, part: int, parts: int) -> None:
    """What `load_parameter_state_from_dp_zero` does, for one of `parts` ranks, from a mapping of the file.

    Raises:
        CheckpointError: the file is of another model.
    """
    state = torch.load(filename, map_location="cpu", mmap=True)
    for number, (kinds, buffer) in enumerate(zip(optimizer.gbuf_ranges, optimizer.buffers, strict=True)):
        for kind, all_ranges in kinds.items():
            world = state[number][kind]
            if world["numel_unpadded"] != buffer.numel_unpadded:
                raise CheckpointError(
                    f"{filename} holds {world['numel_unpadded']} elements of buffer {number}, and the model has "
                    f"{buffer.numel_unpadded}"
                )
            begin = 0
            for ranges, bucket in zip(all_ranges, buffer.buckets, strict=True):
                size = bucket.grad_data.numel() // parts
                rows = {
                    key: _row(world[key][begin : begin + bucket.numel_unpadded], part * size, size)
                    for key in state_keys(optimizer)
                }
                _set(optimizer, ranges["param_map"], rows)
                begin += bucket.numel_unpadded


def _row(bucket: Tensor, start: int, size: int) -> Tensor:
    """`size` elements from `start`, padded with zeros beyond the end."""
    found = bucket[start : start + size]
    return torch.nn.functional.pad(found, (0, size - found.numel())) if found.numel() < size else found


def _set(optimizer: Any, param_map: Any, rows: dict[str, Tensor]) -> None:
    for param, where in param_map.items():
        place = where["gbuf_local"]
        tensors = {key: row[place.start : place.end] for key, row in rows.items()}
        with torch.no_grad():
            optimizer._set_main_param_and_optimizer_states(param, tensors)
