"""One rank's profiling directory, `<base>/<task>/<rank>`: whole rows appended to files named by the second.

As TaskD does it (docs/facts/taskd.md §6): directories 0755, files 0644 (less the umask), one write per batch, the file
with the largest number is appended to, one beyond 10 MiB is followed by a new one. In addition, nothing is ever left
half written: a batch that does not fit is undone, and a file that another process's death left with half a row is
not appended to.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from lastgasp import _clock, _fs

log = logging.getLogger("lastgasp.steps")

FILE_MAX = 10485760
"""Bytes; a file that is larger before a write is not appended to. Exactly so many are still fine."""
NAME = re.compile(r"[0-9]{10}")
"""A profiling file: seconds since the epoch when it was begun."""
_TRIES = 8
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR)
"""The name belongs to another user's file, a link or a directory: another one is chosen."""
_OPEN = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


def profiling_files(directory: Path) -> list[Path]:
    """The profiling files of a rank, oldest first. Directories, links and everything with another name are none."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        found = [e.name for e in entries if NAME.fullmatch(e.name) and e.is_file(follow_symlinks=False)]
        return [directory / name for name in sorted(found)]
    return []


def make_directories(directory: Path) -> None:
    """Create a directory and its parents, 0755 each.

    Raises:
        OSError: it cannot be; or something else has that name.
    """
    if directory.is_dir():
        return
    if directory.parent != directory:
        make_directories(directory.parent)
    try:
        directory.mkdir(0o755)
    except FileExistsError:
        if not directory.is_dir():
            raise


class RankFiles:
    """The files of one rank. All methods but `beside` are for one thread at a time.

    Args:
        directory: the rank's; created when needed, also after it was removed.
        file_max: bytes beyond which a new file is begun.
        wall_ns: ns since the epoch, for the names.

    Attributes:
        path: the file that is appended to; None before the first row.
    """

    def __init__(
        self, directory: Path, *, file_max: int = FILE_MAX, wall_ns: Callable[[], int] = _clock.wall_ns
    ) -> None:
        self.directory = directory
        self.path: Path | None = None
        self._file_max, self._wall_ns = file_max, wall_ns
        self._end = -1
        self._beside: dict[str, bytes] = {}
        self._written: dict[str, bytes] = {}
        self._told: set[str] = set()

    def beside(self, name: str, content: bytes) -> None:
        """Keep a file of that name and content beside the rows, from the next `prepare` or `append` on."""
        self._beside[name] = content

    @property
    def wanting(self) -> bool:
        """Whether a file that belongs beside the rows is known to be missing."""
        return any(self._written.get(name) is not content for name, content in list(self._beside.items()))

    def prepare(self) -> None:
        """Create the directory and the files that belong beside the rows.

        Raises:
            OSError: the directory cannot be made.
        """
        if not self.directory.is_dir():
            self._written.clear()
            make_directories(self.directory)
        for name, content in list(self._beside.items()):
            if self._written.get(name) is not content:
                self._write_beside(name, content)

    def append(self, rows: bytes) -> None:
        """Append complete rows to the newest file.

        Raises:
            OSError: none of them was written: the disk is full or refuses.
        """
        for _ in range(_TRIES):
            descriptor = self._open()
            try:
                self._write(descriptor, rows)
                if not self._is_gone(descriptor):
                    return
            finally:
                os.close(descriptor)
        raise OSError(errno.ESTALE, f"it is removed again and again: {self.path}")

    def _is_gone(self, descriptor: int) -> bool:
        """Unlinked between open and write, the file has taken the rows with it."""
        ours = os.fstat(descriptor)
        if ours.st_nlink:
            return False
        # Some file systems in user space count no links at all.
        try:
            there = os.stat(self.path or "", follow_symlinks=False)
        except OSError:
            return True
        return (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)

    # -- which file --------------------------------------------------------------------------------

    def _open(self) -> int:
        """Open the file to append to, with room left and a complete last row."""
        self.prepare()
        for _ in range(_TRIES):
            try:
                return self._open_current()
            except FileNotFoundError:  # the directory was removed meanwhile
                self.prepare()
        raise OSError(errno.ESTALE, f"it is removed again and again: {self.directory}")

    def _open_current(self) -> int:
        path = self.path or next(reversed(profiling_files(self.directory)), None)
        if path is None:
            return self._begin()
        try:
            descriptor = os.open(path, _OPEN | os.O_CREAT, 0o644)
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
            return self._begin()
        try:
            if self._takes_more(descriptor):
                self.path = path
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return self._begin()

    def _takes_more(self, descriptor: int) -> bool:
        status = os.fstat(descriptor)
        size = status.st_size
        if not stat.S_ISREG(status.st_mode) or size > self._file_max:
            return False
        return size in (0, self._end) or os.pread(descriptor, 1, size - 1) == b"\n"

    def _begin(self) -> int:
        """A new file, numbered by the current second, or higher if a larger number exists."""
        newest = next(reversed(profiling_files(self.directory)), None)
        second = max(self._wall_ns() // 10**9, int(newest.name) + 1 if newest else 0)
        while True:
            path = self.directory / f"{second:010d}"
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(path, _OPEN | os.O_CREAT | os.O_EXCL, 0o644)
                self.path, self._end = path, 0
                return descriptor
            second += 1

    # -- write -------------------------------------------------------------------------------------

    def _write(self, descriptor: int, rows: bytes) -> None:
        done = os.write(descriptor, rows)
        self._end = os.lseek(descriptor, 0, os.SEEK_CUR)
        begin = self._end - done
        view = memoryview(rows)
        try:
            while done < len(rows):
                done += os.write(descriptor, view[done:])
                self._end = os.lseek(descriptor, 0, os.SEEK_CUR)
        except OSError:
            self._take_back(descriptor, begin, begin + done)
            raise

    def _take_back(self, descriptor: int, begin: int, end: int) -> None:
        """Remove the written part of a batch, unless another process has appended to the file since."""
        self._end = -1
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_size == end:
                os.ftruncate(descriptor, begin)

    def _write_beside(self, name: str, content: bytes) -> None:
        path = self.directory / name
        temporary = _fs.unique_temp(path)
        try:
            if name not in self._written:  # one that was killed in here has left half of it
                _fs.remove_stale_temps(self.directory)
            temporary.write_bytes(content)
            os.replace(temporary, path)  # without fsync, which may take long; rows are not synced either
            self._written[name] = content
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if name not in self._told:
                self._told.add(name)
                log.warning("%s could not be written: %s. The marks do not need it.", path, error)
