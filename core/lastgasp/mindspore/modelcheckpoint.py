"""Where MindSpore's own ModelCheckpoint puts its files, and which of them form one checkpoint.

Each rank has a directory of its own; the scripts of MindSpore's models name it, and the files, in different ways:

| a script | files of ranks 0 and 1 | the checkpoint |
|---|---|---|
| the tutorials | `ckpts/rank_0/net-1_4.ckpt`, `ckpts/rank_1/net-1_4.ckpt` | `ckpts/net-1_4.ckpt` |
| Pangu | `ckpts/rank_0/pangu0-1_4.ckpt`, `ckpts/rank_1/pangu1-1_4.ckpt` | `ckpts/pangu{rank}-1_4.ckpt` |
| ResNet | `out/ckpt_0/resnet50-1_4.ckpt`, `out/ckpt_1/resnet50-1_4.ckpt` | `out/ckpt_{rank}+resnet50-1_4.ckpt` |
| all in one directory | `ckpts/net0-1_4.ckpt`, `ckpts/net1-1_4.ckpt` | `ckpts/+net{rank}-1_4.ckpt` |
| one file for all | `ckpts/net-1_4.ckpt` | the file |

So a checkpoint's name determines its files. The other way round takes the files of all ranks: `net1` of rank 1 may
be a name that all ranks use.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lastgasp.checkpoint.layout import MANIFEST_SUFFIX, data_names

RANK = "{rank}"
"""Placeholder for the number of a rank in the name of a checkpoint."""
USUAL = "rank_{rank}"
"""The folder of a rank if the name of a checkpoint contains none."""
AUX_SUFFIX = ".small"
_FILE = re.compile(r"(?P<prefix>[^/]+)(?P<at>-\d+_\d+(?:_breakpoint)?\.(?:ckpt|safetensors))")
_OF_MINDFORMERS = re.compile(r".*_rank(?:_\d+){0,2}-\d+_\d+\.[a-z]+")
"""Names of CheckpointMonitor's files in the usual folders, and of its checkpoints."""
_SEPARATOR = "+"
_DIGITS = re.compile(r"\d+")


