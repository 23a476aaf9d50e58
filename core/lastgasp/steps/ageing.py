"""Keeps the profiling files below `upper_limit_of_disk_in_mb`, as TaskD's documentation promises (taskd.md §6).

Once a minute each rank adds up what is below the base. Beyond the limit it removes the oldest of its *own* files,
in the directories of all jobs: 20 % of them, at least one, and at least its share of the excess, so that all
ranks together return below the limit. Only profiling files go, `<base>/<any task>/<this rank>/<ten digits>`;
links, directories and everything with another name stay (TaskD itself removes other people's files), as does
the file being written.

A limit of less than one file (10 MB) makes smaller files. In TaskD it means that only the first batch is ever
written; here it means that little is kept: with 0 hardly more than the file being written.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from lastgasp import _clock

from .rankfiles import FILE_MAX, NAME

log = logging.getLogger("lastgasp.steps")

PERIOD_S = 60.0
SMALL_MB = 10
"""A lower limit leaves no room for one file of the usual size."""
SMALL_FILE_MIN = 65536
ENTRIES_PER_TICK = 500
"""Directory entries examined before the flusher gets its turn again."""
_MB = 1 << 20


def file_max(limit_mb: int) -> int:
    """Bytes beyond which a new file is begun: 10 MiB as documented, a tenth of a limit that is smaller."""
    return FILE_MAX if limit_mb >= SMALL_MB else max(SMALL_FILE_MIN, limit_mb * _MB // 10)


class Aged(NamedTuple):
    """A profiling file of this rank; they sort by age."""

    mtime_ns: int
    path: Path
    size: int


def to_delete(files: Sequence[Aged], total: int, limit: int, writing: Path | None) -> list[Aged]:
    """Which of this rank's files go, oldest first.

    Args:
        files: all profiling files of this rank.
        total, limit: bytes under the base, and how many are allowed.
        writing: the file that must stay.
    """
    if total <= limit:
        return []
    share = sum(file.size for file in files) * (total - limit) / total
    going: list[Aged] = []
    for file in sorted(file for file in files if file.path != writing):
        if len(going) >= max(1, len(files) // 5) and sum(gone.size for gone in going) >= share:
            break
        going.append(file)
    return going


class Ageing:
    """One rank's share of the clean-up. The flusher calls `tick` at every turn.

    Args:
        base: the directory of all jobs.
        rank: whose files may go.
        limit_mb: of everything under the base, in MB of 2^20 bytes.
        monotonic: seconds, for the period.
    """

    def __init__(
        self, base: Path, rank: int, limit_mb: int, *, monotonic: Callable[[], float] = _clock.monotonic
    ) -> None:
        self._base, self._rank, self._limit_mb, self._monotonic = base, str(rank), limit_mb, monotonic
        self._due = monotonic()
        self._survey: Iterator[None] | None = None
        self._files: list[Aged] = []
        self._total = 0
        self._told: set[str] = set()
        if limit_mb < SMALL_MB:
            self._warn(
                "small",
                f"upper_limit_of_disk_in_mb={limit_mb} is less than one profiling file of 10 MB: files of "
                f"{file_max(limit_mb) / _MB:.2g} MB are written instead, and few are kept. Give {SMALL_MB} or more.",
            )

    def hasten(self) -> None:
        """Survey at the next `tick`: a file was completed."""
        self._due = self._monotonic()

    def tick(self, writing: Path | None) -> list[Path]:
        """Continue a survey, or begin one when a minute has passed; returns what was removed.

        Args:
            writing: the file that must stay.
        """
        if self._survey is None:
            if self._monotonic() < self._due:
                return []
            self._due = self._monotonic() + PERIOD_S
            self._files, self._total = [], 0
            self._survey = self._walk(self._base, ())
        if sum(1 for _ in islice(self._survey, ENTRIES_PER_TICK)) == ENTRIES_PER_TICK:
            return []
        self._survey = None
        return self._remove(writing)

    def _walk(self, directory: str | Path, parents: tuple[str, ...]) -> Iterator[None]:
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                yield
                if entry.is_dir(follow_symlinks=False):
                    yield from self._walk(entry.path, (*parents, entry.name))
                    continue
                with contextlib.suppress(OSError):  # it vanished
                    self._count(entry, parents)

    def _count(self, entry: os.DirEntry[str], parents: tuple[str, ...]) -> None:
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            return
        self._total += status.st_size
        if len(parents) == 2 and parents[1] == self._rank and NAME.fullmatch(entry.name):
            self._files.append(Aged(status.st_mtime_ns, Path(entry.path), status.st_size))

    def _remove(self, writing: Path | None) -> list[Path]:
        removed = []
        going = to_delete(self._files, self._total, self._limit_mb * _MB, writing)
        for file in going:
            try:
                file.path.unlink()
                removed.append(file.path)
            except FileNotFoundError:
                pass
            except OSError as error:
                self._warn("stuck", f"an old profiling file could not be removed: {error}. Remove it by hand.")
        if removed:
            log.debug("removed %d profiling files, oldest first: %s is over its limit", len(removed), self._base)
        if not going and self._total > self._limit_mb * _MB and self._limit_mb >= SMALL_MB:
            self._warn(
                "foreign",
                f"{self._base} holds {self._total / _MB:.0f} MB, upper_limit_of_disk_in_mb={self._limit_mb}, and rank "
                f"{self._rank} has no old profiling files there any more. Remove other files, or raise the limit.",
            )
        return removed

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            log.warning("%s", text)
