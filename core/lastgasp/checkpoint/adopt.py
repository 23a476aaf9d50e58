"""Writes manifests for checkpoints written by other programs, in place: files are made durable and read back.

The manifest proves what is on disk; whether that is what was in memory can no longer be checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lastgasp._fs import fsync_dir, locked, open_regular, write_atomically
from lastgasp.errors import CheckpointError
from lastgasp.ports import Layout

from .digest import digest_file
from .layout import MANIFEST_SUFFIX, next_path
from .manifest import FileEntry, Manifest, Provenance, build, encode

ADOPTED = "lastgasp manifest"
"""The job in manifests that this command writes: the checkpoints do not record theirs."""


def read_entries(checkpoint: Path, layout: Layout, share: tuple[int, int] = (0, 1)) -> list[FileEntry]:
    """Make every i-th of n files durable and digest it, for `share` (i, n). Raises OSError."""
    files = sorted(data_files(checkpoint, layout).items())
    entries = read_files(dict(files[share[0] :: share[1]]))
    for folder in sorted({path.parent for _, path in files}):
        fsync_dir(folder)
    return entries


def read_files(files: Mapping[str, Path], *, sha256: bool = False) -> list[FileEntry]:
    """Make files, and their names, durable and digest them.

    Args:
        files: the path that the manifest records -> where the file is.
        sha256: with SHA-256 digests, too.

    Raises:
        OSError: a file cannot be read, or the disk refused.
    """
    entries = [_durable(path, name, sha256) for name, path in sorted(files.items())]
    for folder in sorted({path.parent for path in files.values()}):
        fsync_dir(folder)
    return entries


def write_manifest(checkpoint: Path, layout: Layout, provenance: Provenance, entries: Sequence[FileEntry]) -> Manifest:
    """Write the manifest beside `checkpoint`, durably, replacing an existing one.

    Raises:
        CheckpointError: the entries are not the files of the checkpoint.
        OSError: the disk refused.
    """
    found, named = set(data_files(checkpoint, layout)), {entry.path for entry in entries}
    if found != named or not found:
        raise CheckpointError(
            f"{checkpoint}: its files are not those that were read: {sorted(found ^ named)[:5] or 'none at all'}. "
            "Is another job writing there, or do the ranks see different disks?"
        )
    manifest = build(provenance, tuple(sorted(entries, key=lambda entry: entry.path)))
    path = layout.manifest_path(checkpoint)
    with locked(checkpoint.parent):
        write_atomically(path, encode(manifest))
        next_path(path).unlink(missing_ok=True)  # only now: until here it may be the valid manifest of the data
    return manifest


def remove_orphans(directory: Path, layout: Layout) -> list[Path]:
    """Remove manifests whose checkpoint was removed by a program that does not know manifests.

    Raises:
        OSError: the disk refused.
    """
    gone = [path for path in layout.discover(directory) if not layout.parts(path) and _is_gone(path)]
    for path in gone:
        layout.manifest_path(path).unlink(missing_ok=True)
    return gone


def _is_gone(path: Path) -> bool:
    """And not only out of reach for the moment."""
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def data_files(checkpoint: Path, layout: Layout) -> dict[str, Path]:
    """The files that belong into its manifest: no hidden ones, except torch's `.metadata`."""
    found = layout.files(checkpoint)
    return {name: path for name, path in found.items() if not _hidden(name.rpartition("/")[2])}


def _hidden(name: str) -> bool:
    return (name.startswith(".") and name != ".metadata") or name.endswith(MANIFEST_SUFFIX)


def _durable(path: Path, name: str, sha256: bool) -> FileEntry:
    """Flush a file to disk and read it meanwhile: what was written last is still in memory."""
    fd = open_regular(path)
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="lastgasp-fsync") as pool:
            flushed = pool.submit(os.fsync, fd)
            entry = digest_file(path, name, sha256=sha256)
            flushed.result()
    finally:
        os.close(fd)
    return entry
