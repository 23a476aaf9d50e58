"""Gives what one rank holds in memory to others, through the default process group."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.serialization import default_restore_location, location_tag
from torch.storage import TypedStorage

CHUNK = 256 << 20
"""Bytes that are sent at once."""
SMALL = 1 << 16
"""Bytes up to which a tensor's memory is sent with the text: an optimizer has thousands of step counters."""

HUGE = 4 << 20
"""Bytes from which on memory is asked for in huge pages: the first touch of small ones takes several times the copy."""
_MADV_HUGEPAGE = 14

_Known = tuple[int, bytes | None, str, torch.dtype]
"""Of the memory of a tensor: its number, its bytes if they are few, where it is, its type."""


def cloned(value: Any) -> Any:
    """A copy of a checkpoint in host memory, which nobody else writes to."""
    if isinstance(value, Tensor):
        return _on_host(value.detach())
    if isinstance(value, dict):
        found = copy.copy(value)  # made from pairs, a Counter would count them, and an OrderedDict lose its attributes
        for key, item in value.items():
            found[key] = cloned(item)
        return found
    if type(value) in (list, tuple):
        return type(value)(cloned(item) for item in value)
    return copy.deepcopy(value)


def _on_host(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.nbytes < HUGE:
        return tensor.to("cpu", copy=True)
    return _in_huge_pages(torch.empty_like(tensor, device="cpu")).copy_(tensor)


def _in_huge_pages(new: Tensor) -> Tensor:
    """The same tensor, whose memory nobody has touched, in huge pages if the kernel gives some."""
    page = os.sysconf("SC_PAGESIZE")
    memory = new.untyped_storage()
    begin, end = -(-memory.data_ptr() // page) * page, (memory.data_ptr() + memory.nbytes()) // page * page
    if end - begin >= HUGE:  # advice: what comes of it makes no difference
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
    return new


def parts_of(value: Any) -> list[Tensor]:
    """Pickle a value into tensors of bytes: a text, and each large tensor's own memory, of which nothing is copied."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return [torch.frombuffer(file.getbuffer(), dtype=torch.uint8), *map(_bytes_of, pickler.large)]


def made_of(parts: list[Tensor]) -> Any:
    """What the parts are of: its large tensors take the memory of the parts, which must be on the host."""
    text, *large = parts
    return _Unpickler(io.BytesIO(text.numpy().data), [part.untyped_storage() for part in large]).load()


def hand_over(value: Any, source: int, takers: Iterable[int]) -> Any:
    """Return `value` of rank `source` on the `takers`, and the own one on all others; all ranks call it together.

    Tensors go from memory to memory: to write them by `torch.save` first and read that takes far longer than to send
    them. The value was made by this very job, so that it is unpickled without restrictions.
    """
    rank = dist.get_rank()
    if rank != source:
        return _taken(source) if rank in takers else value
    parts = parts_of(value)
    sizes = torch.tensor([len(part) for part in parts])
    for taker in takers:
        dist.send(torch.tensor([len(parts)], device=_device()), taker)
        for part in (sizes, *parts):
            for begin in range(0, len(part), CHUNK):
                dist.send(part[begin : begin + CHUNK].to(_device()), taker)
    return value


def _taken(source: int) -> Any:
    count = int(_received(1, torch.int64, source))
    sizes = _received(count, torch.int64, source).tolist()
    return made_of([_received(size, torch.uint8, source) for size in sizes])


def _received(length: int, dtype: torch.dtype, source: int) -> Tensor:
    whole = _in_huge_pages(torch.empty(length, dtype=dtype))
    for begin in range(0, length, CHUNK):
        part = whole[begin : begin + CHUNK]
        received = part if _device().type == "cpu" else torch.empty_like(part, device=_device())
        dist.recv(received, source)
        part.copy_(received)
    return whole


class _Pickler(pickle.Pickler):
    """Leaves out what is in the memory of large tensors. Those that share it do so at the other end, too."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.large: list[UntypedStorage] = []
        self._seen: dict[int, tuple[int, UntypedStorage, bytes | None]] = {}

    def persistent_id(self, value: Any) -> _Known | None:
        """What stands for the memory of a tensor."""
        if not isinstance(value, TypedStorage | UntypedStorage):
            return None
        dtype = value.dtype if isinstance(value, TypedStorage) else torch.uint8  # as torch.save: of newer types, float8
        memory = value._untyped_storage if isinstance(value, TypedStorage) else value
        if memory._cdata not in self._seen:
            data = bytes(_bytes_of(memory).cpu().numpy()) if memory.nbytes() <= SMALL else None
            self._seen[memory._cdata] = len(self._seen), memory, data
            self.large += [memory] if data is None else []
        number, _, data = self._seen[memory._cdata]
        return number, data, location_tag(memory), dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, large: Iterable[UntypedStorage]) -> None:
        super().__init__(file)
        self._large, self._seen = iter(large), dict[int, UntypedStorage]()

    def persistent_load(self, known: _Known) -> TypedStorage:
        number, data, tag, dtype = known
        if number not in self._seen:
            memory = next(self._large) if data is None else _memory(data)
            self._seen[number] = default_restore_location(memory, tag)  # type: ignore[no-untyped-call]
        return TypedStorage(wrap_storage=self._seen[number], dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _bytes_of(memory: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def _memory(data: bytes) -> UntypedStorage:
    there = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return there.clone().untyped_storage()  # aligned as torch does it


def _device() -> torch.device:
    """Of tensors that the default group takes: on the host, if it takes any from there ("cpu:gloo,cuda:nccl")."""
    host = dist.get_backend() != "nccl" or "cpu:" in str(dist.get_backend_config())
    return torch.device("cpu") if host else torch.device("cuda", torch.cuda.current_device())
