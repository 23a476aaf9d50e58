"""Checkpoints of several files in different places, as MindFormers' and TensorFlow's. Implements `ports.Layout`.

A checkpoint has a name that none of its files has, in the directory that contains the files or their folders; its
manifest is there under that name. `rank_0/tiny_rank_0-2_4.ckpt` and `rank_1/tiny_rank_1-2_4.ckpt` may be
`tiny-2_4`, and `model-7.index` and `model-7.data-00000-of-00001` be `model-7`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from lastgasp.errors import ConfigError

from .layout import MANIFEST_SUFFIX, data_names


@dataclass(unsafe_hash=True)  # not frozen: the port's `name` is a settable attribute
class ScatteredLayout:
    """Several files per checkpoint: their paths show which belong together.

    Like a directory, such a checkpoint is never overwritten: several renames are not atomic (see `commit`).

    Args:
        pattern: regular expression that the POSIX path of a data file, relative to the directory, matches in full.
        title: the name of its checkpoint, a template with the groups of `pattern` (as `re.Match.expand` takes it).
        names: regular expression that every such name matches in full, so that manifests of other layouts are left
            alone. Its group `step`, where it has one, is the step.
        folders: shell patterns of the folders that hold files; the empty one is the directory itself.

    Raises:
        ConfigError: an expression that cannot be compiled, or a folder pattern with a slash.
    """

    pattern: str
    title: str
    names: str
    folders: tuple[str, ...] = ("",)
    name: str = field(default="scattered", init=False)

    def __post_init__(self) -> None:
        for field_name, value in (("pattern", self.pattern), ("names", self.names)):
            try:
                re.compile(value)
            except re.error as error:
                raise ConfigError(field_name, value, "a regular expression", f"{error}.") from error
        if isinstance(self.folders, str) or any("/" in folder for folder in self.folders):
            allowed = "name patterns such as ('rank_*',)"
            raise ConfigError("folders", self.folders, allowed, "Files lie one level deep.")

    def discover(self, directory: Path) -> Iterable[Path]:
        """The checkpoints that files belong to, and names of which only a manifest is left."""
        manifested = (name for name in data_names(directory) if (directory / (name + MANIFEST_SUFFIX)).is_file())
        titles = {title for _, title in self._data(directory)}
        titles |= {name for name in manifested if re.fullmatch(self.names, name)}
        return [directory / title for title in sorted(titles)]

    def files(self, checkpoint: Path) -> Mapping[str, Path]:
        """The existing files of this checkpoint. Raises OSError if a folder cannot be listed."""
        own = (path for path, title in self._data(checkpoint.parent) if title == checkpoint.name)
        return {path: checkpoint.parent / path for path in own}

    def parts(self, checkpoint: Path) -> list[Path]:
        """Each file separately."""
        return sorted(self.files(checkpoint).values())

    def owns(self, checkpoint: Path, relative: str) -> bool:
        """Whether the path belongs to that name."""
        return self.title_of(relative) == checkpoint.name

    def manifest_path(self, checkpoint: Path) -> Path:
        """`<name>.manifest.json` in the directory."""
        return checkpoint.with_name(checkpoint.name + MANIFEST_SUFFIX)

    def step(self, checkpoint: Path) -> int | None:
        """The group `step` of `names`; None where there is no such group."""
        match = re.fullmatch(self.names, checkpoint.name)
        found = match.groupdict().get("step") if match else None
        return int(found) if found else None

    def title_of(self, relative: str) -> str | None:
        """The name of the checkpoint that a file at this path belongs to, or None."""
        match = re.fullmatch(self.pattern, relative)
        return match.expand(self.title) if match else None

    def _data(self, directory: Path) -> Iterator[tuple[str, str]]:
        """Relative path and checkpoint's name of every data file."""
        for relative in _files_in(directory, self.folders):
            title = self.title_of(relative)
            if title is not None:
                yield relative, title


def _files_in(directory: Path, folders: tuple[str, ...]) -> Iterator[str]:
    """Relative paths of what is not hidden in `directory`, and in its folders of those patterns."""
    for name in _visible(directory):
        if "" in folders:
            yield name
        if any(folder and fnmatchcase(name, folder) for folder in folders):
            yield from (f"{name}/{inner}" for inner in _visible(directory / name))


def _visible(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
