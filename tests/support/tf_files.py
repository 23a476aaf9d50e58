"""TensorFlow's checkpoints written without TensorFlow: index, shards and state file, small, and valid for the real one.

`tests/frameworks/test_tensorflow_real.py` proves the latter, and that what the real one writes is read alike.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

from lastgasp.tensorflow import seal
from lastgasp.tensorflow.bundle import data_file, masked_crc32c
from lastgasp.tensorflow.statefile import NAME, State, encode

FLOAT = 1
GOLDEN = Path(__file__).parents[1] / "golden" / "tensorflow"
"""Checkpoints that TensorFlow 2.21 wrote, see its README."""


def put(directory: Path, step: int, *, shards: int = 1, sealed: bool = True, name: str = "ckpt") -> Path:
    """Checkpoint `<name>-<step>` with a few float tensors, each in a shard of its own where there are several."""
    prefix = directory / f"{name}-{step}"
    write(prefix, {f"w{i}": [float(step), float(i), *range(2000)] for i in range(max(shards, 2))}, shards)
    if sealed:
        seal(prefix)
    return prefix


def write(prefix: Path, tensors: Mapping[str, list[float]], shards: int = 1) -> None:
    """One checkpoint of vectors of floats; tensor number i lies in shard i modulo `shards`."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    data = [b""] * shards
    rows = [(b"", _field(1, shards) + _message(3, _field(1, 1)))]
    for number, (key, values) in enumerate(sorted(tensors.items())):
        shard, content = number % shards, struct.pack(f"<{len(values)}f", *values)
        shape = _message(2, _field(1, len(values)))
        place = _field(3, shard) + _field(4, len(data[shard])) + _field(5, len(content))
        crc = _varint(6 << 3 | 5) + struct.pack("<I", masked_crc32c(content))
        rows.append((key.encode(), _field(1, FLOAT) + _message(2, shape) + place + crc))
        data[shard] += content
    for shard, content in enumerate(data):
        data_file(prefix, shard, shards).write_bytes(content)
    prefix.with_name(prefix.name + ".index").write_bytes(_table(rows))


def state_of(directory: Path, *steps: int, name: str = "ckpt") -> Path:
    """The state file as a CheckpointManager leaves it after these saves."""
    kept = tuple(f"{name}-{step}" for step in steps)
    path = directory / NAME
    path.write_bytes(encode(State(kept[-1], kept, tuple(1e9 + step for step in steps), 1e9)))
    return path


def _table(rows: list[tuple[bytes, bytes]]) -> bytes:
    data = _block(rows)
    meta = _block([])
    whole = data + meta
    index = _block([(b"\xff", _varint(0) + _varint(len(data) - 5))])
    handles = _varint(len(data)) + _varint(len(meta) - 5) + _varint(len(whole)) + _varint(len(index) - 5)
    return whole + index + handles.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


def _block(rows: list[tuple[bytes, bytes]]) -> bytes:
    """Keys are written in full; one restart."""
    content = b"".join(_varint(0) + _varint(len(key)) + _varint(len(value)) + key + value for key, value in rows)
    content += struct.pack("<II", 0, 1) + b"\0"
    return content + struct.pack("<I", masked_crc32c(content))


def _field(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _message(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
