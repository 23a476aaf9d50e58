"""What else the adapter keeps in the auxiliary state, beside the data position."""

from __future__ import annotations

import itertools
import struct
from typing import NamedTuple

_TAIL = struct.Struct("<I8s")
_MAGIC = b"LGEXTRA2"
_LONG_TAILS = {b"LGEXTRA3": struct.Struct("<II8s"), b"LGEXTRA4": struct.Struct("<III8s")}


class Extra(NamedTuple):
    """Data position, accumulators of `self.log`, what was logged, and torchmetrics objects; empty: there is none."""

    position: bytes
    accumulators: bytes = b""
    logged: bytes = b""
    objects: bytes = b""


def behind_position(accumulators: bytes, logged: bytes = b"", objects: bytes = b"") -> bytes:
    """Encode what stands behind the position, in the oldest format that can hold it."""
    if objects:
        sizes = len(accumulators), len(logged), len(objects)
        return accumulators + logged + objects + _LONG_TAILS[b"LGEXTRA4"].pack(*sizes, b"LGEXTRA4")
    if logged:
        return accumulators + logged + _LONG_TAILS[b"LGEXTRA3"].pack(len(accumulators), len(logged), b"LGEXTRA3")
    return accumulators + _TAIL.pack(len(accumulators), _MAGIC) if accumulators else b""


def split_extra(extra: bytes) -> Extra:
    """What an adapter of this or an older version has put together."""
    tail = _LONG_TAILS.get(extra[-8:], _TAIL)
    if len(extra) < tail.size or (tail is _TAIL and extra[-8:] != _MAGIC):
        return Extra(extra)
    *sizes, _ = tail.unpack(extra[-tail.size :])
    ends = [len(extra) - tail.size]
    for size in reversed(sizes):
        ends.insert(0, ends[0] - size)
    return Extra(extra[: ends[0]], *(extra[begin:end] for begin, end in itertools.pairwise(ends)))
