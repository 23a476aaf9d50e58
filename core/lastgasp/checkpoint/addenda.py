"""What is added to a checkpoint that is committed already, in files beside it.

After a network partition both sides save their current step, each with the auxiliary states (random state, data
position) of the ranks it could reach. The first commit is kept, and the second side adds its auxiliary states in a
hidden file `.NAME.more-PID-RANDOM`, bound to that commit. A resume combines all of them. `.NAME.ended`, bound to it
likewise, says that a training has come to its end from there.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import re
from collections.abc import Iterable, Mapping
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
"""Greatest size in bytes of such a file."""
_DIGEST = 16
_NAME = re.compile(r"^\.(?P<checkpoint>.+)\.(more-[1-9]\d*-[0-9a-f]{12}|ended)$")


class _Addendum(msgspec.Struct, frozen=True, array_like=True):
    version: int
    of: str
    """The digest of the manifest that it belongs to."""
    aux: dict[int, bytes]


def add(checkpoint: Path, layout: Layout, aux: Mapping[int, bytes]) -> bool:
    """Store auxiliary states beside a checkpoint that another process has committed.

    Returns:
        False if it has no manifest to bind them to.

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

    Never raises, whatever is on disk.
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


def mark_ended(checkpoint: Path, manifest: Manifest) -> None:
    """Record that a training which began with a checkpoint has ended well. Raises OSError."""
    write_atomically(_ended(checkpoint), manifest.self_digest.encode())


def has_ended(checkpoint: Path, manifest: Manifest) -> bool:
    """Whether one has. Never raises, whatever is on disk."""
    try:
        return read_bounded(_ended(checkpoint), 1024) == manifest.self_digest.encode()
    except (OSError, ValueError):
        return False


def _ended(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.ended")


def ranks_named(found: Iterable[int]) -> str:
    """These ranks, for people."""
    ranks = sorted(found)
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def remove_orphans(directory: Path) -> None:
    """Remove addenda of checkpoints that no longer exist in `directory`. Raises OSError."""
    for path in (*directory.glob(".*.more-*"), *directory.glob(".*.ended")):
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
