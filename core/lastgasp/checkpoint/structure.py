"""Compares names and sizes of a checkpoint's files with its manifest; reads no content."""

from __future__ import annotations

import stat
from fnmatch import fnmatchcase
from pathlib import Path

from lastgasp.ports import Layout

from .manifest import FileEntry, Manifest
from .verdict import Damage, of_error

_READ = {
    "transformers": ("*pytorch_model*", "model.safetensors*", "model-*.safetensors", "adapter_*", "*optimizer*",
                     "scheduler.pt", "scaler.pt", "rng_state*", "trainer_state.json", "lastgasp.pt",
                     "checkpoint-is-incomplete*"),
}  # fmt: skip
"""Formats into whose directories others write (callbacks of Trainer, in `on_save`): which of their files are damage, as
they would be loaded when training is resumed, or say that something is wrong. Of any other format all are."""
_NEVER_READ = {"transformers": frozenset({"training_args.bin"})}
"""What scripts remove from a checkpoint, as nothing reads it."""


def compare(checkpoint: Path, layout: Layout, manifest: Manifest) -> tuple[list[Damage], list[FileEntry]]:
    """Return damages of names and sizes, and the entries whose content is to be read. Never raises OSError."""
    damages, sound = [], []
    never_read = _NEVER_READ.get(manifest.format, frozenset())
    for entry in manifest.files:
        damage = size_damage(checkpoint.parent / entry.path, entry)
        if damage is None:
            sound.append(entry)
        elif damage.kind != "missing" or entry.path.rpartition("/")[2] not in never_read:
            damages.append(damage)
    return damages + _foreign(checkpoint, layout, manifest), sound


def size_damage(path: Path, entry: FileEntry) -> Damage | None:
    """The damage in the size of the file at `path`, or None."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return Damage(file=entry.path, kind="missing", length=entry.size, detail="file is missing")
    except OSError as error:
        return of_error(entry.path, 0, entry.size, error)
    if not stat.S_ISREG(status.st_mode):
        return Damage(file=entry.path, kind="unreadable", length=entry.size, detail="is not a regular file")
    if status.st_size == entry.size:
        return None
    low, high = sorted((status.st_size, entry.size))
    detail = f"has {status.st_size} bytes, not {entry.size}"
    return Damage(file=entry.path, kind="size", offset=low, length=high - low, detail=detail, proven=True)


def _foreign(checkpoint: Path, layout: Layout, manifest: Manifest) -> list[Damage]:
    """Files that the manifest does not name. Hidden ones (`.nfs...`, `.DS_Store`) are ignored."""
    read = _READ.get(manifest.format, ("*",))
    try:
        found = layout.files(checkpoint)
    except OSError as error:
        return [of_error(checkpoint.name, 0, 0, error)]
    extra = sorted(set(found) - {entry.path for entry in manifest.files} - {checkpoint.name})
    return [
        Damage(file=name, kind="foreign", detail="is not in the manifest: move it out of the checkpoint")
        for name in extra
        if not name.rpartition("/")[2].startswith(".")
        and any(fnmatchcase(part, pattern) for part in name.split("/")[1:] or [name] for pattern in read)
    ]
