"""Digests while writing and while reading.

The writer fills page-aligned buffers of one chunk each; a full buffer is hashed while it is in the
cache and written by a second thread with O_DIRECT. That runs at device speed and does not collapse under
dirty-page throttling as buffered writes do (`docs/facts/limits.md` §5).
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from lastgasp import _clock
from lastgasp._fs import DISK, Disk, is_direct, open_regular, write_all, write_tail

from .manifest import FileEntry

if TYPE_CHECKING:
    from typing_extensions import Buffer

CHUNK_SIZE = 4 << 20
READ_SIZE = 512 << 10
"""Reads of this size stay in the second-level cache until they are hashed."""
SYNC_SIZE = 256 << 20
"""Bytes after which a file that is written through the page cache is synced, so that its end does not wait for all."""
_BUFFERS = 3


class HashingWriter:
    """A binary file object that hashes what is written. For one thread at a time.

    It has `write`, `tell`, `flush` and `close`, enough for `torch.save`, but no `fileno`, so that nothing can bypass
    the digests. Owns `fd`. After `finish` the content is durable and `entry` is available.

    Args:
        fd: descriptor of a new, empty file, open for writing; O_DIRECT or not.
        chunk_size: bytes per chunk digest; a multiple of the page size.
        sha256: whether to compute SHA-256 too (0.6 s per GB, `docs/facts/limits.md` §3).
        disk: where the bytes go; tests give one that fails.
        moved: called after each chunk, as progress.
    """

    def __init__(
        self,
        fd: int,
        *,
        chunk_size: int = CHUNK_SIZE,
        sha256: bool = False,
        disk: Disk = DISK,
        moved: Callable[[], object] = lambda: None,
    ) -> None:
        self.first_byte_ns: int | None = None
        """Wall-clock time of the first write, ns since the epoch."""
        self._fd, self._chunk_size, self._disk, self._moved = fd, chunk_size, disk, moved
        self._unsynced = 0
        self._whole = xxhash.xxh3_128()
        self._sha256 = hashlib.sha256() if sha256 else None
        self._size = 0
        self._chunks: list[str] = []
        self._spare = [mmap.mmap(-1, chunk_size)]
        self._buffer, self._fill = self._spare.pop(), 0
        self._allocated = 1
        self._pending: deque[tuple[Future[None], mmap.mmap]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._finished = False

    def write(self, data: Buffer) -> int:
        """Write all of `data`; return its length in bytes.

        Raises:
            OSError: the disk refused these bytes or earlier ones.
            ValueError: the writer is finished or closed.
        """
        if self._fd < 0 or self._finished:
            raise ValueError("write to a finished HashingWriter")
        if self.first_byte_ns is None:
            self.first_byte_ns = _clock.wall_ns()
        view = memoryview(data)
        if view.nbytes:
            self._take(view.cast("B"))
        self._size += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        """Bytes taken so far."""
        return self._size

    def flush(self) -> None:
        """Do nothing: bytes are durable only after `finish`."""

    def finish(self) -> None:
        """Write the remaining bytes, fsync and close. Idempotent. Raises OSError."""
        if self._finished or self._fd < 0:
            return
        self._drain(0)
        offset = len(self._chunks) * self._chunk_size
        if self._fill:
            with memoryview(self._buffer) as whole, whole[: self._fill] as tail:
                self._hash(tail)
                write_tail(self._fd, tail, offset, self._disk)
        self._disk.fsync(self._fd)
        self._finished = True
        self.close()

    def entry(self, relative: str) -> FileEntry:
        """The manifest's entry for this file. Raises ValueError before `finish`."""
        if not self._finished:
            raise ValueError("entry() is known after finish()")
        return FileEntry(
            path=relative,
            size=self._size,
            xxh3_128=self._whole.hexdigest(),
            chunk_size=self._chunk_size,
            chunks=tuple(self._chunks),
            sha256=self._sha256.hexdigest() if self._sha256 else None,
        )

    def close(self) -> None:
        """Release the descriptor and the thread. Without a `finish` before it, the file is unusable."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
        self._pending.clear()
        self._spare.clear()
        with contextlib.suppress(BufferError):  # the traceback of a failed write may still refer to a view
            self._buffer.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            part = view[done : done + self._chunk_size - self._fill]
            self._buffer[self._fill : self._fill + len(part)] = part
            self._fill += len(part)
            done += len(part)
            if self._fill == self._chunk_size:
                self._ship()

    def _ship(self) -> None:
        """Hash the full buffer, hand it to the writer thread, and continue with another one."""
        offset, full = len(self._chunks) * self._chunk_size, self._buffer
        with memoryview(full) as view:
            self._hash(view)
        self._pending.append((self._submit(full, offset), full))
        self._fill = 0
        self._buffer = self._next_buffer()

    def _hash(self, view: memoryview) -> None:
        self._chunks.append(xxhash.xxh3_128_hexdigest(view))
        self._whole.update(view)
        if self._sha256:
            self._sha256.update(view)

    def _submit(self, full: mmap.mmap, offset: int) -> Future[None]:
        try:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="lastgasp-write")
            return self._pool.submit(self._write_out, full, offset)
        except RuntimeError:
            # The interpreter is shutting down and starts no threads: write here, so that a gasp still succeeds.
            self._write_out(full, offset)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    def _write_out(self, full: mmap.mmap, offset: int) -> None:
        with memoryview(full) as view:
            write_all(self._fd, view, offset, self._disk)
        self._unsynced = 0 if is_direct(self._fd) else self._unsynced + len(full)
        if self._unsynced >= SYNC_SIZE:
            self._disk.fsync(self._fd)
            self._unsynced = 0

    def _next_buffer(self) -> mmap.mmap:
        if self._allocated < _BUFFERS:
            self._allocated += 1
            return mmap.mmap(-1, self._chunk_size)
        self._drain(_BUFFERS - 1)
        return self._spare.pop()

    def _drain(self, at_most: int) -> None:
        """Wait until at most `at_most` buffers are being written; re-raise errors of the writer thread."""
        while len(self._pending) > at_most:
            future, buffer = self._pending.popleft()
            future.result()
            self._spare.append(buffer)
            self._moved()


def hash_range(fd: int, offset: int, length: int, buffer: memoryview) -> tuple[str, int]:
    """Return the xxh3-128 of `length` bytes at `offset`, and how many of them the file had.

    Reads instead of mapping: a failed read of a mapping kills the process with SIGBUS. Raises OSError.
    """
    digest, done = xxhash.xxh3_128(), 0
    while done < length:
        with buffer[: min(len(buffer), length - done)] as part:
            count = os.preadv(fd, [part], offset + done)
            if not count:
                break
            digest.update(part[:count])
        done += count
    return digest.hexdigest(), done


def digest_file(path: Path, relative: str, chunk_size: int = CHUNK_SIZE, *, sha256: bool = False) -> FileEntry:
    """Compute the entry of an existing file, with a SHA-256 digest if wanted. Raises OSError."""
    whole, chunks, size = xxhash.xxh3_128(), list[str](), 0
    signed = hashlib.sha256() if sha256 else None
    with (
        os.fdopen(open_regular(path), "rb", buffering=0) as file,
        contextlib.closing(mmap.mmap(-1, chunk_size)) as buffer,
    ):
        for count in _fills(file.fileno(), buffer):
            with memoryview(buffer) as view, view[:count] as part:
                whole.update(part)
                chunks.append(xxhash.xxh3_128_hexdigest(part))
                if signed:
                    signed.update(part)
            size += count
    return FileEntry(
        path=relative,
        size=size,
        xxh3_128=whole.hexdigest(),
        sha256=signed.hexdigest() if signed else None,
        chunk_size=chunk_size,
        chunks=tuple(chunks),
    )


def _fills(fd: int, buffer: mmap.mmap) -> Iterator[int]:
    """Read the file into `buffer` piece by piece; yield the number of bytes in it."""
    offset = 0
    while True:
        fill = 0
        while fill < len(buffer):
            with memoryview(buffer) as view, view[fill:] as rest:
                count = os.preadv(fd, [rest], offset + fill)
            if not count:
                break
            fill += count
        if not fill:
            return
        yield fill
        offset += fill
