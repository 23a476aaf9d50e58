"""Reads and hashes chunks in a few threads that take turns, so that the disk sees one sequential read."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from lastgasp._fs import open_regular

from .digest import READ_SIZE, hash_range
from .manifest import FileEntry
from .verdict import Damage, merge, of_error

_ALONE = 32 << 20
"""Below this many bytes a second thread costs more than it gains."""


class Chunk(msgspec.Struct, frozen=True):
    """Chunk number `index` of the file at `path`."""

    path: Path
    entry: FileEntry
    index: int

    @property
    def span(self) -> tuple[int, int]:
        """Offset and length in bytes."""
        offset = self.index * self.entry.chunk_size
        return offset, min(self.entry.chunk_size, self.entry.size - offset)


Checked = Callable[[Chunk, Damage | None], None]


def chunks_of(checkpoint: Path, entries: Iterable[FileEntry]) -> list[Chunk]:
    """Every chunk of every entry, in the order of the manifest."""
    folder = checkpoint.parent
    return [Chunk(folder / e.path, e, index) for e in entries for index in range(len(e.chunks))]


class ChunkReader:
    """Checks each chunk once.

    Args:
        chunks: what to check, in the order in which it is read.
        checked: called for each, under a lock, from any of the threads.
    """

    def __init__(self, chunks: list[Chunk], checked: Checked | None = None) -> None:
        self._turns = iter(chunks)
        self._nbytes = sum(chunk.span[1] for chunk in chunks)
        self._checked = checked
        self._found: list[Damage] = []
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, threads: int) -> list[Damage]:
        """Check all; return damages by file and offset, adjacent ones merged. Never raises for disk errors."""
        if threads == 1 or self._nbytes < _ALONE:
            self._work()
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="lastgasp-verify") as pool:
                jobs = [pool.submit(self._work) for _ in range(threads)]
            for job in jobs:
                job.result()
        return merge(sorted(self._found, key=lambda damage: (damage.file, damage.offset)))

    def stop(self) -> None:
        """Let the threads end after their current chunk."""
        self._stopped = True

    def _work(self) -> None:
        with mmap.mmap(-1, READ_SIZE) as pages, memoryview(pages) as buffer, _OpenFile() as file:
            for chunk in self._take():
                damage = _check(chunk, file, buffer)
                with self._lock:
                    if damage:
                        self._found.append(damage)
                    if self._checked:
                        self._checked(chunk, damage)

    def _take(self) -> Iterator[Chunk]:
        while not self._stopped:
            with self._lock:
                chunk = next(self._turns, None)
            if chunk is None:
                return
            yield chunk


class _OpenFile:
    """The descriptor of the file being read; one at a time."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._fd = -1

    def fd(self, path: Path) -> int:
        if path != self._path:
            self._close()
            self._fd = open_regular(path)
            self._path = path
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._fd

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path = -1, None


def _check(chunk: Chunk, file: _OpenFile, buffer: memoryview) -> Damage | None:
    name, (offset, length) = chunk.entry.path, chunk.span
    try:
        digest, count = hash_range(file.fd(chunk.path), offset, length, buffer)
    except OSError as error:
        return of_error(name, offset, length, error)
    if digest == chunk.entry.chunks[chunk.index]:
        return None
    if count < length:
        return Damage(file=name, kind="digest", offset=offset, length=length, detail="ended while it was being read")
    detail = "content differs from its digest"
    return Damage(file=name, kind="digest", offset=offset, length=length, detail=detail, proven=True)