@dataclass(unsafe_hash=True)  # not frozen: the port's `name` is a settable attribute
class ModelCheckpointLayout:
    """Implements `ports.Layout`.

    Args:
        folder: name of a rank's folder, with `{rank}`; empty: the files of all ranks are in one directory, and only
            their names say whose they are. With the usual one, files in the directory itself are found as well;
            they belong to all ranks.
    """

    folder: str = USUAL
    name: str = field(default="mindspore", init=False)

    def discover(self, directory: Path) -> Iterable[Path]:
        """The checkpoints that files belong to, and names of which only a manifest is left."""
        manifested = {
            name
            for name in data_names(directory)
            if (directory / (name + MANIFEST_SUFFIX)).is_file() and self._is_own(name)
        }
        aux = {name.removesuffix(AUX_SUFFIX) for name in _visible(directory) if name.endswith(AUX_SUFFIX)}
        titles = manifested | {name for name in aux if self._is_own(name)}
        titles |= _paired(list(self._data(directory)), manifested)
        return [directory / title for title in sorted(titles)]

    def files(self, checkpoint: Path) -> Mapping[str, Path]:
        """The existing files of this checkpoint. Raises OSError if a folder cannot be listed."""
        directory = checkpoint.parent
        found = [relative for relative, _, _ in _in_folders(directory, _folder_of(checkpoint.name))]
        flat = [name for name in _visible(directory) if self.owns(checkpoint, name)]
        own = sorted({relative for relative in (*found, *flat) if self.owns(checkpoint, relative)})
        return {relative: directory / relative for relative in own}

    def parts(self, checkpoint: Path) -> list[Path]:
        """Each file by itself."""
        return sorted(self.files(checkpoint).values())

    def owns(self, checkpoint: Path, relative: str) -> bool:
        """Whether that path follows from the name of the checkpoint."""
        title = checkpoint.name
        if relative in (title + AUX_SUFFIX, title if RANK not in title else None):
            return True
        folder, _, file = relative.rpartition("/")
        folder_template = _folder_of(title)
        if bool(folder) != bool(folder_template):
            return False
        ranks = _ranks_in(f"{folder_template}/{_file_of(title)}", f"{folder}/{file}")
        return len(ranks) == 1

    def rank_of(self, checkpoint: Path, relative: str) -> int | None:
        """The rank that it belongs to; None if it belongs to all of them."""
        folder, _, file = relative.rpartition("/")
        ranks = _ranks_in(f"{_folder_of(checkpoint.name)}/{_file_of(checkpoint.name)}", f"{folder}/{file}")
        return ranks.pop() if len(ranks) == 1 else None

    def manifest_path(self, checkpoint: Path) -> Path:
        """`<name>.manifest.json` in the directory."""
        return checkpoint.with_name(checkpoint.name + MANIFEST_SUFFIX)

    def step(self, checkpoint: Path) -> int | None:
        """None: the name gives the epoch and the step within it, and the lengths of the epochs are unknown."""
        return None

    def title(self, file: str) -> str:
        """The name of the checkpoint whose files are called `file`, which may hold `{rank}`."""
        return file if self.folder == USUAL else f"{self.folder}{_SEPARATOR}{file}"

    @property
    def flat(self) -> bool:
        """Whether files may be in the directory itself."""
        return self.folder in ("", USUAL)

    def rank_folders(self, directory: Path) -> list[str]:
        """Names of the existing folders of ranks."""
        names = _visible(directory) if self.folder else []
        return [name for name in names if _ranks_in(self.folder, name) and (directory / name).is_dir()]

    def everything(self, directory: Path) -> list[str]:
        """Relative paths of everything that is not hidden in the places that may hold its files, of any name."""
        inside = [relative for relative, _, _ in _in_folders(directory, self.folder)]
        return [*(_visible(directory) if self.flat else ()), *inside]

    def _is_own(self, title: str) -> bool:
        return is_title(title) and _written_folder(title) == (None if self.folder == USUAL else self.folder)

    def _data(self, directory: Path) -> Iterator[list[tuple[int | None, str]]]:
        """For each file: the names that its checkpoint may have, each with the rank that the file would belong to."""
        for name in _visible(directory) if self.flat else ():
            match = _file(name, self.folder)
            if match is not None and self.folder:
                yield [(None, name)]
            elif match is not None:
                digits = _DIGITS.finditer(match["prefix"])
                yield [(int(each[0]), self.title(_with_rank(name, each))) for each in digits]
        for _, rank, file in _in_folders(directory, self.folder):
            match = _file(file, self.folder)
            if match is not None:
                numbered = [each for each in _DIGITS.finditer(match["prefix"]) if int(each[0]) == rank]
                titles = [file, *(_with_rank(file, digits) for digits in numbered)]
                yield [(rank, self.title(title)) for title in titles]


PLAIN = ModelCheckpointLayout()
"""The usual layout: a folder `rank_R` for each rank, or one file for all."""


@dataclass(frozen=True)
class Place:
    """Where the ModelCheckpoints of all ranks save: the same on each of them.

    Args:
        directory: of the checkpoint and its manifest.
        layout: of its files in there.
        prefix: of their names, possibly with `{rank}`.
    """

    directory: Path
    layout: ModelCheckpointLayout
    prefix: str


def place_of(directories: Sequence[Path], prefixes: Sequence[str]) -> Place | None:
    """Where the files of all ranks are, from the arguments of each rank's ModelCheckpoint.

    Args:
        directories: absolute, by rank; prefixes: without the `_K` that MindSpore adds. Equal in number.

    Returns:
        None if they differ in more than the rank's number in the last folder's name and in the prefix.
    """
    prefix = common(prefixes)
    if prefix is None:
        return None
    if len(set(directories)) == 1:
        only = directories[0]
        if RANK in prefix:
            return Place(only, ModelCheckpointLayout(""), prefix)
        usual = re.fullmatch(r"rank_\d+", only.name) is not None
        return Place(only.parent if usual else only, PLAIN, prefix)
    folder = common([directory.name for directory in directories])
    if folder is None or RANK not in folder or len({directory.parent for directory in directories}) > 1:
        return None
    return Place(directories[0].parent, ModelCheckpointLayout(folder), prefix)


