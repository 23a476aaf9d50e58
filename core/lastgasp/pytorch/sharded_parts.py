"""What one rank has written of a sharded checkpoint, and how the parts of all savers become one."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.manifest import FileEntry
from lastgasp.pytorch.sharded import metadata


class Part(msgspec.Struct, frozen=True):
    """What the rank that publishes must know of another's files.

    Attributes:
        folder, entries: as `Staged.sealed` returns them.
        shards: descriptions of the written files, for `.metadata`.
        aux: auxiliary states, by rank, of the same step.
    """

    folder: str
    entries: tuple[FileEntry, ...]
    shards: tuple[bytes, ...]
    aux: dict[int, bytes] = {}


_DECODER = msgspec.msgpack.Decoder(Part)


def part_of(staged: Staged, shards: list[bytes], aux: Mapping[int, bytes]) -> bytes:
    """Seal the files and describe them. Raises OSError."""
    folder, entries = staged.sealed()
    return msgspec.msgpack.encode(Part(str(folder), entries, tuple(shards), dict(aux)))


def aux_of_parts(parts: Mapping[int, bytes]) -> dict[int, bytes]:
    """The auxiliary states that came with the shards."""
    found: dict[int, bytes] = {}
    for data in parts.values():
        found |= _DECODER.decode(data).aux
    return found


def merge(staged: Staged, own: bytes, parts: Mapping[int, bytes], beside: Mapping[str, Any]) -> None:
    """Bring the files of all savers together, with `.metadata` and the framework's own files.

    Args:
        staged: of the rank that publishes; own: its part.
        beside: name of a further file -> what `torch.save` writes there.

    Raises:
        CheckpointError: shards are missing.
        OSError: the disk refused.
    """
    content = metadata(described(parts))
    bring(staged, own, parts, beside)
    staged.open(f"{staged.target.name}/.metadata").write(content)


def described(parts: Mapping[int, bytes]) -> list[bytes]:
    """The descriptions of all written files."""
    return [each for _, data in sorted(parts.items()) for each in _DECODER.decode(data).shards]


def bring(staged: Staged, own: bytes, parts: Mapping[int, bytes], beside: Mapping[str, Any]) -> None:
    """Bring the files of all savers together, and write those beside them. As for `merge`."""
    for _, data in sorted(parts.items()):
        if data != own:
            part = _DECODER.decode(data)
            staged.adopt(Path(part.folder), part.entries)
    for file, value in beside.items():
        buffer = io.BytesIO()
        torch.save(value, buffer)
        staged.open(f"{staged.target.name}/{file}").write(buffer.getbuffer())
