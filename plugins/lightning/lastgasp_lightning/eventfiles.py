"""TensorBoard's event files: the removal of what was written after a moment, which a resumed run writes again.

A file is a series of records, each of a length (8 bytes), its checksum (4), the data, and theirs (4). The data are a
protobuf `Event`, whose first field is the time of the day at which the event was made.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection
from pathlib import Path

_HEAD = struct.Struct("<Q4xBd")
_AROUND = 16
_WALL_TIME = 0x09
"""The tag of field 1, a double."""


def cut_events(files: Collection[Path], moment: float) -> None:
    """Remove the records that are younger than `moment`, and the remains of an interrupted write.

    Nothing is changed if one of the files cannot be parsed.

    Raises:
        OSError: one cannot be read or written; ValueError: one is damaged.
    """
    ends = {path: _end(path, moment) for path in files}
    for path, end in ends.items():
        if end < path.stat().st_size:
            os.truncate(path, end)


def holds_nothing(path: Path) -> bool:
    """Whether there is at most one record, the one that says what the file is.

    Raises:
        OSError, ValueError: as `cut_events`.
    """
    with path.open("rb") as file:
        size = _size_of_record(file.read(_HEAD.size))[0]
    return path.stat().st_size <= size


def files_of(folder: Path, writers: Collection[str]) -> list[Path]:
    """The event files of these writers in `folder` and below it, where `add_scalars` makes a folder for each line.

    Args:
        writers: as `writer_of` returns them.
    """
    found = folder.rglob("events.out.tfevents.*")
    return sorted(path for path in found if writer_of(path.name) in writers and path.is_file())


def writer_of(name: str) -> str:
    """Host and process of the writer of the file of this name: `events.out.tfevents.{time}.{host}.{pid}.{number}`."""
    return ".".join(name.split(".")[4:]).rpartition(".")[0]


def _end(path: Path, moment: float) -> int:
    """The position of the first record to remove."""
    size, at = path.stat().st_size, 0
    with path.open("rb") as file:
        while at < size:
            file.seek(at)
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return at
            length, wall = _size_of_record(head)
            if at > 0 and wall > moment:
                return at
            if at + length > size:
                raise ValueError(f"{path} is damaged: its record at byte {at} extends beyond the end")
            at += length
    return at


def _size_of_record(head: bytes) -> tuple[int, float]:
    if len(head) < _HEAD.size:
        raise ValueError("it is not an event file")
    length, tag, wall = _HEAD.unpack(head)
    if tag != _WALL_TIME or length < 9:
        raise ValueError(f"it has a record of {length} bytes that does not begin with a time")
    return length + _AROUND, wall
