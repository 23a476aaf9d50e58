"""The manifest: what a checkpoint consists of, and the digests that prove it. Versioned JSON.

A manifest is accepted only when its bytes are exactly those that `encode` makes of it, so that a flipped
bit anywhere, white space included, is seen.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import xxhash

from lastgasp import _clock, _fs
from lastgasp._version import __version__

MANIFEST_VERSION = 2
"""The newest version that is read. 1 says nothing of the fit; manifests that say none are written as 1 still."""
LONGEST = 256 << 20
"""Bytes of a manifest that is read: those of some ten terabytes in chunks of the default size."""
Kind = Literal["gasp", "periodic"]
ProblemKind = Literal["missing", "unreadable", "newer", "damaged"]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
_Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One data file. `path` is POSIX, relative to the checkpoint's parent; digests are lower-case hex."""

    path: str
    size: _Count
    xxh3_128: _Digest
    chunk_size: Annotated[int, msgspec.Meta(gt=0)]
    chunks: tuple[_Digest, ...]
    """xxh3-128 of each `chunk_size` bytes; the last chunk may be shorter. Empty for an empty file."""
    sha256: _Sha256 | None = None

    def __post_init__(self) -> None:
        if not _is_safe(self.path):
            raise ValueError(f"path {self.path!r} leads out of the checkpoint")
        if len(self.chunks) != -(-self.size // self.chunk_size):
            raise ValueError(f"{self.path}: {len(self.chunks)} chunks do not make {self.size} bytes")


class World(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job that wrote: number of ranks, and groups of ranks that hold the same shard."""

    world_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    replica_groups: tuple[tuple[_Count, ...], ...] = ((0,),)


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which training run of its script wrote: only the same one may resume from it.

    Args:
        number: how many runs the process had begun in this directory before this one.
        model: digest of the names, shapes and dtypes of its parameters; empty where that was not looked at.
        optimizer: of the optimizers' types; data: of what is known of the data without reading them. The same.
    """

    number: _Count
    model: str = ""
    optimizer: str = ""
    data: str = ""


class Creator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who wrote, and when: wall-clock ns since the epoch."""

    version: str
    host: str
    pid: int
    time_ns: int


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the caller of a save tells about it.

    Args:
        format: whose native format the data is in, such as "lightning".
        step: completed optimizer updates.
        kind: "gasp" after a fault, "periodic" on schedule.
        job: the job's name; attempt: how often it was restarted.
        world: ranks and replica groups.
        parent: name of the newest checkpoint before this one, or None.
        fit: which run of the script; left out by a framework that has only one.
    """

    format: str
    step: _Count
    kind: Kind
    job: str
    attempt: _Count = 0
    world: World = World()
    parent: str | None = None
    fit: Fit | msgspec.UnsetType = msgspec.UNSET


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint. Fields as in `Provenance`; made by `build`, never by hand."""

    version: int
    format: str
    step: _Count
    kind: Kind
    job: str
    attempt: _Count
    world: World
    files: tuple[FileEntry, ...]
    creator: Creator
    parent: str | None
    self_digest: str
    """xxh3-128 of the compact JSON of this document with this field empty."""
    fit: Fit | msgspec.UnsetType = msgspec.UNSET
    """Not in a document of version 1."""

    def __post_init__(self) -> None:
        names = [entry.path for entry in self.files]
        if not names or len(set(names)) != len(names):
            raise ValueError("a manifest names at least one file, and each once")


class ManifestProblem(msgspec.Struct, frozen=True):
    """Why a manifest cannot be used. Only `damaged` proves that its bytes are bad."""

    kind: ProblemKind
    text: str


class _Header(msgspec.Struct):
    version: int


def build(provenance: Provenance, files: tuple[FileEntry, ...]) -> Manifest:
    """The manifest of `files`, written by this process, now.

    Raises:
        ValueError: no file, or one named twice.
    """
    creator = Creator(version=__version__, host=socket.gethostname(), pid=os.getpid(), time_ns=_clock.wall_ns())
    fields = {name: getattr(provenance, name) for name in Provenance.__struct_fields__}
    version = 1 if isinstance(provenance.fit, msgspec.UnsetType) else 2
    bare = Manifest(version=version, files=files, creator=creator, self_digest="", **fields)
    return msgspec.structs.replace(bare, self_digest=_own_digest(bare))


def encode(manifest: Manifest) -> bytes:
    """The document as it stands on disk: two-space indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def decode(data: bytes) -> Manifest | ManifestProblem:
    """Read a document; anything wrong with it is a problem, never an exception."""
    try:
        version = msgspec.json.decode(data, type=_Header).version
        if version > MANIFEST_VERSION:
            return ManifestProblem(
                "newer", f"manifest version {version} is newer than {MANIFEST_VERSION}: update lastgasp"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
        intact = manifest.self_digest == _own_digest(manifest) and encode(manifest) == data
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        return ManifestProblem("damaged", f"manifest is not readable as JSON of version 1 or 2: {error}")
    if version != (1 if isinstance(manifest.fit, msgspec.UnsetType) else 2) or not intact:
        return ManifestProblem("damaged", "manifest was changed after it was written (its own digest differs)")
    return manifest


def read(path: Path) -> Manifest | ManifestProblem:
    """Read the manifest at `path`; a failed read is a problem, never an exception."""
    try:
        data = _fs.read_bounded(path, LONGEST)
    except (FileNotFoundError, NotADirectoryError):
        return ManifestProblem("missing", "no manifest: not written by lastgasp, or never finished")
    except OSError as error:
        return ManifestProblem("unreadable", f"manifest cannot be read: {error.strerror or error}")
    return decode(data)


def _own_digest(manifest: Manifest) -> str:
    bare = msgspec.structs.replace(manifest, self_digest="")
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(bare))


def _is_safe(path: str) -> bool:
    """A relative POSIX path without `.`, `..`, empty parts, backslashes or NULs."""
    if "\\" in path or "\0" in path:
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))
