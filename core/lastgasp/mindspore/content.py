"""What a checkpoint file of MindSpore itself contains, read without MindSpore: its parameters, its step, its checksum.

`.ckpt` is a sequence of protobuf messages, one or more for each parameter, without an index: a file truncated between
two of them is a shorter file of the same format, which MindSpore loads (mindformers.md §5). `.safetensors` begins
with an index. Only files saved with `crc_check` have a checksum, which MindFormers never sets.
"""

from __future__ import annotations

import binascii
import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lastgasp._fs import open_regular

STEP, EPOCH, UPDATES, BATCH = "step_num", "epoch_num", "global_step", "global_batch_size"
"""As MindFormers names completed steps, the epoch, the optimizer's own count, and the batch of all ranks."""
_NUMBERS = (STEP, EPOCH, UPDATES, BATCH)
_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
"""Size of a number from the digits in its type's name; for complex types they count both halves."""
_TRAILER, _TRAILER_SIZE = b"crc_num", 17
_BLOCK = 1 << 20
_SMALL = 64
"""Most bytes of a value that is read as a number."""
_MAX_HEADER = 1 << 30


class Unreadable(Exception):
    """Not a complete file of its format; the text says what is wrong, and where."""


@dataclass(frozen=True)
class Content:
    """What a file holds.

    Args:
        sizes: bytes of each parameter.
        numbers: those of `_NUMBERS` that it holds.
        checksum: whether it has a checksum, and the checksum is right.
    """

    sizes: dict[str, int]
    numbers: dict[str, int]
    checksum: bool = False

    @property
    def step(self) -> int | None:
        """Completed steps, as written by the trainer, else by the optimizer's count; None if it holds neither."""
        return self.numbers.get(STEP, self.numbers.get(UPDATES))


