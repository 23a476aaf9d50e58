"""Reads a complete job: every rank's files into its table of steps, once or repeatedly."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from .fold import Kinds, RankFold
from .records import RankReader
from .sources import Place, data_files
from .spans import Counts
from .table import StepTable, limits

INFORMATION, GROUPS = "lastgasp.json", "parallel_group.json"


class Information(msgspec.Struct, frozen=True):
    """The fields used of what lastgasp writes beside the rows; all of them may be missing."""

    world_size: int = 0
    host: str = ""
    framework: str = ""
    device_rows: str = ""


class Group(msgspec.Struct, frozen=True):
    """One entry of parallel_group.json (docs/facts/taskd.md §6)."""

    group_name: str = ""
    group_rank: int = 0
    global_ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankData:
    """One rank, read.

    Attributes:
        table: its steps.
        counts, unreadable, dropped: what became of its rows, unreadable lines, and lost marks.
        groups: key of a group -> the group; empty without parallel_group.json.
    """

    rank: int
    table: StepTable
    counts: Counts = field(default_factory=Counts)
    unreadable: int = 0
    dropped: int = 0
    information: Information = field(default_factory=Information)
    groups: Mapping[str, Group] = field(default_factory=dict)

    @property
    def device_rows(self) -> str:
        """Where the device's times come from: `device`, `host` (copied from the host's), `mixed`, or `none`."""
        if self.information.device_rows == "host":
            return "host"
        own, copied = self.counts.device_times, self.counts.host_times
        if own and copied:
            return "device" if own > 100 * copied else "mixed"
        return "device" if own else "host" if copied else "none"


@dataclass(frozen=True)
class Job:
    """All ranks that were read, and the kinds of their collectives: (operation, group's key) by index."""

    place: Place
    ranks: Mapping[int, RankData]
    kinds: tuple[tuple[str, str], ...] = ()
    nbytes: int = 0


Progress = Callable[[int, int], object]
"""Called with the bytes done and the total."""


class JobReader:
    """Reads the files of one task. `read` once for all that is there; again for what was appended.

    Args:
        place: where they are.
        ranks: the ones to read; None for all.
    """

    def __init__(self, place: Place, ranks: Collection[int] | None = None) -> None:
        self._place, self._wanted = place, ranks
        self._kinds = Kinds()
        self._readers: dict[int, tuple[RankReader, RankFold]] = {}
        self.nbytes = 0

    def read(self, progress: Progress | None = None) -> None:
        """Take in all rows that have been written since the last call."""
        self._look()
        total, done = sum(size_of(reader.directory) for reader, _ in self._readers.values()), self.nbytes

        def tell(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if progress is not None:
                progress(min(done, total), total)

        for reader, fold in self._readers.values():
            for rows in reader.read(tell):
                fold.feed(rows)
        self.nbytes = sum(reader.nbytes for reader, _ in self._readers.values())

    def end(self) -> None:
        """No more rows will come: half a last line, ranges that are open, and each rank's newest step are closed."""
        for reader, fold in self._readers.values():
            reader.end()
            fold.end()

    def job(self) -> Job:
        """What has been read so far. The tables are live: they grow with the next `read`."""
        ranks = {rank: self._data(rank, *self._readers[rank]) for rank in sorted(self._readers)}
        return Job(self._place, ranks, tuple(self._kinds.known), self.nbytes)

    def follow(self, place: Place) -> None:
        """Look for new ranks and files."""
        self._place = place

    def _look(self) -> None:
        ranks = [rank for rank in self._place.ranks if self._wanted is None or rank in self._wanted]
        steps, collectives = limits(len(ranks))
        for rank in ranks:
            if rank not in self._readers:
                fold = RankFold(self._kinds, StepTable(steps, collectives))
                self._readers[rank] = RankReader(self._place.ranks[rank]), fold

    def _data(self, rank: int, reader: RankReader, fold: RankFold) -> RankData:
        directory = reader.directory
        information = _loaded(directory / INFORMATION, Information) or Information()
        groups = _loaded(directory / GROUPS, dict[str, Group]) or {}
        return RankData(rank, fold.table, fold.counts, reader.unreadable, fold.dropped, information, groups)


def size_of(directory: Path) -> int:
    """Bytes of a rank's files."""
    total = 0
    for path in data_files(directory):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


_Loaded = TypeVar("_Loaded")


def _loaded(path: Path, kind: type[_Loaded]) -> _Loaded | None:
    """None if it is missing or damaged: it only supplements the rows."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
