"""Moves away a checkpoint that is proven bad or does not load. Nothing is ever deleted or overwritten."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from lastgasp import _clock
from lastgasp._fs import DISK, fsync_dir, locked, write_atomically
from lastgasp.ports import Layout

from .candidates import Candidate
from .layout import MANIFEST_SUFFIX, NEXT_SUFFIX
from .manifest import Manifest, read
from .manifest_lookup import names_only
from .moving import move_parts

_log = logging.getLogger("lastgasp")


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """`<name>.corrupt.reason.json`, `<name>.unfit.reason.json`: why it was moved, and when (wall-clock ns)."""

    version: int = 1
    name: str
    step: int | None
    reasons: list[str]
    time_ns: int


def quarantine(
    candidate: Candidate, reasons: Sequence[str], *, proven: bool, layout: Layout | None = None
) -> Path | None:
    """Rename data and manifest to `<name>.corrupt...` and write the reasons beside them.

    Scattered files go to a directory of that name, where they keep their relative paths.

    Args:
        candidate: what to move. Left alone if its manifest has changed since it was listed: another process may
            have just published it again.
        reasons: one line each.
        proven: whether content was read and is bad. If False nothing happens: what could not be read (EIO, EACCES,
            ENOENT, ESTALE) may be intact and readable later.
        layout: how the checkpoint lies; needed where its files are scattered.

    Returns:
        The new path of the data, or None if nothing was moved: not proven, done by a racing rank, or the directory
        cannot be changed (which is logged; the candidate is rejected anyway).
    """
    return _move_away(candidate, reasons, "corrupt", layout) if proven else None


def set_aside_unfit(candidate: Candidate, reasons: Sequence[str], layout: Layout | None = None) -> Path | None:
    """Rename an intact checkpoint that this job cannot load to `<name>.unfit...`, with the reasons beside it.

    A suitable job can use it again once data and manifest are renamed back. Arguments and result as in
    `quarantine`; for callers that know that another one has been loaded (`trial.Trial`).
    """
    return _move_away(candidate, reasons, "unfit", layout)


def _move_away(candidate: Candidate, reasons: Sequence[str], ending: str, layout: Layout | None) -> Path | None:
    try:
        with locked(candidate.path.parent):
            return None if _changed(candidate, layout) else _move(candidate, list(reasons), ending, layout)
    except OSError as error:
        _log.warning("%s is %s and could not be moved away: %s", candidate.path, ending, error)
        return None


def _changed(candidate: Candidate, layout: Layout | None) -> bool:
    """Whether the manifest in place is valid, and not the one that was judged."""
    found = read(_beside(candidate.path, MANIFEST_SUFFIX))
    judged = candidate.manifest.self_digest if candidate.manifest else None
    # A matching `.next` manifest is judged while the older one is still in place: leave that to commit.
    return isinstance(found, Manifest) and found.self_digest != judged and _names(found, candidate.path, layout)


def _names(found: Manifest, path: Path, layout: Layout | None) -> bool:
    if layout is not None:
        return names_only(found, path, layout)
    return found.files[0].path.split("/")[0] == path.name


def _move(candidate: Candidate, reasons: list[str], ending: str, layout: Layout | None) -> Path | None:
    path = candidate.path
    home = _free_name(path, ending)
    moved = [move_parts(path, layout, home)]
    moved += [_rename(_beside(path, suffix), _beside(home, suffix)) for suffix in (MANIFEST_SUFFIX, NEXT_SUFFIX)]
    if not any(moved):
        return None
    note = Reason(name=path.name, step=candidate.step, reasons=reasons, time_ns=_clock.wall_ns())
    write_atomically(_beside(home, ".reason.json"), msgspec.json.format(msgspec.json.encode(note)) + b"\n")
    fsync_dir(path.parent)
    return home


def _rename(src: Path, dst: Path) -> bool:
    try:
        DISK.rename(src, dst)
    except FileNotFoundError:
        return False
    return True


def _free_name(path: Path, ending: str) -> Path:
    """`<name>.<ending>`, with a number if that name exists."""
    for number in itertools.count():
        home = _beside(path, f".{ending}-{number}" if number else f".{ending}")
        taken = [home, *(_beside(home, end) for end in (MANIFEST_SUFFIX, NEXT_SUFFIX, ".reason.json"))]
        if not any(os.path.lexists(name) for name in taken):
            return home
    raise AssertionError("unreachable")


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)
