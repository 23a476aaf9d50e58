"""Layouts with one file or one directory per checkpoint. Implements `ports.Layout`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from lastgasp.errors import ConfigError

MANIFEST_SUFFIX = ".manifest.json"
NEXT_SUFFIX = ".manifest.next.json"
_STEP = re.compile(r"(?:step|iter(?:ation)?)[=_-]?(\d+)")
_TRAILING = re.compile(r"(\d+)$")
_MOVED = re.compile(r"\.(corrupt|unfit)(-\d+)?(\.reason\.json)?$")
_NOT_DATA = re.compile(rf"^\.|{_MOVED.pattern}|\.manifest(\.next)?\.json$")


@dataclass(unsafe_hash=True)  # not frozen: the port's `name` is a settable attribute
class SingleFile:
    """One file per checkpoint, as Lightning writes them.

    Args:
        suffix: how the names of checkpoints end, with the dot.

    Raises:
        ConfigError: the suffix has no leading dot.
    """

    suffix: str = ".ckpt"
    name: str = field(default="single-file", init=False)

    def __post_init__(self) -> None:
        if len(self.suffix) < 2 or not self.suffix.startswith(".") or "/" in self.suffix:
            raise ConfigError("suffix", self.suffix, "an ending such as '.ckpt'", "Add the leading dot.")

    def discover(self, directory: Path) -> Iterable[Path]:
        """Names with the suffix, and names of which only a manifest is left."""
        return [directory / name for name in data_names(directory) if name.endswith(self.suffix)]

    def files(self, checkpoint: Path) -> Mapping[str, Path]:
        """The file itself, or nothing if it does not exist."""
        return {checkpoint.name: checkpoint} if os.path.lexists(checkpoint) else {}

    def parts(self, checkpoint: Path) -> list[Path]:
        """The file."""
        return _if_there(checkpoint)

    def owns(self, checkpoint: Path, relative: str) -> bool:
        """Only the file itself."""
        return relative == checkpoint.name

    def manifest_path(self, checkpoint: Path) -> Path:
        """`<name>.manifest.json` beside the file."""
        return checkpoint.with_name(checkpoint.name + MANIFEST_SUFFIX)

    def step(self, checkpoint: Path) -> int | None:
        """The number after `step` or `iter` in the name (`step-00000012.ckpt`, `epoch=0-step=12.ckpt`)."""
        return _last_number(_STEP, checkpoint.name)


@dataclass(unsafe_hash=True)  # not frozen: the port's `name` is a settable attribute
class DirectoryLayout:
    """One directory per checkpoint, as Megatron's `iter_*`.

    A directory checkpoint is overwritten only where that is asked for (`Staged.publish(replace=True)`): POSIX has no
    portable atomic exchange of two directories (see `commit`).

    Args:
        pattern: shell pattern of the directories' names.

    Raises:
        ConfigError: the pattern is empty or holds a slash.
    """

    pattern: str
    name: str = field(default="directory", init=False)

    def __post_init__(self) -> None:
        if not self.pattern or "/" in self.pattern:
            raise ConfigError("pattern", self.pattern, "a name pattern such as 'iter_*'", "Name no folders.")

    def discover(self, directory: Path) -> Iterable[Path]:
        """Names that match the pattern, and names of which only a manifest is left."""
        return [directory / name for name in data_names(directory) if fnmatchcase(name, self.pattern)]

    def files(self, checkpoint: Path) -> Mapping[str, Path]:
        """Every file below the directory. Raises OSError when a folder in it cannot be listed."""
        if not checkpoint.is_dir():
            return {checkpoint.name: checkpoint} if os.path.lexists(checkpoint) else {}
        found = {}
        for folder, _, names in os.walk(checkpoint, onerror=_raise_unless_gone):
            for name in names:
                path = Path(folder, name)
                found[path.relative_to(checkpoint.parent).as_posix()] = path
        return found

    def parts(self, checkpoint: Path) -> list[Path]:
        """The directory."""
        return _if_there(checkpoint)

    def owns(self, checkpoint: Path, relative: str) -> bool:
        """Everything below the directory."""
        return relative.split("/")[0] == checkpoint.name

    def manifest_path(self, checkpoint: Path) -> Path:
        """`<name>.manifest.json` beside the directory."""
        return checkpoint.with_name(checkpoint.name + MANIFEST_SUFFIX)

    def step(self, checkpoint: Path) -> int | None:
        """The number after `step` or `iter` in the name, else the number that the name ends with."""
        step = _last_number(_STEP, checkpoint.name)
        return _last_number(_TRAILING, checkpoint.name) if step is None else step


def next_path(manifest: Path) -> Path:
    """The temporary name of a manifest while its data is put in place (see `commit`)."""
    return manifest.with_name(manifest.name.removesuffix(MANIFEST_SUFFIX) + NEXT_SUFFIX)


def is_moved_away(name: str) -> bool:
    """Whether it names a checkpoint moved by `quarantine` or `set_aside_unfit`, or its reasons."""
    return _MOVED.search(name) is not None


def data_names(directory: Path) -> list[str]:
    """Sorted names in `directory` except manifests, temporaries and quarantine; plus those of lone manifests."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    manifested = [name.removesuffix(MANIFEST_SUFFIX) for name in names if name.endswith(MANIFEST_SUFFIX)]
    return sorted({name for name in (*names, *manifested) if not _NOT_DATA.search(name)})


def _if_there(path: Path) -> list[Path]:
    return [path] if os.path.lexists(path) else []


def _last_number(pattern: re.Pattern[str], name: str) -> int | None:
    numbers = pattern.findall(name)
    return int(numbers[-1]) if numbers else None


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
