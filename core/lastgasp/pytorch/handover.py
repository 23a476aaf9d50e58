"""Gives what one rank holds in memory to others, through the default process group."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lastgasp.pytorch.io import without_crc32

CHUNK = 256 << 20
"""Bytes that are sent at once."""


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


def hand_over(value: Any, source: int, takers: Iterable[int]) -> Any:
    """Return `value` of rank `source` on the `takers`, and the own one on all others; all ranks call it together.

    The value was made by this very job, so that it is unpickled without restrictions.
    """
    rank = dist.get_rank()
    if rank != source:
        return _taken(source) if rank in takers else value
    data = _encoded(value)
    for taker in takers:
        dist.send(torch.tensor([len(data)], device=_device()), taker)
        for begin in range(0, len(data), CHUNK):
            dist.send(data[begin : begin + CHUNK].to(_device()), taker)
    return value


def _taken(source: int) -> Any:
    size = torch.zeros(1, dtype=torch.int64, device=_device())
    dist.recv(size, source)
    whole = torch.empty(int(size), dtype=torch.uint8)
    for begin in range(0, len(whole), CHUNK):
        part = whole[begin : begin + CHUNK]
        received = part.to(_device())
        dist.recv(received, source)
        part.copy_(received)
    return torch.load(io.BytesIO(whole.numpy().data), weights_only=False)


def _device() -> torch.device:
    """Of tensors that the default group takes: on the host, if it takes any from there ("cpu:gloo,cuda:nccl")."""
    host = dist.get_backend() != "nccl" or "cpu:" in str(dist.get_backend_config())
    return torch.device("cpu") if host else torch.device("cuda", torch.cuda.current_device())


def _encoded(value: Any) -> Tensor:
    file = io.BytesIO()
    with without_crc32():  # torch.load never checks it
        torch.save(value, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
