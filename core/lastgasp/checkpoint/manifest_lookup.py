"""Finds the manifest that belongs to the data: the one in place, or one left as `.next` by a killed commit."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lastgasp._fs import DISK, Disk, replace_durably
from lastgasp.ports import Layout

from .digest import digest_file
from .layout import next_path
from .manifest import Manifest, ManifestProblem, read


def read_pair(checkpoint: Path, layout: Layout) -> Manifest | ManifestProblem:
    """Return the manifest of `checkpoint`, or why there is none. Never raises, whatever is on disk.

    A `.next` manifest exists only if a commit was killed; then the data is hashed to see which of the two it matches.
    If it matches neither, the one in place is returned, and verification fails.
    """
    path = layout.manifest_path(checkpoint)
    found = read(path)
    return _pending(checkpoint, layout, found) or _own(checkpoint, layout, found)


def has_manifest(checkpoint: Path, layout: Layout) -> bool:
    """Whether there is a manifest to verify with: in place (valid or not), or a `.next` one that matches the data."""
    return layout.manifest_path(checkpoint).exists() or isinstance(read_pair(checkpoint, layout), Manifest)


def heal(checkpoint: Path, layout: Layout, disk: Disk = DISK) -> None:
    """Complete a killed commit: put a `.next` manifest that matches the data in place.

    The caller holds the lock of the directory. Raises OSError.
    """
    path = layout.manifest_path(checkpoint)
    if _pending(checkpoint, layout, read(path)):
        with contextlib.suppress(FileNotFoundError):
            replace_durably(next_path(path), path, disk)


def _pending(checkpoint: Path, layout: Layout, found: Manifest | ManifestProblem) -> Manifest | None:
    """The `.next` manifest, if the data matches it and not the one in place."""
    waiting = read(next_path(layout.manifest_path(checkpoint)))
    if not isinstance(waiting, Manifest) or not names_only(waiting, checkpoint, layout):
        return None
    if isinstance(found, Manifest) and (found == waiting or _fits(found, checkpoint)):
        return None
    return waiting if _fits(waiting, checkpoint) else None


def _own(checkpoint: Path, layout: Layout, found: Manifest | ManifestProblem) -> Manifest | ManifestProblem:
    if isinstance(found, Manifest) and not names_only(found, checkpoint, layout):
        foreign = next(entry.path for entry in found.files if not layout.owns(checkpoint, entry.path))
        whose = foreign.split("/")[0] if layout.owns(checkpoint, checkpoint.name) else foreign
        return ManifestProblem(
            "damaged",
            f"manifest is that of {whose}: a manifest was copied, or the "
            "checkpoint renamed. Put both back under their own name",
        )
    return found


def names_only(manifest: Manifest, checkpoint: Path, layout: Layout) -> bool:
    """Whether every file of the manifest belongs to the checkpoint, by its path."""
    return all(layout.owns(checkpoint, entry.path) for entry in manifest.files)


def _fits(manifest: Manifest, checkpoint: Path) -> bool:
    return all(
        _same(checkpoint.parent / entry.path, entry.path, entry.size, entry.xxh3_128) for entry in manifest.files
    )


def _same(path: Path, relative: str, size: int, digest: str) -> bool:
    try:
        return path.stat().st_size == size and digest_file(path, relative).xxh3_128 == digest
    except OSError:
        return False
