"""The manifest: what a checkpoint consists of, and the digests that prove it. Versioned JSON.

A manifest is accepted only if its bytes are exactly those that `encode` produces, so that a flipped bit anywhere,
even in white space, is detected.
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

MANIFEST_VERSION = 3
"""The newest supported version. Version 1 has no fit; manifests without one are still written as version 1."""
LONGEST = 256 << 20
"""Greatest size of a manifest in bytes: enough for some ten terabytes in chunks of the default size."""
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
    """The writing job: number of ranks, and groups of ranks that hold the same shard."""

    world_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    replica_groups: tuple[tuple[_Count, ...], ...] = ((0,),)


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The training run of its script that wrote it: only the same one may resume from it.

    Args:
        number: number of runs that the process had begun in this directory before.
        model: digest of the names, shapes and dtypes of its parameters; empty if it was not determined.
        optimizer: likewise of the optimizers' types; data: likewise of what is known of the data without reading them.
        home: that directory, as a path from the checkpoint's; left out where the checkpoint lies in it.
    """

    number: _Count
    model: str = ""
    optimizer: str = ""
    data: str = ""
    home: str | msgspec.UnsetType = msgspec.UNSET


class Creator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which process wrote it, and when: wall-clock ns since the epoch."""

    version: str
    host: str
    pid: int
    time_ns: int


class Provenance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the caller of a save states about it.

    Args:
        format: the framework whose native format the data has, such as "lightning".
        step: completed optimizer updates.
        kind: "gasp" after a fault, "periodic" on schedule.
        job: the job's name; attempt: how often it was restarted.
        world: ranks and replica groups.
        parent: name of the newest checkpoint before this one, or None.
        fit: which run of the script; left out by a framework that has only one.
        since_ns: of the job's `Place`; what it saves is dated no earlier, whatever this host's clock says.
    """

    format: str
    step: _Count
    kind: Kind
    job: str
    attempt: _Count = 0
    world: World = World()
    parent: str | None = None
    fit: Fit | msgspec.UnsetType = msgspec.UNSET
    since_ns: int = 0


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One checkpoint. Fields as in `Provenance`, without `since_ns`; created only by `build`."""

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
    """Absent in version 1; its `home` is there since version 3, and alone makes one of that version."""

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
    """Create the manifest of `files`, written by this process at this time.

    Raises:
        ValueError: no file, or one named twice.
    """
    now = max(_clock.wall_ns(), provenance.since_ns)
    creator = Creator(version=__version__, host=socket.gethostname(), pid=os.getpid(), time_ns=now)
    fields = {name: getattr(provenance, name) for name in Provenance.__struct_fields__ if name != "since_ns"}
    bare = Manifest(version=_version(provenance.fit), files=files, creator=creator, self_digest="", **fields)
    return msgspec.structs.replace(bare, self_digest=_own_digest(bare))


def encode(manifest: Manifest) -> bytes:
    """Encode it as on disk: JSON indented by two spaces, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def decode(data: bytes) -> Manifest | ManifestProblem:
    """Decode a document; anything wrong with it is returned as a problem, never raised."""
    try:
        version = msgspec.json.decode(data, type=_Header).version
        if version > MANIFEST_VERSION:
            return ManifestProblem(
                "newer", f"manifest version {version} is newer than {MANIFEST_VERSION}: update lastgasp"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
        intact = manifest.self_digest == _own_digest(manifest) and encode(manifest) == data
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        versions = f"version 1 to {MANIFEST_VERSION}"
        return ManifestProblem("damaged", f"manifest is not readable as JSON of {versions}: {error}")
    if version != _version(manifest.fit) or not intact:
        return ManifestProblem("damaged", "manifest was changed after it was written (its own digest differs)")
    return manifest


def read(path: Path) -> Manifest | ManifestProblem:
    """Read the manifest at `path`; a failed read is returned as a problem, never raised."""
    try:
        data = _fs.read_bounded(path, LONGEST)
    except (FileNotFoundError, NotADirectoryError):
        return ManifestProblem("missing", "no manifest: not written by lastgasp, or never finished")
    except OSError as error:
        return ManifestProblem("unreadable", f"manifest cannot be read: {error.strerror or error}")
    return decode(data)


def _version(fit: Fit | msgspec.UnsetType) -> int:
    if isinstance(fit, msgspec.UnsetType):
        return 1
    return 2 if isinstance(fit.home, msgspec.UnsetType) else 3


def _own_digest(manifest: Manifest) -> str:
    bare = msgspec.structs.replace(manifest, self_digest="")
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(bare))


def _is_safe(path: str) -> bool:
    """A relative POSIX path without `.`, `..`, empty parts, backslashes or NULs."""
    if "\\" in path or "\0" in path:
        return False
    return all(part not in ("", ".", "..") for part in path.split("/"))
