"""Bytes that a live rank adds to its auxiliary state when it answers after a fault.

They stand behind it, where readers that do not know of them do not look. The rest is recorded at each step, and is
known of dead ranks, too.
"""

from __future__ import annotations

import struct

_END = struct.Struct("<Q8s")
_MAGIC = b"LGTRAIL1"


def with_trailer(state: bytes, more: bytes) -> bytes:
    """`more` behind `state`, which may be empty; `state` itself where there is no more."""
    return state + more + _END.pack(len(more), _MAGIC) if more else state


def split_trailer(data: bytes) -> tuple[bytes, bytes]:
    """What `with_trailer` was given; without a trailer all is the state."""
    if len(data) < _END.size or not data.endswith(_MAGIC):
        return data, b""
    length, _ = _END.unpack_from(data, len(data) - _END.size)
    at = len(data) - _END.size - length
    return (data[:at], data[at : at + length]) if at >= 0 else (data, b"")
