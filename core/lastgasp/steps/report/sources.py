"""Which directory is what: the base, a task, a rank, or a run that holds the base under `profiling`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lastgasp.errors import ConfigError

DATA_FILE = re.compile(r"\d{10}")
"""TaskD's file names: unix seconds (docs/facts/taskd.md §7)."""
BASE = "profiling"
TAIL = 8192
"""Bytes from the end of a file in which its last row is looked for; a row has about 200."""


@dataclass(frozen=True)
class Place:
    """One task's files.

    Attributes:
        task: the task's name, that of its directory.
        ranks: rank -> its directory.
        others: names of the base's other tasks that have rows, newest first.
    """

    task: str
    ranks: Mapping[int, Path]
    others: tuple[str, ...] = ()


def locate(directory: Path, task: str | None = None) -> Place:
    """The task to report on.

    Args:
        directory: the base, a task's directory, a rank's, or that of a run (which holds `profiling`).
        task: its name where the base has several; None takes the one with the newest row.

    Raises:
        ConfigError: no rows below `directory`, or no task of that name.
    """
    try:
        found = _look(directory)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError("DIR", str(directory), "a directory that can be read", f"{reason}.") from error
    if not found:
        allowed = "a directory of profiling files: BASE, BASE/TASK or BASE/TASK/RANK with files named by ten digits"
        remedy = "Are marks on? Rows reach the disk within a second; see lastgasp switch."
        raise ConfigError("DIR", str(directory), allowed, remedy)
    if task is not None and task not in found:
        raise ConfigError("--task", task, f"one of {', '.join(sorted(found))}", "Leave it out for the newest one.")
    order = sorted(found, key=lambda name: (newest(found[name]), name), reverse=True) if len(found) > 1 else [*found]
    chosen = task if task is not None else order[0]
    return Place(chosen, found[chosen], tuple(name for name in order if name != chosen))


def _look(directory: Path) -> dict[str, dict[int, Path]]:
    """Task -> rank -> directory; of the first of the four shapes that fits."""
    directory = directory.resolve()
    if data_files(directory):
        rank = int(directory.name) if directory.name.isdecimal() else 0
        return {directory.parent.name: {rank: directory}}
    ranks = _ranks(directory)
    if ranks:
        return {directory.name: ranks}
    tasks = {child.name: ranks for child in _folders(directory) if (ranks := _ranks(child))}
    below = directory / BASE
    return tasks or (_look(below) if below.is_dir() else {})


def _ranks(task: Path) -> dict[int, Path]:
    found = {int(child.name): child for child in _folders(task) if child.name.isdecimal() and data_files(child)}
    return dict(sorted(found.items()))


def _folders(directory: Path) -> list[Path]:
    try:
        return [child for child in directory.iterdir() if child.is_dir()]
    except PermissionError:
        return []


def data_files(rank_dir: Path) -> list[Path]:
    """The rank's files, oldest first."""
    try:
        found = [path for path in rank_dir.iterdir() if DATA_FILE.fullmatch(path.name) and path.is_file()]
    except (PermissionError, FileNotFoundError):
        return []
    return sorted(found, key=lambda path: int(path.name))


class _Time(msgspec.Struct):
    Timestamp: int = 0


def newest(ranks: Mapping[int, Path]) -> int:
    """Time of the task's last row, ns since the epoch; 0 where no row can be read."""
    return max((last_time(files[-1]) for path in ranks.values() if (files := data_files(path))), default=0)


def last_time(path: Path) -> int:
    """Time of the last complete row of a file, ns since the epoch; 0 if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines[:-1]):
        try:
            return msgspec.json.decode(line, type=_Time).Timestamp
        except msgspec.DecodeError:
            continue
    return 0


def first_time(path: Path) -> int:
    """Time of the first row of a file, ns since the epoch; 0 where there is none."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.readline(TAIL), type=_Time).Timestamp
    except (OSError, msgspec.DecodeError):
        return 0
