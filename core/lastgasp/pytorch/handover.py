"""Gives what one rank holds in memory to others, through the default process group."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 256 << 20
"""Bytes of one broadcast."""


def cloned(value: Any) -> Any:
    """A copy of a checkpoint in host memory, which nobody else writes to."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        found = copy.copy(value)  # made from pairs, a Counter would count them, and an OrderedDict lose its attributes
        for key, item in value.items():
            found[key] = cloned(item)
        return found
    if type(value) in (list, tuple):
        return type(value)(cloned(item) for item in value)
    return copy.deepcopy(value)


def hand_over(value: Any, source: int) -> Any:
    """Return `value` of rank `source`; all ranks call it together. Only the ranks that give None take it.

    The value was made by this very job, so that it is unpickled without restrictions.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    data = _encoded(value) if dist.get_rank() == source else b""
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, source)
    whole = torch.empty(int(size), dtype=torch.uint8)
    if data:
        whole.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    for begin in range(0, len(whole), CHUNK):
        part = whole[begin : begin + CHUNK].to(device)
        dist.broadcast(part, source)
        whole[begin : begin + CHUNK] = part.cpu()
    return torch.load(io.BytesIO(whole.numpy().tobytes()), weights_only=False) if value is None else value


def _encoded(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
