"""Files as MindSpore writes them, made without it: `.ckpt` and `.safetensors`, with and without a checksum."""

from __future__ import annotations

import binascii
import json
import struct
from collections.abc import Mapping
from pathlib import Path

FLOATS, LONG, INT = ("Float32", "F32"), ("Int64", "I64"), ("Int32", "I32")
Value = tuple[tuple[str, str], list[int], bytes]


def floats(count: int, seed: int) -> Value:
    """A tensor that no other seed has."""
    return FLOATS, [count], b"".join(struct.pack("<f", seed + index / count) for index in range(count))


def long(number: int) -> Value:
    """A whole number without dimensions, as `append_dict` makes them."""
    return LONG, [], struct.pack("<q", number)


def state(step: int, epoch: int, seed: int = 0, parameters: int = 4) -> dict[str, Value]:
    """What MindFormers saves, in its order: parameters, the optimizer's, and the numbers last."""
    found = {f"layers.{number}.weight": floats(300, seed + number) for number in range(parameters)}
    found |= {f"adam_m.layers.{number}.weight": floats(300, seed + 50 + number) for number in range(parameters)}
    found["global_step"] = INT, [1], struct.pack("<i", step)
    return found | {"epoch_num": long(epoch), "step_num": long(step), "loss_scale": (FLOATS, [], struct.pack("<f", 1))}


def write(path: Path, values: Mapping[str, Value], *, crc: bool = False) -> Path:
    """Write by the ending of `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors(values, crc=crc) if path.suffix == ".safetensors" else ckpt(values, crc=crc))
    return path


def ckpt(values: Mapping[str, Value], *, crc: bool = False) -> bytes:
    """A chain of messages, and a trailer."""
    data = b"".join(message(name, value) for name, value in values.items())
    return data + b"crc_num" + binascii.crc32(data).to_bytes(10, "big") if crc else data


def message(name: str, value: Value) -> bytes:
    """One parameter."""
    (kind, _), dims, content = value
    tensor = b"".join(b"\x08" + _varint(dim) for dim in dims) + _field(2, kind.encode()) + _field(3, content)
    return _field(1, _field(1, name.encode()) + _field(2, tensor))


def safetensors(values: Mapping[str, Value], *, crc: bool = False) -> bytes:
    """An index, and the contents behind it."""
    index: dict[str, object] = {"__metadata__": {"format": "ms"}}
    contents, checksum = b"", 0
    for name, (kinds, dims, content) in sorted(values.items(), key=lambda item: (item[1][0] != LONG, item[0])):
        index[name] = {"dtype": kinds[1], "shape": dims, "data_offsets": [len(contents), len(contents) + len(content)]}
        contents += content
    for name, (kinds, dims, content) in sorted(values.items()):
        hashed = bytes(int.from_bytes(content, "little")) if kinds[1][0] == "I" and not dims else content
        checksum = binascii.crc32(hashed, binascii.crc32(name.encode(), checksum))
    if crc:
        index["__metadata__"] = {"format": "ms", "crc_num": str(checksum)}
    head = json.dumps(index).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + contents


def boundary(values: Mapping[str, Value], keep: int) -> int:
    """Bytes of the first `keep` parameters of a `.ckpt`."""
    return sum(len(message(name, value)) for name, value in list(values.items())[:keep])


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
