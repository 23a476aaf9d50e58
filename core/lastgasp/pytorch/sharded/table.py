"""The table of what one rank holds: names, places in the whole tensors, and places in the image of its bytes.

It goes with the bytes wherever they are kept, so that whoever finds them can write them as a checkpoint.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

VERSION = 1
Path = tuple[str | int, ...]
"""Keys of the nested state dictionary, outermost first; joined by dots they are the name in the checkpoint."""


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor.

    Attributes:
        path: where it is in the state dictionary.
        dtype: as `torch.<dtype>`.
        shape: of the whole tensor, over all ranks.
        offsets, sizes: the part of it that this rank holds.
        strides: of this part in memory; empty if it is contiguous.
        at: where its bytes begin in the image; tensors that share memory share them.
        nbytes: their number.
        plain: every rank of the job holds the same, so that one of them writes it.
        buffer: it is a buffer of a module, which a forward pass may change.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    at: int
    nbytes: int
    plain: bool
    buffer: bool

    @property
    def name(self) -> str:
        """The name in the checkpoint."""
        return ".".join(map(str, self.path))

    @property
    def torch_dtype(self) -> torch.dtype:
        """Its type."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


class Group(msgspec.Struct, frozen=True, array_like=True):
    """One parameter group of an optimizer: where it is in the state dictionary, and the names of its parameters."""

    path: Path
    params: tuple[str, ...]


class Table(msgspec.Struct, frozen=True):
    """What one rank holds.

    Attributes:
        rank, world_size: as in torch.distributed.
        entries: in the order of the image, except those that share memory.
        groups: of all optimizers, in order.
        nbytes: bytes of the image.
        alone: places of values that are no tensors and that no other rank holds.
    """

    rank: int
    world_size: int
    entries: tuple[Entry, ...]
    groups: tuple[Group, ...]
    nbytes: int
    alone: tuple[Path, ...] = ()
    version: int = VERSION

    def encode(self) -> bytes:
        """As `decode` reads it."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Table:
        """Raises ValueError: not a table of a version that this code knows."""
        table = _DECODER.decode(data)
        if table.version != VERSION:
            raise ValueError(f"a table of version {table.version}; this lastgasp reads version {VERSION}")
        return table


_DECODER = msgspec.msgpack.Decoder(Table)


@dataclass(frozen=True)
class Chunk:
    """Which part of a whole tensor a rank holds; `whole`: every rank of the job holds all of it."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: bool


