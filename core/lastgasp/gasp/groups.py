"""Encode replica groups: a greeting is limited to 64 KiB, and a job may have a hundred thousand ranks. Pure.

Groups result from parallel layouts, so most of them are another group shifted by a few ranks. Delta-encoded and
compressed, 50 000 pairs take about a kilobyte.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import msgspec

from lastgasp.errors import ControlError, ProtocolError
from lastgasp.topology import ReplicaGroups

MOST = 48 * 1024
"""Greatest packed size in bytes, limited by the greeting."""
MOST_UNPACKED = 64 * 1024 * 1024
"""Greatest size in bytes before compression: enough for ten million ranks."""

_decoder: msgspec.msgpack.Decoder[list[int]] = msgspec.msgpack.Decoder(list[int])


def pack(groups: ReplicaGroups) -> bytes:
    """Encode the groups.

    Raises:
        ControlError: there are too many groups without a pattern.
    """
    numbers: list[int] = []
    before = 0
    for group in groups:
        numbers.append(len(group))
        last = before
        for rank in group:
            numbers.append(rank - last)
            last = rank
        before = group[0] if group else before
    packed = zlib.compress(msgspec.msgpack.encode(numbers))
    if len(packed) > MOST:
        raise ControlError(
            f"the replica groups of this job take {len(packed)} bytes, {MOST} at most are allowed: {len(groups)} "
            "groups that follow no pattern. Let replicas stand at constant distances from each other, as layouts do."
        )
    return packed


def unpack(packed: bytes) -> ReplicaGroups:
    """Decode what `pack` encoded.

    Raises:
        ProtocolError: the data is invalid.
    """
    try:
        reader = zlib.decompressobj()
        body = reader.decompress(packed, MOST_UNPACKED)
        if not reader.eof:
            raise ValueError(f"more than {MOST_UNPACKED} bytes, or cut off")
        return tuple(_groups(iter(_decoder.decode(body))))
    except (zlib.error, msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise ProtocolError(f"no replica groups: {error}") from None


def _groups(numbers: Iterator[int]) -> Iterator[tuple[int, ...]]:
    before = 0
    for size in numbers:
        last, group = before, []
        for _ in range(size):
            step = next(numbers, None)
            if step is None:
                raise ValueError("a group is cut off")
            last += step
            group.append(last)
        before = group[0] if group else before
        yield tuple(group)
