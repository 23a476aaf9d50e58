"""Moves a complete checkpoint of any layout: by one rename, or by one for each of its files."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
from pathlib import Path

from lastgasp._fs import DISK, Disk, locked, make_directory
from lastgasp.ports import Layout

from .layout import next_path

_log = logging.getLogger("lastgasp")
_ASIDE = re.compile(r"\.(.+)\.aside-\d+")


def move_parts(checkpoint: Path, layout: Layout | None, home: Path, disk: Disk = DISK) -> bool:
    """Rename the files of `checkpoint` to `home`; scattered files keep their relative paths below it.

    A file that vanished meanwhile is no error. Without a layout the path itself is moved.

    Returns:
        Whether anything was moved.

    Raises:
        OSError: the disk refused; files on several file systems cannot be moved to one place.
    """
    folders, parts = set(), [checkpoint] if layout is None else layout.parts(checkpoint)
    for path in parts:
        target = home
        if parts != [checkpoint]:
            target = home / path.relative_to(checkpoint.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            disk.rename(path, target)
            folders |= {path.parent, target.parent}
    for folder in sorted(folders):
        disk.sync_dir(folder)
    return bool(folders)


def set_aside(checkpoint: Path, layout: Layout, disk: Disk = DISK, *, tell: bool = True) -> Path:
    """Move a checkpoint and its manifest to a hidden name beside it, to free its path.

    Nothing here removes it; `lastgasp verify` lists it. The caller holds the lock of the directory, and says with
    `tell` whether people hear of it. Raises OSError.
    """
    home = next(
        path
        for number in itertools.count(1)
        if not os.path.lexists(path := checkpoint.with_name(f".{checkpoint.name}.aside-{number}"))
    )
    _log.log(logging.WARNING if tell else logging.DEBUG, "%s was there already: moved to %s", checkpoint, home.name)
    move_parts(checkpoint, layout, home, disk)
    with contextlib.suppress(FileNotFoundError):
        disk.rename(layout.manifest_path(checkpoint), manifest_aside(home))
    return home


def aside_in(directory: Path) -> list[Path]:
    """The checkpoints that `set_aside` has moved, oldest first."""
    found = [path for path in directory.glob(".*.aside-*") if _ASIDE.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path.name.rpartition("-")[0], int(path.name.rpartition("-")[2])))


def put_back(directory: Path, layout: Layout, disk: Disk = DISK) -> list[Path]:
    """Undo `set_aside` if the commit was killed before it put a file of its own in place.

    Called by the process that selects the checkpoint, before it lists them. Never raises, whatever is on disk.

    Returns:
        The restored checkpoints, which may be incomplete if they were so before.
    """
    back: dict[Path, None] = {}
    try:
        for home in reversed(aside_in(directory)):
            match = _ASIDE.fullmatch(home.name)
            checkpoint = directory / (match[1] if match else "")
            with locked(directory):
                if checkpoint not in back and _was_cut_short(checkpoint, home, layout):
                    _move_back(checkpoint, home, layout, disk)
                    back[checkpoint] = None
    except OSError as error:
        _log.warning("%s: what a killed commit moved aside could not be moved back: %s", directory, error)
    return list(back)


def _was_cut_short(checkpoint: Path, home: Path, layout: Layout) -> bool:
    """Whether a commit announced itself for this path and has not put any of its files in place."""
    if not next_path(layout.manifest_path(checkpoint)).exists():
        return False
    return not any(os.path.lexists(place) for _, place in _ways_back(checkpoint, home, layout))


def _ways_back(checkpoint: Path, home: Path, layout: Layout) -> list[tuple[Path, Path]]:
    if layout.owns(checkpoint, checkpoint.name):
        return [(home, checkpoint)]
    return [(path, checkpoint.parent / path.relative_to(home)) for path in sorted(home.rglob("*")) if path.is_file()]


def _move_back(checkpoint: Path, home: Path, layout: Layout, disk: Disk) -> None:
    ways = _ways_back(checkpoint, home, layout)
    for path, place in ways:
        make_directory(place.parent)
        disk.rename(path, place)
    with contextlib.suppress(FileNotFoundError):
        disk.rename(manifest_aside(home), layout.manifest_path(checkpoint))
    with contextlib.suppress(FileNotFoundError):
        disk.remove(next_path(layout.manifest_path(checkpoint)))
    for folder in sorted({checkpoint.parent, *(place.parent for _, place in ways)}):
        disk.sync_dir(folder)
    if home.is_dir():  # scattered files leave their folders
        disk.remove(home)
    _log.warning("%s stands again: the save that wanted its place was cut short", checkpoint)


def manifest_aside(home: Path) -> Path:
    """Where `set_aside` puts the manifest: a name without the manifests' suffix, so that it is not taken for one."""
    return home.with_name(f"{home.name}.manifest")
