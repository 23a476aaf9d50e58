"""What a rank's small state holds of Lightning: its position in the data, and its accumulators of `self.log`."""

from __future__ import annotations

import struct

_TAIL = struct.Struct("<I8s")
_MAGIC = b"LGEXTRA2"


def join_extra(position: bytes, accumulators: bytes) -> bytes:
    """Both in one; the position alone, as older versions wrote it, where there are no accumulators."""
    return position + accumulators + _TAIL.pack(len(accumulators), _MAGIC) if accumulators else position


def split_extra(extra: bytes) -> tuple[bytes, bytes]:
    """Position and accumulators; the latter empty where an older version wrote, or where there are none."""
    if len(extra) < _TAIL.size:
        return extra, b""
    length, magic = _TAIL.unpack(extra[-_TAIL.size :])
    if magic != _MAGIC:
        return extra, b""
    end = len(extra) - _TAIL.size
    return extra[: end - length], extra[end - length : end]