def layouts_in(directory: Path) -> list[ModelCheckpointLayout]:
    """Layouts other than the usual one found in `directory`: by manifests, or by folders of all ranks."""
    folders = {_written_folder(name) for name in data_names(directory)} - {None}
    ranks: dict[str, set[int]] = defaultdict(set)
    for name in _visible(directory):
        for digits in _DIGITS.finditer(name):
            if any(_FILE.fullmatch(file) for file in _listable(directory / name)):
                ranks[_with_rank(name, digits)].add(int(digits[0]))
    whole = {folder for folder, found in ranks.items() if len(found) > 1 and found == set(range(len(found)))}
    return [ModelCheckpointLayout(folder) for folder in sorted(f for f in folders | whole if f not in (None, USUAL))]


def common(names: Sequence[str]) -> str | None:
    """The common form of all ranks' names, with `{rank}` for the number; None if they differ in more."""
    if len(set(names)) == 1:
        return names[0]
    templates: list[list[str]] = []
    for rank, name in enumerate(names):
        templates.append([_with_rank(name, digits) for digits in _DIGITS.finditer(name) if int(digits[0]) == rank])
    both = set.intersection(*(set(each) for each in templates))
    return next((template for template in templates[0] if template in both), None)


def is_title(name: str) -> bool:
    """Whether this is the name of such a checkpoint."""
    return _file(_file_of(name), _folder_of(name)) is not None


def layout_of(title: str) -> ModelCheckpointLayout:
    """The layout of the checkpoint of that name."""
    folder = _written_folder(title)
    return PLAIN if folder is None else ModelCheckpointLayout(folder)


def _file(name: str, folder: str) -> re.Match[str] | None:
    """The parts of the name of a file in such a folder; None if it is not a file of ModelCheckpoint."""
    return None if folder == USUAL and _OF_MINDFORMERS.fullmatch(name) else _FILE.fullmatch(name)


def _written_folder(title: str) -> str | None:
    """The folder in a name; None if it has none, which means the usual one."""
    folder, separator, file = title.partition(_SEPARATOR)
    return folder if separator and (RANK in folder or (not folder and RANK in file)) else None


def _folder_of(title: str) -> str:
    folder = _written_folder(title)
    return USUAL if folder is None else folder


def _file_of(title: str) -> str:
    return title if _written_folder(title) is None else title.partition(_SEPARATOR)[2]


def _with_rank(name: str, digits: re.Match[str]) -> str:
    return f"{name[: digits.start()]}{RANK}{name[digits.end() :]}"


def _ranks_in(template: str, path: str) -> set[int]:
    """The numbers in `path` in place of the template's `{rank}`; empty if it does not match."""
    expression = r"(\d+)".join(re.escape(part) for part in template.split(RANK))
    match = re.fullmatch(expression, path)
    return {int(number) for number in match.groups()} if match else set()


def _in_folders(directory: Path, folder: str) -> Iterator[tuple[str, int, str]]:
    """Relative path, rank and name of each file in the folders of the ranks."""
    for name in _visible(directory) if folder else ():
        for rank in _ranks_in(folder, name):
            yield from ((f"{name}/{file}", rank, file) for file in _visible(directory / name))


def _paired(data: list[list[tuple[int | None, str]]], manifested: set[str]) -> set[str]:
    """The checkpoint of each file: a name that has a manifest, else the one that fits files of the most ranks."""
    ranks: dict[str, set[int | None]] = defaultdict(set)
    for rank, title in (each for options in data for each in options):
        ranks[title].add(rank)

    def weight(option: tuple[int | None, str]) -> tuple[bool, int]:
        return option[1] in manifested, len(ranks[option[1]])

    return {max(options, key=weight)[1] for options in data if options}


def _listable(folder: Path) -> list[str]:
    """As `_visible`, and nothing in what may be no folder of a rank's at all: another user's, a link to itself."""
    try:
        return _visible(folder)
    except OSError:
        return []


def _visible(directory: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(directory) if not name.startswith("."))
    except (FileNotFoundError, NotADirectoryError):
        return []
