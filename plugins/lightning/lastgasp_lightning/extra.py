"""What else the adapter keeps in the auxiliary state, beside the data position."""

from __future__ import annotations

import struct

_TAIL = struct.Struct("<I8s")
_MAGIC = b"LGEXTRA2"
_LONG_TAIL = struct.Struct("<II8s")
_LONG_MAGIC = b"LGEXTRA3"


def behind_position(accumulators: bytes, logged: bytes = b"") -> bytes:
    """Encode what stands behind the position, in the oldest format that can hold it."""
    if logged:
        return accumulators + logged + _LONG_TAIL.pack(len(accumulators), len(logged), _LONG_MAGIC)
    return accumulators + _TAIL.pack(len(accumulators), _MAGIC) if accumulators else b""


def split_extra(extra: bytes) -> tuple[bytes, bytes, bytes]:
    """Position, accumulators, and what was logged; empty if an older version wrote it, or there is none."""
    if extra.endswith(_LONG_MAGIC) and len(extra) >= _LONG_TAIL.size:
        length, logged, _ = _LONG_TAIL.unpack(extra[-_LONG_TAIL.size :])
        end = len(extra) - _LONG_TAIL.size
        return extra[: end - logged - length], extra[end - logged - length : end - logged], extra[end - logged : end]
    if len(extra) < _TAIL.size:
        return extra, b"", b""
    length, magic = _TAIL.unpack(extra[-_TAIL.size :])
    if magic != _MAGIC:
        return extra, b"", b""
    end = len(extra) - _TAIL.size
    return extra[: end - length], extra[end - length : end], b""
