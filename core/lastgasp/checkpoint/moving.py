"""Move a whole checkpoint, whatever its layout: one rename, or one for each of its files."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from pathlib import Path

from lastgasp._fs import DISK, Disk
from lastgasp.ports import Layout

_log = logging.getLogger("lastgasp")


def move_parts(checkpoint: Path, layout: Layout | None, home: Path, disk: Disk = DISK) -> bool:
    """Rename what stands of `checkpoint` to `home`; scattered files keep their places relative to each other below it.

    A file that vanished meanwhile is no error. Without a layout it is the path itself that moves.

    Returns:
        Whether anything was moved.

    Raises:
        OSError: the disk refused; files at several file systems cannot be moved to one place.
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


def set_aside(checkpoint: Path, layout: Layout, disk: Disk = DISK) -> Path:
    """Move what stands there to a hidden name beside it, so that its place is free; its manifest goes.

    The caller holds the lock of the directory. Raises OSError.
    """
    home = next(
        path
        for number in itertools.count(1)
        if not os.path.lexists(path := checkpoint.with_name(f".{checkpoint.name}.aside-{number}"))
    )
    _log.warning("%s was there already: moved to %s", checkpoint, home.name)
    move_parts(checkpoint, layout, home, disk)
    with contextlib.suppress(FileNotFoundError):
        disk.remove(layout.manifest_path(checkpoint))
    return home