def read_content(path: Path, *, checksums: bool = True) -> Content:
    """Read the structure of a `.ckpt` or `.safetensors` file; its parameters only to verify a checksum.

    Raises:
        Unreadable: it is incomplete, or not of its format.
        OSError: the disk refused.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise Unreadable("is empty")
        read = _safetensors if path.suffix == ".safetensors" else _ckpt
        try:
            return read(file, size, checksums)
        except EOFError:
            raise Unreadable("ends where a number is expected") from None


# -- safetensors ----------------------------------------------------------------------------------


def _safetensors(file: IO[bytes], size: int, checksums: bool) -> Content:
    header, begin = _header(file, size)
    meta = header.pop("__metadata__", None) or {}
    spans = {name: _span(name, entry) for name, entry in header.items()}
    end = max((stop for _, stop in spans.values()), default=0)
    if begin + end != size:
        raise Unreadable(f"has {size} bytes, and its index says {begin + end}")
    numbers = {}
    for name in _NUMBERS:
        if name in spans and 0 < spans[name][1] - spans[name][0] <= _SMALL:
            file.seek(begin + spans[name][0])
            numbers[name] = _number(file.read(spans[name][1] - spans[name][0]), str(header[name].get("dtype")))
    stored = meta.get("crc_num") if isinstance(meta, dict) else None
    if checksums and stored is not None:
        scalars = (name for name, entry in header.items() if not entry.get("shape"))
        whole = {name for name in scalars if str(header[name].get("dtype")).startswith(("I", "U"))}
        _check_safetensors(file, begin, spans, whole, str(stored))
    sizes = {name: stop - start for name, (start, stop) in spans.items()}
    return Content(sizes, _found(numbers), checksums and stored is not None)


def _header(file: IO[bytes], size: int) -> tuple[dict[str, Any], int]:
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(size - 8, _MAX_HEADER):
        raise Unreadable(f"has {size} bytes, and its index alone needs {8 + length}")
    try:
        header = json.loads(file.read(length))
    except ValueError as error:
        raise Unreadable(f"its index cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise Unreadable("its index is not a mapping")
    return header, 8 + length


def _span(name: str, entry: Any) -> tuple[int, int]:
    try:
        start, stop = entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise Unreadable(f"its index lacks the position of {name}") from error
    if not (isinstance(start, int) and isinstance(stop, int) and 0 <= start <= stop):
        raise Unreadable(f"its index has an impossible position for {name}: {start} to {stop}")
    return start, stop


def _check_safetensors(
    file: IO[bytes], begin: int, spans: dict[str, tuple[int, int]], whole: set[str], stored: str
) -> None:
    """MindSpore hashes `bytes(array)`, which for a zero-dimensional integer n is n zero bytes."""
    found = 0
    for name, (start, stop) in sorted(spans.items()):
        found = binascii.crc32(name.encode(), found)
        file.seek(begin + start)
        if name in whole:
            found = binascii.crc32(bytes(max(0, min(int.from_bytes(file.read(stop - start), "little"), _BLOCK))), found)
        else:
            found = _crc(file, stop - start, found)
    if str(found) != stored:
        raise Unreadable(f"its checksum is {found}, and {stored} was stored in it")


# -- ckpt -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Value:
    """One message: part of a parameter."""

    tag: str
    dims: list[int]
    kind: str
    length: int
    content: bytes
    """Only for short values."""


def _ckpt(file: IO[bytes], size: int, checksums: bool) -> Content:
    checksum = _check_trailer(file, size, checksums)
    end = size - _TRAILER_SIZE if checksum else size
    sizes: dict[str, int] = {}
    wanted: dict[str, int] = {}
    numbers: dict[str, int | None] = {}
    for value in _values(file, end):
        sizes[value.tag] = sizes.get(value.tag, 0) + value.length
        wanted[value.tag] = _bytes_of(value.dims, value.kind)
        if value.tag in _NUMBERS and value.content:
            numbers[value.tag] = _number(value.content, value.kind)
    for tag, wants in wanted.items():
        if wants and sizes[tag] != wants:
            raise Unreadable(f"has {sizes[tag]} bytes of {tag}, but its shape needs {wants}")
    if not sizes:
        raise Unreadable("holds no parameter")
    return Content(sizes, _found(numbers), checksum and checksums)


def _check_trailer(file: IO[bytes], size: int, checksums: bool) -> bool:
    """Whether there is a checksum at the end; raises Unreadable if it is wrong."""
    if size < _TRAILER_SIZE:
        return False
    file.seek(size - _TRAILER_SIZE)
    trailer = file.read(_TRAILER_SIZE)
    there = trailer.startswith(_TRAILER)
    if there and checksums:
        file.seek(0)
        found, stored = _crc(file, size - _TRAILER_SIZE, 0), int.from_bytes(trailer[len(_TRAILER) :], "big")
        if found != stored:
            raise Unreadable(f"its checksum is {found}, and {stored} was stored in it")
    file.seek(0)
    return there


def _values(file: IO[bytes], end: int) -> Iterator[_Value]:
    """Checkpoint { repeated Value value = 1 }, one after the other up to `end`."""
    position = 0
    while position < end:
        file.seek(position)
        try:
            field, length = _varint(file), _varint(file)
        except EOFError:
            raise Unreadable(f"ends in a parameter at byte {position}") from None
        if field != 0x0A:
            raise Unreadable(f"is not a checkpoint of MindSpore, or encrypted: no parameter begins at byte {position}")
        begin = file.tell()
        if begin + length > end:
            raise Unreadable(f"ends in a parameter at byte {position}: {begin + length} bytes are needed, not {end}")
        yield _value(file, begin + length)
        position = begin + length


def _value(file: IO[bytes], end: int) -> _Value:
    """Value { string tag = 1; TensorProto tensor = 2 }; others (maps) have no tensor."""
    tag, tensor = "", _Value("", [], "", 0, b"")
    for field, length in _fields(file, end):
        begin = file.tell()
        if field == 1:
            tag = file.read(length).decode(errors="replace")
        elif field == 2:
            tensor = _tensor(file, begin + length)
        file.seek(begin + length)
    return _Value(tag, tensor.dims, tensor.kind, tensor.length, tensor.content)


def _tensor(file: IO[bytes], end: int) -> _Value:
    """TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3 }."""
    dims: list[int] = []
    kind, content, size = "", b"", 0
    while file.tell() < end:
        key = _varint(file)
        if key >> 3 == 1 and key & 7 == 0:
            dims.append(_varint(file))
            continue
        if key & 7 != 2:
            raise Unreadable(f"byte {file.tell()} does not belong to a parameter")
        length = _varint(file)
        begin = file.tell()
        if key >> 3 == 1:  # packed
            while file.tell() < begin + length:
                dims.append(_varint(file))
        elif key >> 3 == 2:
            kind = file.read(length).decode(errors="replace")
        elif key >> 3 == 3:
            size, content = length, file.read(length) if length <= _SMALL else b""
        file.seek(begin + length)
    return _Value("", dims, kind, size, content)


def _fields(file: IO[bytes], end: int) -> Iterator[tuple[int, int]]:
    """Number and length of each field with a length; the file is positioned at its content."""
    while file.tell() < end:
        key = _varint(file)
        if key & 7 != 2:
            raise Unreadable(f"byte {file.tell()} does not belong to a checkpoint of MindSpore")
        yield key >> 3, _varint(file)


def _varint(file: IO[bytes]) -> int:
    value = shift = 0
    while True:
        byte = file.read(1)
        if not byte or shift > 63:
            raise EOFError
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
        shift += 7


def _bytes_of(dims: list[int], kind: str) -> int:
    """The size of a tensor of that shape; 0 if the type does not say."""
    digits = "".join(character for character in kind if character.isdigit())
    known = kind.startswith(("Float", "Int", "UInt", "BFloat", "Complex"))
    if kind == "Bool":
        return math.prod(dims)
    width = _BYTES.get(digits, 0) if known else 0
    return math.prod(dims) * width


# -- both -----------------------------------------------------------------------------------------


def _number(data: bytes, kind: str) -> int | None:
    """The first number in `data`, as an integer."""
    try:
        if kind.lower().startswith("f"):
            return int(struct.unpack_from("<d" if len(data) % 8 == 0 and "64" in kind else "<f", data)[0])
        return int.from_bytes(data[: 8 if "64" in kind else 4], "little", signed=True)
    except (struct.error, ValueError, OverflowError):
        return None


def _found(numbers: dict[str, int | None]) -> dict[str, int]:
    return {name: number for name, number in numbers.items() if number is not None}


def _crc(file: IO[bytes], length: int, found: int) -> int:
    while length > 0:
        piece = file.read(min(_BLOCK, length))
        if not piece:
            raise Unreadable("ends before its checksum")
        found = binascii.crc32(piece, found)
        length -= len(piece)
    return found
