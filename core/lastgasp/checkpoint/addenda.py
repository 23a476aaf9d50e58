"""What ranks knew of a step that somebody else had committed before them: it is put beside that checkpoint.

After a cut both sides save the step that they stand on, each with the auxiliary states (random state, data position) of
the ranks that it could reach. The first commit stands, and the second one adds its auxiliary states in a hidden file of
its own, `.NAME.more-PID-RANDOM`, bound to that very commit. A resume puts all of them together.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import xxhash

from lastgasp._fs import DISK, read_bounded, unique_temp, write_atomically
from lastgasp.ports import Layout

from .manifest import Manifest
from .manifest_lookup import read_pair

log = logging.getLogger("lastgasp")

VERSION = 1
LONGEST = 1 << 30
"""Bytes of one of these files that is read."""
_DIGEST = 16
_NAME = re.compile(r"^\.(?P<checkpoint>.+)\.more-[1-9]\d*-[0-9a-f]{12}$")


class _Addendum(msgspec.Struct, frozen=True, array_like=True):
    version: int
    of: str
    """The own digest of the manifest that it belongs to."""
    aux: dict[int, bytes]


def add(checkpoint: Path, layout: Layout, aux: Mapping[int, bytes]) -> bool:
    """Put auxiliary states beside a checkpoint that somebody else has committed.

    Returns:
        False where it has no manifest to be bound to.

    Raises:
        OSError: the disk refused.
    """
    manifest = read_pair(checkpoint, layout)
    if not isinstance(manifest, Manifest):
        return False
    body = msgspec.msgpack.encode(_Addendum(VERSION, manifest.self_digest, dict(aux)))
    tail = unique_temp(checkpoint).name.rpartition(".tmp-")[2]
    write_atomically(checkpoint.with_name(f".{checkpoint.name}.more-{tail}"), _digest(body) + body)
    return True


def added(checkpoint: Path, layout: Layout) -> dict[int, bytes]:
    """The auxiliary states put beside a checkpoint; what is incomplete or of another commit is left out.

    Never raises for what is on disk.
    """
    found = sorted(checkpoint.parent.glob(f".{glob.escape(checkpoint.name)}.more-*"))
    if not found:
        return {}
    manifest = read_pair(checkpoint, layout)
    aux: dict[int, bytes] = {}
    for path in found if isinstance(manifest, Manifest) else ():
        one = _read(path)
        if one is not None and isinstance(manifest, Manifest) and one.of == manifest.self_digest:
            aux |= one.aux
    return aux


def remove_orphans(directory: Path) -> None:
    """Remove what belongs to checkpoints of `directory` that are gone. Raises OSError."""
    for path in directory.glob(".*.more-*"):
        match = _NAME.match(path.name)
        if match is not None and not (directory / match["checkpoint"]).exists():
            with contextlib.suppress(FileNotFoundError):
                DISK.remove(path)


def _read(path: Path) -> _Addendum | None:
    try:
        data = read_bounded(path, LONGEST)
        body = data[_DIGEST:]
        if data[:_DIGEST] != _digest(body):
            raise ValueError("its digest differs")
        one = msgspec.msgpack.decode(body, type=_Addendum)
        return one if one.version == VERSION else None
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        log.warning("%s was not used: %s", path, error)
        return None


def _digest(body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(body)
