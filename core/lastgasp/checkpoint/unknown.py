"""Finds training files of no known layout: a directory with such files is not empty."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from lastgasp.ports import Layout

from .candidates import candidates
from .layout import data_names, is_moved_away

_WEIGHTS = (".ckpt", ".pt", ".pth", ".tar", ".bin", ".safetensors", ".distcp")
_OF_A_STEP = re.compile(r"(?:step|iter|iteration|epoch|checkpoint|ckpt)s?[=_-]?\d+", re.IGNORECASE)
_OF_MANY_PARTS = re.compile(r"\.distcp$|^\.metadata$")
_TRACKERS = ("latest_checkpointed_iteration.txt",)


def unknown(directories: Iterable[Path], layout: Layout) -> dict[str, str]:
    """Find what looks like a checkpoint and is not listed by `layout`: path -> why it is taken for one.

    It is recognised by a file's name (weights of a step or an epoch) or a directory's content (distributed checkpoints,
    or weights below a name with a step). Other files are the user's: an initial model, data, final weights.

    Raises:
        OSError: a directory cannot be listed.
    """
    found: dict[str, str] = {}
    for directory in directories:
        known = {path.name for path in layout.discover(directory)}
        for name in _names(directory):
            if name not in known and (why := _why(directory / name)):
                found[str(directory / name)] = why
    return found


def all_of_training(directories: Iterable[Path], layout: Layout) -> list[str]:
    """List what a start from scratch leaves unused: checkpoints, newest first, and what `unknown` finds.

    Raises:
        ConfigError, OSError: a directory cannot be listed.
    """
    folders = list(directories)
    return [*(str(candidate.path) for candidate in candidates(folders, layout)), *unknown(folders, layout)]


def _names(directory: Path) -> list[str]:
    """All names, also hidden ones such as `.metadata`, except what `quarantine` has moved."""
    hidden = [".metadata"] if (directory / ".metadata").exists() else []
    return [name for name in (*data_names(directory), *hidden) if not is_moved_away(name)]


def _why(path: Path) -> str:
    if path.name in _TRACKERS:
        return "names a checkpoint of another framework's, and no layout of this job's has one"
    if path.is_dir():
        return _why_directory(path)
    if _OF_MANY_PARTS.search(path.name):
        return "is a part of a distributed checkpoint, which this job's framework does not resume from"
    if path.name.endswith(_WEIGHTS) and _OF_A_STEP.search(path.name):
        return "is named like weights of a step, and is not a checkpoint that this job's framework resumes from"
    return ""


def _why_directory(path: Path) -> str:
    names = _below(path)
    if any(_OF_MANY_PARTS.search(name) for name in names):
        return "is a distributed checkpoint, which this job's framework does not resume from"
    if _OF_A_STEP.search(path.name) and any(name.endswith(_WEIGHTS) for name in names):
        return "is named like a step and holds weights, and is not a checkpoint that this job's framework resumes from"
    return ""


def _below(path: Path) -> list[str]:
    """Names of files in it and one level deeper, as in `mp_rank_00/`."""
    try:
        with os.scandir(path) as entries:
            found = list(entries)
        folders = [entry.path for entry in found if entry.is_dir()]
        return [entry.name for entry in found] + [name for folder in folders for name in os.listdir(folder)]
    except OSError:
        return []  # no rank may fail because of a directory that was not asked for