class Undescribable(Exception):
    """A tensor that cannot be described: its text says which and why."""


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part, as it lies in memory; enters no collective."""
    found = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return found.detach()


def chunk_of(tensor: Tensor, world_size: int) -> Chunk:
    """Which part of the whole tensor this rank holds.

    Raises:
        Undescribable: its parts cannot be told from its placements.
    """
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Chunk(shape, (0,) * len(shape), shape, True)
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise Undescribable(f"a DTensor with placements {tensor.placements}, which is not reduced yet")
    shape = tuple(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tuple(tensor._local_tensor.shape)
    if tuple(sizes) != local and (torch.Size(sizes).numel() or torch.Size(local).numel()):
        raise Undescribable(f"a DTensor whose part has shape {list(local)}, where its placements say {list(sizes)}")
    mesh = tensor.device_mesh
    everywhere = all(p.is_replicate() or mesh.size(i) == 1 for i, p in enumerate(tensor.placements))
    whole = everywhere and mesh.size() == world_size
    return Chunk(shape, tuple(offsets), tuple(sizes), whole)


def strides_of(local: Tensor) -> tuple[int, ...]:
    """Strides of dense memory, empty if they are the usual ones.

    Raises:
        Undescribable: it has holes, or is no plain memory.
    """
    if type(local) not in (Tensor, torch.nn.Parameter) or local.layout is not torch.strided or local.is_quantized:
        raise Undescribable(f"a {type(local).__name__} of layout {local.layout}, whose memory is not its value")
    if local.is_conj() or local.is_neg():
        raise Undescribable("a tensor that is conjugated or negated lazily")
    if local.is_contiguous():
        return ()
    dense = 1
    for size, stride in sorted(zip(local.shape, local.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != dense:
            raise Undescribable(f"a tensor of shape {list(local.shape)} with strides {list(local.stride())}")
        dense *= size
    return tuple(local.stride())


def bytes_of(local: Tensor) -> Tensor:
    """Its bytes as they lie in memory, on its device: a view of one dimension and type uint8."""
    flat = local.as_strided((local.numel(),), (1,))
    return flat.view(torch.uint8)


def tensor_on(image: memoryview, entry: Entry) -> Tensor:
    """The tensor of an entry, on the bytes of an image, which it keeps open; a copy where they are not writable."""
    dtype, count = entry.torch_dtype, torch.Size(entry.sizes).numel()
    if not count:
        return torch.empty(entry.sizes, dtype=dtype)
    raw = image[entry.at : entry.at + entry.nbytes]
    flat = torch.frombuffer(bytearray(raw) if raw.readonly else raw, dtype=dtype, count=count)
    return flat.as_strided(entry.sizes, entry.strides) if entry.strides else flat.view(entry.sizes)


def shard_key(chunks: Sequence[tuple[str, Chunk]]) -> bytes:
    """16 bytes that are the same on ranks that hold the same parts of the same tensors."""
    hasher = xxhash.xxh3_128()
    for name, chunk in sorted(chunks, key=lambda pair: pair[0]):
        hasher.update(repr((name, chunk.shape, chunk.offsets, chunk.sizes)).encode())
    return hasher.digest()


# -- the image of a rank: head, table, bytes of the tensors, values ------------------------------------------------

_HEAD = struct.Struct("<8s5Q")  # magic, version, bytes of: table, tensors, values; where the tensors begin
_MAGIC = b"LGSHARD1"
HEAD = _HEAD.size


def head_of(table: bytes, nbytes: int, values: int) -> tuple[bytes, int]:
    """Head and table, padded; and the length of the whole image."""
    at = -(-(HEAD + len(table)) // 64) * 64
    head = _HEAD.pack(_MAGIC, VERSION, len(table), nbytes, values, at)
    return (head + table).ljust(at, b"\0"), at + nbytes + values


@dataclass(frozen=True)
class Image:
    """What `parse` finds.

    Attributes:
        table: of the rank whose bytes they are.
        data: the bytes of its tensors.
        values: what else it had at that step (`values.encode`).
    """

    table: Table
    data: memoryview
    values: bytes

    def tensor(self, entry: Entry) -> Tensor:
        """One of its tensors (`tensor_on`)."""
        return tensor_on(self.data, entry)

    def raw(self, entry: Entry) -> memoryview:
        """The bytes of one of its tensors."""
        return self.data[entry.at : entry.at + entry.nbytes]


def parse(payload: Any) -> Image:
    """Read an image (`Shards.payload`).

    Raises:
        ValueError: it is none, of a version that this code does not know, or incomplete.
    """
    whole = memoryview(payload).cast("B")
    if len(whole) < HEAD:
        raise ValueError(f"an image of shards has at least {HEAD} bytes, got {len(whole)}")
    magic, version, table, nbytes, values, at = _HEAD.unpack_from(whole)
    if magic != _MAGIC or version != VERSION:
        raise ValueError(f"not an image of shards of version {VERSION}")
    if HEAD + table > at or at + nbytes + values > len(whole):
        raise ValueError(f"an image of shards that should have {at + nbytes + values} bytes has {len(whole)}")
    try:
        found = Table.decode(whole[HEAD : HEAD + table])
    except msgspec.DecodeError as error:
        raise ValueError(f"the table of an image of shards: {error}") from error
    if found.nbytes != nbytes or any(e.at < 0 or e.at + e.nbytes > nbytes for e in found.entries):
        raise ValueError("an image of shards whose table does not fit its bytes")
    return Image(found, whole[at : at + nbytes], bytes(whole[at + nbytes : at + nbytes + values]))
