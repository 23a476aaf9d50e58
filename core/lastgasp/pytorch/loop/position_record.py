"""How the position of a custom training loop is laid out in its checkpoints."""

from __future__ import annotations

import msgspec

from lastgasp.errors import CheckpointError
from lastgasp.pytorch.position import ELASTIC, PassStart
from lastgasp.pytorch.position.records import joined, split


class Row(msgspec.Struct, kw_only=True):
    """One pass in a position.

    Attributes:
        consumed: batches given.
        outer: the loop is in the body of this pass, in which a later one runs.
        over: it is exhausted, or was broken off.
        state: of a stateful loader, pickled.
        ahead: random state under which the batch was made that waits (`fetches_ahead`).
    """

    kind: str
    consumed: int
    outer: bool = False
    over: bool = False
    state: bytes = b""
    ahead: bytes = b""


class Fixed(PassStart, kw_only=True):
    """The part of a pass that changes only when it begins.

    Attributes:
        sampler: state of the user's sampler, pickled.
        fetch: of an outer pass: random state right before its newest batch was fetched.
    """

    sampler: bytes = b""
    fetch: bytes = b""


class Position(msgspec.Struct, kw_only=True):
    """The position of a rank.

    Attributes:
        epoch: the epoch, as the user counts it.
        done: completed passes of it that are no longer listed.
        rows: the passes after those.
        explicit: epochs are counted by `session.epochs`.
        stale: it was captured with the random state and buffers before an update, and the loop usually draws more, or
            changes buffers, after it.
        extra: digest of the rank's `extra`, which should be the same on all ranks; empty if unknown.
        ends: number of a pass in its epoch -> state of its loader when it last ended, if any.
    """

    version: int = 1
    epoch: int = 0
    done: int = 0
    explicit: bool = False
    rows: list[Row] = []
    stale: bool = False
    extra: bytes = b""
    ends: dict[int, bytes] = {}


_POSITION = msgspec.msgpack.Decoder(Position)
_FIXED = msgspec.msgpack.Decoder(list[Fixed])


def encode(position: Position, fixed: bytes) -> bytes:
    """Both parts; the second one seldom changes."""
    return joined(msgspec.msgpack.encode(position), fixed)


def position_only(data: bytes) -> bytes:
    """The position of another rank, for one whose own was lost: the number of batches, but not the random state."""
    position, fixed = decode(data)
    for row in position.rows:
        row.state, row.ahead = row.state if row.kind == ELASTIC else b"", b""
    position.ends = {}
    return encode(position, msgspec.msgpack.encode([Fixed() for _ in fixed]))


def about(data: bytes) -> tuple[bool, bytes]:
    """`stale` and `extra` of an encoded position; False and empty if there is none."""
    position = decode(data)[0] if data else Position()
    return position.stale, position.extra


def decode(data: bytes) -> tuple[Position, list[Fixed]]:
    """What `encode` made.

    Raises:
        CheckpointError: of another version, or damaged.
    """
    try:
        head, tail = split(data)
        position, fixed = _POSITION.decode(head), _FIXED.decode(tail)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"the data position in the checkpoint cannot be read: {error}") from error
    if position.version != 1:
        raise CheckpointError(f"the data position has version {position.version}, this lastgasp reads 1")
    return position, fixed


def started(fixed: Fixed) -> PassStart:
    """The part that the loader's own position made."""
    return PassStart(**{name: getattr(fixed, name) for name in PassStart.__struct_fields__})
