"""Nested Python objects with tensors in them, as bytes: the tensors raw, from where they lie, and all else pickled.

What is no tensor is pickled when it is captured, so it is as it was then. Tensors are followed where they lie: they are
those of then for as long as nobody updates them.
"""

from __future__ import annotations

import io
import pickle
import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

VERSION = 1
_HEAD = struct.Struct("<8sQQ")  # magic, bytes of the head, where the tensors begin
_MAGIC = b"LGPICKL1"
_ALIGNED = 64


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor: `torch.<dtype>`, its shape, and where its bytes are behind the head."""

    dtype: str
    shape: tuple[int, ...]
    at: int
    nbytes: int


class Head(msgspec.Struct, frozen=True):
    """What comes before the tensors.

    Attributes:
        rank, world_size: whose objects they are.
        rows: the tensors, by the numbers that stand for them in `pickled`.
        nbytes: of all tensors.
        pickled: the objects.
    """

    rank: int
    world_size: int
    rows: tuple[Row, ...]
    nbytes: int
    pickled: bytes
    version: int = VERSION


_DECODER = msgspec.msgpack.Decoder(Head)


@dataclass(frozen=True)
class Captured:
    """Objects as `capture` found them.

    Attributes:
        head: describes them; tensors: the live ones, in the order of `head.rows`.
    """

    head: Head
    tensors: list[Tensor]

    def payload(self) -> list[bytes | memoryview]:
        """What `parse` reads, in pieces, of the tensors as they are now."""
        encoded = msgspec.msgpack.encode(self.head)
        begin = -(-(_HEAD.size + len(encoded)) // _ALIGNED) * _ALIGNED
        pieces: list[bytes | memoryview] = [
            (_HEAD.pack(_MAGIC, len(encoded), begin) + encoded).ljust(begin, b"\0")
        ]
        at = 0
        for row, tensor in zip(self.head.rows, self.tensors, strict=True):
            if row.nbytes:
                pieces += [b"\0" * (row.at - at), _bytes_of(tensor)]
                at = row.at + row.nbytes
        return pieces

    def objects(self) -> Any:
        """The objects again, with the live tensors, on the CPU."""
        return _unpickled(self.head, [tensor.cpu() for tensor in self.tensors])


def capture(objects: Any, rank: int, world_size: int) -> Captured:
    """Pickle what is no tensor, and note where the tensors are.

    Raises:
        ValueError: something cannot be pickled, or a tensor is no plain memory.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(objects)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"values of the engine cannot be pickled: {error}") from error
    return Captured(Head(rank, world_size, tuple(pickler.rows), pickler.end, buffer.getvalue()), pickler.tensors)


def parse(payload: Any) -> tuple[Head, memoryview]:
    """Head and bytes of the tensors.

    Raises:
        ValueError: it is none of this version, or incomplete.
    """
    whole = memoryview(payload).cast("B")
    if len(whole) < _HEAD.size:
        raise ValueError(f"captured objects have at least {_HEAD.size} bytes, got {len(whole)}")
    magic, length, begin = _HEAD.unpack_from(whole)
    if magic != _MAGIC or not _HEAD.size + length <= begin <= len(whole):
        raise ValueError("no captured objects, or cut short")
    try:
        head = _DECODER.decode(whole[_HEAD.size : _HEAD.size + length])
    except msgspec.DecodeError as error:
        raise ValueError(f"the head of captured objects: {error}") from error
    if head.version != VERSION:
        raise ValueError(f"captured objects of version {head.version}; this lastgasp reads version {VERSION}")
    if begin + head.nbytes > len(whole) or any(r.at < 0 or r.at + r.nbytes > head.nbytes for r in head.rows):
        raise ValueError("captured objects whose tensors lie outside of them")
    return head, whole[begin : begin + head.nbytes]


def restore(payload: Any) -> Any:
    """The objects, with tensors on the bytes of `payload` where these are writable, else on copies.

    Its digest was checked, so this very job has written it: it may hold pickles.

    Raises:
        ValueError: as `parse`.
    """
    head, data = parse(payload)
    return _unpickled(head, [_tensor_on(data, row) for row in head.rows])


class _Pickler(pickle.Pickler):
    """Puts a number in the place of each tensor; tensors that are the same memory have one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tensors, self.rows, self.end = list[Tensor](), list[Row](), 0
        self._known: dict[tuple[Any, ...], int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        if obj.layout is not torch.strided or obj.is_quantized:
            raise ValueError(f"a tensor of layout {obj.layout}, whose memory is not its value")
        tensor = obj.detach()
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in self._known:
            return self._known[key]
        self._known[key] = number = len(self.rows)
        nbytes = tensor.numel() * tensor.element_size()
        at = -(-self.end // _ALIGNED) * _ALIGNED if nbytes else 0
        self.rows.append(Row(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), at, nbytes))
        self.tensors.append(tensor)
        self.end = at + nbytes if nbytes else self.end
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        return self._tensors[int(pid)]


def _unpickled(head: Head, tensors: list[Tensor]) -> Any:
    return _Unpickler(io.BytesIO(head.pickled), tensors).load()


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data


def _tensor_on(data: memoryview, row: Row) -> Tensor:
    dtype: torch.dtype = getattr(torch, row.dtype)
    if not row.nbytes:
        return torch.empty(row.shape, dtype=dtype)
    raw = data[row.at : row.at + row.nbytes]
    return torch.frombuffer(bytearray(raw) if raw.readonly else raw, dtype=dtype).view(row.shape)
