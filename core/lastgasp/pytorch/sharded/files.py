"""Writes the file of one rank as `torch.distributed.checkpoint` lays it out, from memory and without a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from lastgasp.checkpoint import Staged
from lastgasp.errors import NotSaveable
from lastgasp.pytorch.sharded import values
from lastgasp.pytorch.sharded.records import around, stored
from lastgasp.pytorch.sharded.shards import Shards
from lastgasp.pytorch.sharded.table import Entry, Group, Image, Path, Table, bytes_of, parse, strides_of

PIECE = 32 << 20
"""Bytes that are brought from a device at once."""

_Values = tuple[values.Objects, values.Groups]
Rename = Callable[[Path], Path]
"""The place in the checkpoint's state dictionary of what has another one in the table (`names`)."""


def same(path: Path) -> Path:
    """The names of `names`."""
    return path


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
    extra: Mapping[Path, Any] | None = None,
    rename: Rename = same,
) -> bytes:
    """Write the file of this rank from its live tensors.

    Args:
        staged: the checkpoint, a directory.
        plain: whether also what all ranks hold alike is written: exactly one saver does.
        groups: values of the parameter groups at the end of the step, used where `plain`.
        buffers: key in the container's `state_dict` -> value at the end of the step; the live ones by default.
        extra: extra states of modules at the end of the step; the live ones by default.
        rename: for a framework that names things otherwise.

    Returns:
        The description that `metadata` needs.

    Raises:
        OSError: the disk refused.
    """
    found, instead = shards.found, dict(buffers or {})
    pairs = []
    for (entry, tensor), leaf in zip(shards.tensors(), found.tensors, strict=True):
        pairs.append((entry, _like(entry, instead[leaf.buffer]) if leaf.buffer in instead else tensor))
    file = _File(staged, found.table.rank, rename)
    return _write(file, found.table, pairs, plain, lambda: (shards.objects(extra), groups))


def write_arena(
    staged: Staged,
    payload: Any,
    *,
    plain: bool,
    groups: values.Groups | None = None,
    rename: Rename = same,
    verify: Callable[[], None] = lambda: None,
) -> bytes:
    """Write the file of another rank from its image. The rest is as for `write_live`.

    Args:
        groups: those in the image by default.
        verify: called before something of the image is unpickled (`ports.Wanted`).

    Raises:
        ValueError: it is no image of shards.
        NotSaveable: no values of parameter groups are known.
        OSError: the disk refused.
    """
    image = parse(payload)

    def more() -> _Values:
        verify()
        known = values.decode(image.values)
        found = known.groups if groups is None else groups
        if found is None:
            raise NotSaveable("the values of the optimizers' parameter groups are not known")
        return known.objects, found

    pairs = [(entry, image) for entry in image.table.entries]
    return _write(_File(staged, image.table.rank, rename), image.table, pairs, plain, more)


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"__{rank}_0.distcp"


class _File:
    """The file of one rank while it is written, and what is in it."""

    def __init__(self, staged: Staged, rank: int, rename: Rename) -> None:
        self.name, self._rename = file_name(rank), rename
        self.writer = staged.open(f"{staged.target.name}/{self.name}")
        self.rows: list[Row] = []

    def named(self, path: Path) -> str:
        """The name in the checkpoint."""
        return ".".join(map(str, self._rename(path)))

    def add_tensor(self, entry: Entry, source: Tensor | Image) -> None:
        """One tensor, from where it lies."""
        before, after = around(entry.torch_dtype, entry.sizes, entry.strides)
        begin = self.writer.tell()
        self.writer.write(before)
        if entry.nbytes:
            if isinstance(source, Image):
                self.writer.write(source.raw(entry))
            else:
                flat = bytes_of(source)
                for start in range(0, flat.numel(), PIECE):
                    self.writer.write(flat[start : start + PIECE].cpu().numpy().data)
        self.writer.write(after)
        self._row(entry.path, (entry.dtype, entry.shape, entry.offsets, entry.sizes), begin)

    def add_value(self, path: Path, value: Any) -> None:
        """Any value."""
        begin = self.writer.tell()
        if isinstance(value, Tensor):
            value = value.detach().cpu().clone()
        self.writer.write(stored(value))
        if isinstance(value, Tensor):
            shape = tuple(value.shape)
            about = str(value.dtype).removeprefix("torch."), shape, (0,) * len(shape), shape
        else:
            about = "", (), (), ()
        self._row(path, about, begin)

    def _row(self, path: Path, about: tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]], at: int) -> None:
        self.rows.append(Row(self._rename(path), *about, at, self.writer.tell() - at))


def _write(
    file: _File, table: Table, pairs: Iterable[tuple[Entry, Tensor | Image]], plain: bool, more: Callable[[], _Values]
) -> bytes:
    """`plain`: also what all ranks hold alike, with the values that are no tensors, for which `more` is asked last."""
    elsewhere = list[str]()
    for entry, source in pairs:
        if entry.plain and not plain:
            elsewhere.append(file.named(entry.path))
        elif 0 not in entry.sizes or entry.sizes == entry.shape:
            file.add_tensor(entry, source)
    if plain:
        objects, groups = more()
        for path, value in (*objects, *groups_of(table.groups, groups)):
            file.add_value(path, value)
    else:
        elsewhere += [file.named((*group.path, "params")) for group in table.groups]
        for path, value in more()[0] if table.alone else ():
            if path in table.alone:
                file.add_value(path, value)
    if not file.rows:
        file.writer.write(b"\0")  # a rank without any part: an empty file would be taken for a lost one
    return msgspec.msgpack.encode(Description(file.name, table.rank, tuple(file.rows), tuple(elsewhere)))


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


