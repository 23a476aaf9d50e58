"""What one rank holds of a step, for its own save and as the bytes that it copies into its arena.

The bytes are a pickle in which each tensor is a place behind it, so that the tensors are copied from where they lie and
read where they are. Whoever writes an image needs nothing else of the rank that it came from.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lastgasp_megatron.merge import Layout
from lastgasp_megatron.shards import HeldSlice
from lastgasp_megatron.topology import Shard

_HEAD = struct.Struct("<qq")  # bytes of the pickle, where the tensors begin
_ALIGNED = 64
Piece = bytes | memoryview


@dataclass(frozen=True)
class Image:
    """What one rank holds of one step.

    Args:
        rank, shard: whose; step: completed iterations.
        file: the path of the rank's file, relative to the directory of checkpoints.
        content: of that file, without random states and with `merge.Weight` in place of weights; None where the file
            is another rank's, whose slice is the first.
        held: its slice of each optimizer's state; empty where the content has all of it.
        layouts: of these optimizers.
        aux: the rank's auxiliary state.
        looked: the optimizer's tensors were found to be what they are taken for.
        training: of which training of the script (`trainings.name_of`).
        own: buffers of the model that are this rank's own (`own_buffers`).
    """

    rank: int
    shard: Shard
    step: int
    file: str
    content: dict[str, Any] | None
    held: tuple[HeldSlice, ...]
    layouts: tuple[Layout, ...]
    aux: bytes
    looked: bool
    training: str = ""
    own: Mapping[str, Tensor] = field(default_factory=dict)


def encoded(image: Image, host: Callable[[int, Tensor], Tensor]) -> list[Piece]:
    """The bytes, in pieces, of which most are the tensors' own memory.

    Args:
        host: number and bytes of a tensor on a device -> the same in the host's memory.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, host)
    pickler.dump(image)
    size = buffer.tell()
    begin = _up(_HEAD.size + size)
    head = (_HEAD.pack(size, begin) + buffer.getvalue()).ljust(begin, b"\0")
    return [head, *pickler.pieces]


def decoded(payload: memoryview) -> Image:
    """The image; its tensors lie in `payload`."""
    size, begin = _HEAD.unpack_from(payload)
    found: Image = _Unpickler(io.BytesIO(payload[_HEAD.size : _HEAD.size + size]), payload[begin:]).load()
    return found


def problem(image: Image) -> str:
    """Why another rank's image cannot be saved, in words: an optimizer's state that cannot be one; else empty."""
    if not image.looked:
        return "it was made before the optimizer's state had been looked at"
    slices = (kinds for held in image.held for kinds in held)
    for bucket in (bucket for kinds in slices for buckets in kinds.values() for bucket in buckets):
        for _, _, tensors in bucket.pieces:
            if found := _problem_of(tensors):
                return found
    return ""


def _problem_of(tensors: dict[str, Tensor]) -> str:
    if not tensors["param"].numel() or not bool(tensors["param"].isfinite().all()):
        return ""  # training itself has come to this
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()) or (name == "exp_avg_sq" and bool((tensor < 0).any())):
            return f"{name} {tuple(tensor.shape)} is not finite, or not a square, and the weights are finite"
    return ""


def _tensor(at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    raise pickle.UnpicklingError("a tensor of an image outside of it")


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, host: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__(buffer, protocol=5)
        self._host, self._at, self._known = host, 0, dict[tuple[Any, ...], int]()
        self.pieces: list[Piece] = []
        self._kept: list[Tensor] = []  # so that no other tensor gets the memory of one that was made for this

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        tensor = obj.detach().contiguous()
        return _tensor, (self._place(tensor), tensor.dtype, tuple(tensor.shape))

    def _place(self, tensor: Tensor) -> int:
        """Where its bytes lie behind the pickle; tensors of the same memory are there once."""
        size = tensor.numel() * tensor.element_size()
        key = (tensor.device, tensor.data_ptr(), size)
        if not size:
            return 0
        if key not in self._known:
            flat = tensor.view(-1).view(torch.uint8)
            if flat.device.type != "cpu":
                flat = self._host(len(self._known), flat)
            self._known[key] = self._at
            self._kept.append(tensor)
            self.pieces.append(flat.numpy().data)
            self._at += size
            if gap := _up(self._at) - self._at:
                self.pieces.append(bytes(gap))
                self._at += gap
        return self._known[key]


class _Unpickler(pickle.Unpickler):
    def __init__(self, buffer: io.BytesIO, tensors: memoryview) -> None:
        super().__init__(buffer)
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        return self._view if (module, name) == (__name__, "_tensor") else super().find_class(module, name)

    def _view(self, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._tensors, dtype=dtype, count=count, offset=at).view(shape)


def _up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
