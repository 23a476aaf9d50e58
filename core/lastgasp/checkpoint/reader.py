"""A file object that returns only verified bytes.

Other threads read and hash the file ahead of the reader, so that verification and unpickling overlap: they are slow
for different reasons, the disk and the first touch of fresh memory (`docs/facts/limits.md` §4).
"""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from lastgasp._fs import open_regular
from lastgasp.errors import DamagedCheckpoint, UsageError
from lastgasp.ports import Layout

from .chunks import Chunk, ChunkReader, chunks_of
from .manifest import FileEntry, ManifestProblem
from .manifest_lookup import read_pair
from .structure import compare, size_damage
from .verdict import Damage, of_manifest

if TYPE_CHECKING:
    from typing_extensions import Buffer


class VerifiedFile(io.RawIOBase):
    """A file of a checkpoint, open for reading. A read waits until its bytes have been verified.

    Use it as a context manager, and call `finish` before using what was read: skipped parts must verify, too.

    Args:
        path: the checkpoint, of a single file; layout: how it lies.
        entry: instead of a layout, the file's entry in a manifest that was already read.
        threads: number of threads that read ahead.

    Raises:
        DamagedCheckpoint: manifest, name or size are wrong. `readinto` and `finish` raise it for content.
    """

    def __init__(
        self, path: Path, layout: Layout | None = None, *, entry: FileEntry | None = None, threads: int = 2
    ) -> None:
        super().__init__()
        self._path, self._position, self._fd = path, 0, -1
        chunks = _sound_chunks(path, layout) if layout is not None else _chunks_of_entry(path, entry)
        self._chunk_size = chunks[0].entry.chunk_size if chunks else 1
        self._size = chunks[0].entry.size if chunks else 0
        self._fd = _open(path)
        self._good = bytearray(len(chunks))
        self._bad = False
        self._news = threading.Condition()
        # The end first: there a zip file has its directory, with which torch.load begins.
        self._ahead = ChunkReader(chunks[-1:] + chunks[:-1], self._checked)
        self._damages: list[Damage] = []
        self._thread = threading.Thread(target=self._run, args=(threads,), name="lastgasp-verified-file", daemon=True)
        self._thread.start()

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """Position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move; returns the new position in bytes."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, into: Buffer) -> int:
        """Fill `into` until the file ends; return the number of bytes.

        Raises:
            DamagedCheckpoint: the bytes, or others read meanwhile, do not verify.
            OSError: the disk refused.
        """
        view = memoryview(into).cast("B")
        wanted = max(0, min(len(view), self._size - self._position))
        self._wait(self._position, wanted)
        done = 0
        while done < wanted:
            count = os.preadv(self._fd, [view[done:wanted]], self._position + done)
            if not count:
                raise DamagedCheckpoint(str(self._path), [f"{self._path.name}: ended while it was being read"])
            done += count
        self._position += done
        return done

    def finish(self) -> None:
        """Wait until everything is verified. Raises DamagedCheckpoint with every damage."""
        self._thread.join()
        if self._damages:
            raise DamagedCheckpoint(str(self._path), [str(damage) for damage in self._damages])

    def close(self) -> None:
        """Stop reading ahead and release the descriptor."""
        if not self.closed and self._fd >= 0:
            self._ahead.stop()
            self._thread.join()
            os.close(self._fd)
        super().close()

    def _run(self, threads: int) -> None:
        try:
            self._damages = self._ahead.run(threads)
        except BaseException:
            self._fail()
            raise

    def _checked(self, chunk: Chunk, damage: Damage | None) -> None:
        if damage:
            self._fail()
            return
        with self._news:
            self._good[chunk.index] = 1
            self._news.notify_all()

    def _fail(self) -> None:
        with self._news:
            self._bad = True
            self._news.notify_all()

    def _wait(self, offset: int, length: int) -> None:
        if not length:
            return
        first, last = offset // self._chunk_size, (offset + length - 1) // self._chunk_size
        with self._news:
            self._news.wait_for(lambda: self._bad or all(self._good[first : last + 1]))
        if self._bad:
            self.finish()
            raise DamagedCheckpoint(str(self._path), ["verification failed: see the error of its thread"])


def _sound_chunks(path: Path, layout: Layout) -> list[Chunk]:
    found = read_pair(path, layout)
    if isinstance(found, ManifestProblem):
        raise DamagedCheckpoint(str(path), [str(of_manifest(path, found))])
    damages, sound = compare(path, layout, found)
    if damages:
        raise DamagedCheckpoint(str(path), [str(damage) for damage in damages])
    return chunks_of(path, sound[:1])


def _chunks_of_entry(path: Path, entry: FileEntry | None) -> list[Chunk]:
    if entry is None:
        raise UsageError("a VerifiedFile needs a layout or an entry of a manifest")
    if damage := size_damage(path, entry):
        raise DamagedCheckpoint(str(path), [str(damage)])
    return [Chunk(path, entry, index) for index in range(len(entry.chunks))]


def _open(path: Path) -> int:
    try:
        return open_regular(path)
    except OSError as error:
        raise DamagedCheckpoint(str(path), [f"{path.name}: cannot be opened: {error.strerror}"]) from error
