"""What TensorFlow's own index says about the files of a checkpoint: sizes and CRC-32Cs. Read without TensorFlow.

The index is a sorted table of the format that LevelDB uses: blocks of key and value, each with a masked CRC-32C, and a
footer of 48 bytes. Values are the protos BundleHeaderProto (key "") and BundleEntryProto (tensorflow/core/protobuf/
tensor_bundle.proto).
"""

from __future__ import annotations

import array
import functools
import math
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lastgasp._fs import open_regular, read_bounded

_MAGIC = 0xDB4775248B80FB57
LONGEST = 1 << 30
"""Most bytes of an index that is read."""
_FOOTER, _TRAILER = 48, 5
_STRING, _VARIANT = 7, 21
"""Data types whose stored bytes are more than the tensor's elements."""


class Entry(NamedTuple):
    """Where one tensor is: bytes `offset` to `offset + size` of data file `shard`. `crc` is masked."""

    key: str
    dtype: int
    elements: int
    shard: int
    offset: int
    size: int
    crc: int


def structure_problem(prefix: Path) -> str:
    """Problems with the index and sizes; empty if there are none, or the index is compressed and cannot be read."""
    try:
        shards, entries = read_index(prefix)
        return _too_short(prefix, shards, entries)
    except _Compressed:
        return ""
    except (ValueError, IndexError, struct.error) as error:
        return f"{prefix.name}.index is damaged: {error}"
    except OSError as error:
        return f"{prefix.name}: cannot be read: {error.strerror or error}"


def content_problem(prefix: Path, limit: int = 256 << 20) -> str:
    """Also problems with the tensors, by TensorFlow's own checksums; empty if there are none.

    Reads all of it, unless it is larger than `limit` bytes: CRC-32C takes 30 to 130 s per GB here.
    """
    problem = structure_problem(prefix)
    if problem:
        return problem
    try:
        shards, entries = read_index(prefix)
        if sum(entry.size for entry in entries) > limit:
            return ""
        bad = next((entry.key for entry in entries if not _intact(prefix, shards, entry)), "")
    except _Compressed:
        return ""
    except (OSError, IndexError) as error:
        return f"{prefix.name}: cannot be read: {error}"
    return f"tensor {bad} has a wrong checksum" if bad else ""


def all_checksums_problem(prefix: Path) -> str:
    """As `content_problem`, of any size: by TensorFlow, if the process has imported it, which takes seconds."""
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None:
        return content_problem(prefix, sys.maxsize)
    try:
        reader = tensorflow.train.load_checkpoint(str(prefix))
        for key in reader.get_variable_to_shape_map():
            reader.get_tensor(key)
    except Exception as error:  # its own kinds
        return f"{prefix.name}: {error}"
    return structure_problem(prefix)


def data_file(prefix: Path, shard: int, shards: int) -> Path:
    """The file of shard number `shard` of `shards`."""
    return prefix.with_name(f"{prefix.name}.data-{shard:05}-of-{shards:05}")


def read_index(prefix: Path) -> tuple[int, list[Entry]]:
    """The number of shards, and all tensors.

    Raises:
        ValueError, IndexError, struct.error: it is damaged.
        OSError: it cannot be read.
    """
    data = read_bounded(prefix.with_name(prefix.name + ".index"), LONGEST)
    shards, entries = 1, []
    for key, value in _table(data):
        fields = dict(_proto(value))
        if not key:
            shards = _number(fields.get(1, 1))
        elif 7 not in fields:  # a partitioned variable's own entry; its slices have entries of their own
            entries.append(_entry(key, fields))
    return shards, entries


def _entry(key: bytes, fields: dict[int, int | bytes]) -> Entry:
    shape = fields.get(2, b"")
    dims = [dim for tag, dim in _proto(shape) if tag == 2] if isinstance(shape, bytes) else []
    elements = math.prod(_number(dict(_proto(dim)).get(1, 0)) for dim in dims if isinstance(dim, bytes))
    numbers = (_number(fields.get(tag, 0)) for tag in (3, 4, 5, 6))
    return Entry(key.decode(errors="replace"), _number(fields.get(1, 0)), elements, *numbers)


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a field is not a number")
    return value


