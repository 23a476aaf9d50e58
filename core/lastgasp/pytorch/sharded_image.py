"""What a torch rank copies into its arena: its auxiliary state, what its adapter adds, and the image of its shards."""

from __future__ import annotations

import struct

from lastgasp.pytorch.sharded import parse

_HEAD = struct.Struct("<qqq")  # bytes of the auxiliary state, of what the adapter adds, and where the image begins
_ALIGNED = 64


def head_of(aux: bytes, more: bytes) -> bytes:
    """What comes before the image of the shards."""
    begin = -(-(_HEAD.size + len(aux) + len(more)) // _ALIGNED) * _ALIGNED
    return (_HEAD.pack(len(aux), len(more), begin) + aux + more).ljust(begin, b"\0")


class Payload:
    """A payload, read. Its digest was checked, so this very job has written it: it may hold pickles.

    Attributes:
        aux: the rank's auxiliary state.
        more: what its adapter has added.
        shards: what `sharded.parse` reads.
    """

    def __init__(self, payload: memoryview) -> None:
        aux, more, begin = _HEAD.unpack_from(payload)
        self.aux = bytes(payload[_HEAD.size : _HEAD.size + aux])
        self.more = payload[_HEAD.size + aux : _HEAD.size + aux + more]
        self.shards = payload[begin:]

    def why_not(self, rank: int, world_size: int) -> str:
        """Why a rank cannot go on with it; empty if it can."""
        table = parse(self.shards).table
        if (table.rank, table.world_size) != (rank, world_size):
            return f"it is of rank {table.rank} of {table.world_size}, and this is rank {rank} of {world_size}"
        return "" if self.more else "its adapter leaves no more than shards"
