"""Writes the file of one rank as `torch.distributed.checkpoint` lays it out, from memory and without a collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from lastgasp.checkpoint import HashingWriter, Staged
from lastgasp.errors import NotSaveable
from lastgasp.pytorch.sharded import values
from lastgasp.pytorch.sharded.records import around, stored
from lastgasp.pytorch.sharded.shards import Shards
from lastgasp.pytorch.sharded.table import Entry, Group, Image, Path, Table, bytes_of, parse, strides_of

PIECE = 32 << 20
"""Bytes that are brought from a device at once."""


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One record of a file. `dtype` is empty for a value that is no tensor."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    length: int


class Description(msgspec.Struct, frozen=True):
    """What the rank that commits must know about one file. `elsewhere`: names that another file must have."""

    file: str
    rank: int
    rows: tuple[Row, ...]
    elsewhere: tuple[str, ...]


DESCRIPTION = msgspec.msgpack.Decoder(Description)


def write_live(
    staged: Staged,
    shards: Shards,
    *,
    plain: bool,
    groups: values.Groups,
    buffers: Mapping[str, Tensor] | None = None,
) -> bytes:
    """Write the file of this rank from its live tensors.

    Args:
        staged: the checkpoint, a directory.
        plain: whether also what all ranks hold alike is written: exactly one saver does.
        groups: values of the parameter groups at the end of the step, used where `plain`.
        buffers: key in the container's `state_dict` -> value at the end of the step; the live ones by default.

    Returns:
        The description that `metadata` needs.

    Raises:
        OSError: the disk refused.
    """
    found, instead = shards.found, dict(buffers or {})
    pairs = []
    for (entry, tensor), leaf in zip(shards.tensors(), found.tensors, strict=True):
        pairs.append((entry, _like(entry, instead[leaf.buffer]) if leaf.buffer in instead else tensor))
    return _write(staged, found.table, pairs, shards.objects() if plain else (), groups if plain else None)


def write_arena(staged: Staged, payload: Any, *, plain: bool, groups: values.Groups | None = None) -> bytes:
    """Write the file of another rank from its image. The rest is as for `write_live`.

    Args:
        groups: those in the image by default.

    Raises:
        ValueError: it is no image of shards.
        NotSaveable: no values of parameter groups are known.
        OSError: the disk refused.
    """
    image = parse(payload)
    known = values.decode(image.values)
    groups = known.groups if groups is None else groups
    if plain and groups is None:
        raise NotSaveable("the values of the optimizers' parameter groups are not known")
    pairs = [(entry, image) for entry in image.table.entries]
    return _write(staged, image.table, pairs, known.objects if plain else (), groups if plain else None)


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"__{rank}_0.distcp"


def _write(
    staged: Staged,
    table: Table,
    pairs: Iterable[tuple[Entry, Tensor | Image]],
    objects: values.Objects,
    groups: values.Groups | None,
) -> bytes:
    """`groups` is None where only this rank's own parts are written."""
    name, rows, elsewhere = file_name(table.rank), list[Row](), list[str]()
    writer = staged.open(f"{staged.target.name}/{name}")
    if groups is not None:
        for path, value in (*objects, *groups_of(table.groups, groups)):
            rows.append(_put_value(writer, path, value))
    for entry, source in pairs:
        if entry.plain and groups is None:
            elsewhere.append(entry.name)
        elif 0 not in entry.sizes or entry.sizes == entry.shape:
            rows.append(_put_tensor(writer, entry, source))
    if groups is None:
        elsewhere += [".".join(map(str, (*group.path, "params"))) for group in table.groups]
    if not rows:
        writer.write(b"\0")  # a rank without any part: an empty file would be taken for a lost one
    return msgspec.msgpack.encode(Description(name, table.rank, tuple(rows), tuple(elsewhere)))


def _put_tensor(writer: HashingWriter, entry: Entry, source: Tensor | Image) -> Row:
    before, after = around(entry.torch_dtype, entry.sizes, entry.strides)
    begin = writer.tell()
    writer.write(before)
    if entry.nbytes:
        if isinstance(source, Image):
            writer.write(source.raw(entry))
        else:
            flat = bytes_of(source)
            for start in range(0, flat.numel(), PIECE):
                writer.write(flat[start : start + PIECE].cpu().numpy().data)
    writer.write(after)
    return Row(entry.path, entry.dtype, entry.shape, entry.offsets, entry.sizes, begin, writer.tell() - begin)


def _put_value(writer: HashingWriter, path: Path, value: Any) -> Row:
    begin = writer.tell()
    if isinstance(value, Tensor):
        value = value.detach().cpu().clone()
        shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        writer.write(stored(value))
        return Row(path, dtype, shape, (0,) * len(shape), shape, begin, writer.tell() - begin)
    writer.write(stored(value))
    return Row(path, "", (), (), (), begin, writer.tell() - begin)


def groups_of(groups: tuple[Group, ...], given: values.Groups) -> Iterator[tuple[Path, Any]]:
    """The values of all parameter groups as torch names them."""
    flat = [one for optimizer in given for one in optimizer]
    for group, value in zip(groups, flat, strict=True):
        whole = {**value, "params": list(group.params)}
        leaves, paths = flatten_state_dict(whole)
        for name, leaf in leaves.items():
            yield (*group.path, *paths[name]), leaf


def _like(entry: Entry, value: Tensor) -> Tensor:
    """The same value with the strides of the entry."""
    value = value.detach()
    if tuple(value.shape) != entry.sizes or value.dtype != entry.torch_dtype:
        now, before = f"{value.dtype} {list(value.shape)}", f"{entry.dtype} {list(entry.sizes)}"
        raise NotSaveable(f"{entry.name} is {now}, and was {before}")
    if strides_of(value) == entry.strides:
        return value
    return value.new_empty_strided(entry.sizes, entry.strides).copy_(value) if entry.strides else value.contiguous()