def _too_short(prefix: Path, shards: int, entries: list[Entry]) -> str:
    for shard in range(shards):
        path = data_file(prefix, shard, shards)
        need = max((entry.offset + entry.size for entry in entries if entry.shard == shard), default=0)
        have = path.stat().st_size if path.is_file() else -1
        if have < need:
            return f"{path.name} is missing" if have < 0 else f"{path.name} has {have} bytes, not {need}"
    return ""


def _intact(prefix: Path, shards: int, entry: Entry) -> bool:
    if entry.dtype == _VARIANT:
        return True
    with os.fdopen(open_regular(data_file(prefix, entry.shard, shards)), "rb") as file:
        file.seek(entry.offset)
        data = file.read(entry.size)
    if entry.dtype == _STRING:
        data = _lengths_first(data, entry.elements)
    return masked_crc32c(data) == entry.crc


def _lengths_first(data: bytes, elements: int) -> bytes:
    """The data that a string tensor's checksum covers: lengths as fixed-size numbers, their checksum, the strings."""
    position, fixed = 0, b""
    for _ in range(elements):
        length, position = _varint(data, position)
        fixed += struct.pack("<I" if length < 1 << 32 else "<Q", length)
    return fixed + data[position:]


class _Compressed(Exception):
    """A block is compressed: TensorFlow never writes such an index, but others may."""


def _table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(data) < _FOOTER or struct.unpack("<Q", data[-8:])[0] != _MAGIC:
        raise ValueError("it does not end as an index does")
    _, position = _handle(data, len(data) - _FOOTER)
    for _, value in _block(data, *_handle(data, position)[0]):
        yield from _block(data, *_handle(value, 0)[0])


def _handle(data: bytes, position: int) -> tuple[tuple[int, int], int]:
    """Offset and size of a block, and where the next thing begins."""
    offset, position = _varint(data, position)
    size, position = _varint(data, position)
    return (offset, size), position


def _block(data: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    end = offset + size
    if end + _TRAILER > len(data) - _FOOTER:
        raise ValueError("a block lies outside of the file")
    if masked_crc32c(data[offset : end + 1]) != struct.unpack("<I", data[end + 1 : end + _TRAILER])[0]:
        raise ValueError(f"the block at byte {offset} has a wrong checksum")
    if data[end]:
        raise _Compressed
    restarts = struct.unpack("<I", data[end - 4 : end])[0]
    position, limit, key = offset, end - 4 - 4 * restarts, b""
    while position < limit:
        shared, position = _varint(data, position)
        own, position = _varint(data, position)
        length, position = _varint(data, position)
        key = key[:shared] + data[position : position + own]
        position += own + length
        yield key, data[position - length : position]


def _proto(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field number and value of a message."""
    position = 0
    while position < len(data):
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
        elif kind == 2:
            length, position = _varint(data, position)
            yield tag >> 3, data[position : position + length]
            position += length
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            yield tag >> 3, int.from_bytes(data[position : position + width], "little")
            position += width
        else:
            raise ValueError(f"a field of wire type {kind}")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError("a number is too long")


def masked_crc32c(data: bytes) -> int:
    """CRC-32C of `data` as TensorFlow stores it; two bytes at a time, since no required library has it."""
    table, crc = _crc_table(), 0xFFFFFFFF
    even = len(data) & ~1
    words = array.array("H", data[:even])
    if sys.byteorder == "big":
        words.byteswap()
    for word in words:
        crc = table[(crc ^ word) & 0xFFFF] ^ (crc >> 16)
    for byte in data[even:]:
        low = (crc ^ byte) & 0xFF
        crc = _crc_of_byte(low) ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _crc_of_byte(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value


@functools.cache
def _crc_table() -> list[int]:
    one = [_crc_of_byte(value) for value in range(256)]
    return [one[one[word & 255] & 255 ^ word >> 8] ^ (one[word & 255] >> 8) for word in range(65536)]
