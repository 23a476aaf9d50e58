"""How positions are laid out as bytes: what changes at each boundary first, then what seldom does, encoded once."""

from __future__ import annotations

import msgspec

from lastgasp.errors import CheckpointError
from lastgasp.pytorch.position.protocol import PassStart

MAGIC = b"LGD2"
"""Begins the record of an `EpochPosition`; 2 is its version."""


class EpochRecord(msgspec.Struct, kw_only=True):
    """What an `EpochPosition` records.

    Attributes:
        kinds: of the loaders, in order.
        states: of the loaders that have one; empty for the others.
        fetch: random state right before the first batch was fetched that is not consumed; empty where none was ahead.
        data: fingerprint of the data, as the adapter knows it.
        made: random state right before the loaders were made, where they may have drawn their data with it.
        before: batches that the framework had counted when it began to iterate the loaders anew, as of a checkpoint
            that had no position.
        starts: of the loaders.
    """

    kinds: list[str] = []
    states: list[bytes] = []
    fetch: bytes = b""
    data: str = ""
    made: bytes = b""
    before: int = 0
    starts: list[PassStart] = []


def joined(head: bytes, tail: bytes) -> bytes:
    """Both parts; `split` takes them apart."""
    return len(head).to_bytes(4, "little") + head + tail


def split(data: bytes) -> tuple[bytes, bytes]:
    """What `joined` joined."""
    size = int.from_bytes(data[:4], "little")
    return data[4 : 4 + size], data[4 + size :]


def encode_epoch(head: EpochRecord, starts: bytes) -> bytes:
    """A record; `starts` are encoded already."""
    return MAGIC + joined(msgspec.msgpack.encode(head), starts)


def is_epoch_record(data: bytes) -> bool:
    """Whether `data` is a record of this version."""
    return data.startswith(MAGIC)


def decode_epoch(data: bytes) -> EpochRecord:
    """What `encode_epoch` made.

    Raises:
        CheckpointError: of another version, or damaged.
    """
    if not is_epoch_record(data):
        raise CheckpointError(f"the data position begins with {data[:4]!r}, this lastgasp reads {MAGIC!r}")
    head, starts = split(data[len(MAGIC) :])
    try:
        record = _HEAD.decode(head)
        record.starts = _STARTS.decode(starts)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"the data position in the checkpoint cannot be read: {error}") from error
    return record


_HEAD = msgspec.msgpack.Decoder(EpochRecord)
_STARTS = msgspec.msgpack.Decoder(list[PassStart])
