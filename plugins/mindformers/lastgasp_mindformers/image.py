"""What one rank alone holds of a step, as the bytes that it copies into its arena.

A head of msgpack says where each parameter lies behind it: the parameters are copied from their own memory, and read
where they are. Whoever writes an image needs nothing else of the rank that it came from.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from lastgasp.adapter import NotSaveable
from lastgasp_mindformers.aux_state import Numbers, decode
from lastgasp_mindformers.digests import bytes_of

Piece = bytes | memoryview
_HEAD = struct.Struct("<qq")  # bytes of the msgpack, where the parameters begin
_ALIGNED = 64


class Held(msgspec.Struct, frozen=True, array_like=True):
    """One parameter: name, MindSpore's type, shape, and where its bytes lie behind the head."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    size: int


class _Head(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    aux: bytes
    held: tuple[Held, ...]


_HEADS = msgspec.msgpack.Decoder(_Head)


class Image:
    """What an arena holds of one step.

    Attributes:
        rank: whose; aux: its auxiliary state when it was copied; held: its parameters, by name.
    """

    def __init__(self, payload: memoryview) -> None:
        """Raises NotSaveable: it is none."""
        try:
            size, begin = _HEAD.unpack_from(payload)
            head = _HEADS.decode(payload[_HEAD.size : _HEAD.size + size])
            self.numbers: Numbers = decode(head.aux).numbers
        except (struct.error, msgspec.MsgspecError, ValueError) as error:
            raise NotSaveable(f"an arena does not hold a step of MindSpore: {error}") from error
        self.rank, self.aux = head.rank, head.aux
        self.held = {one.name: one for one in head.held}
        self._behind = payload[begin:]

    def bytes_of(self, one: Held) -> memoryview:
        """Its bytes, where they lie."""
        return self._behind[one.start : one.start + one.size]

    def differing(self, params: Mapping[str, Any], left_out: Iterable[str]) -> list[str]:
        """Names of those of `params` that are not what this holds of them."""
        names = self.held.keys() - set(left_out)
        return sorted(name for name in names & params.keys() if self.bytes_of(self.held[name]) != _memory(params[name]))


def encoded(rank: int, aux: bytes, params: Mapping[str, Any]) -> list[Piece]:
    """The bytes of an image, in pieces, of which most are the parameters' own memory."""
    held, pieces, at = [], list[Piece](), 0
    for name, param in params.items():
        piece = _memory(param)
        held.append(Held(name, str(param.dtype), tuple(param.shape), at, piece.nbytes))
        pieces.append(piece)
        at += piece.nbytes
        if gap := -at % _ALIGNED:
            pieces.append(bytes(gap))
            at += gap
    packed = msgspec.msgpack.encode(_Head(rank, aux, tuple(held)))
    begin = _HEAD.size + len(packed) + -(_HEAD.size + len(packed)) % _ALIGNED
    return [(_HEAD.pack(len(packed), begin) + packed).ljust(begin, b"\0"), *pieces]


def _memory(param: Any) -> memoryview:
    return memoryview(bytes_of(param)).cast("B")
