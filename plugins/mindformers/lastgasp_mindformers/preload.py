"""A `.ckpt` in one pass: what a rank verifies is what MindSpore parses, and what is loaded once all ranks agree.

Read for its digests first and by MindSpore afterwards, a file takes a third longer. MindSpore's parser gets nothing
that has not verified, and nothing of it is used before all ranks have agreed on the checkpoint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore
import msgspec
from mindspore.train import serialization

from lastgasp.adapter import CheckpointError, DamagedCheckpoint, Place
from lastgasp.adapter.checkpoint import Candidate, ChunkReader, Damage, FileEntry, Verdict, VerifiedFile, chunks_of

log = logging.getLogger("lastgasp")

FileOf = Callable[[Candidate, int], Path]
"""The file that a rank loads of a checkpoint; raises CheckpointError where there is none."""
_PART = 4 << 20
"""Bytes that are copied at a time, while others are still being hashed."""


class Preload:
    """This rank's file of the candidate that was verified last.

    Args:
        file_of: which file that is; place: of this rank.
    """

    def __init__(self, file_of: FileOf, place: Place) -> None:
        self._file_of, self._rank, self._world_size = file_of, place.rank, place.world_size
        self._loaded: dict[Path, Any] = {}

    def covers(self, candidate: Candidate) -> Collection[str]:
        """The files that some rank or other loads, and verifies; the same on all ranks."""
        files = {self._file_of(candidate, rank) for rank in range(self._world_size)}
        return {entry.path for entry in self._entries(candidate, files) if entry.path.endswith(".ckpt")}

    def read(self, candidate: Candidate) -> list[Damage]:
        """Verify this rank's file while MindSpore parses it; returns what is damaged."""
        path = self._file_of(candidate, self._rank)
        found = self._entries(candidate, {path})
        if not found:
            return []
        try:
            self._loaded[path] = parse(path, found[0])
        except DamagedCheckpoint:
            pass  # with their places below, and whether they are proven
        except Exception as error:  # nothing is known against its bytes, so MindSpore may fare better, or say why not
            log.info("%s will be read again by MindSpore: %s", path, error)
        else:
            return []
        return ChunkReader(chunks_of(candidate.path, found)).run(threads=2)

    def verdict(self, candidate: Candidate, verify: Callable[..., Verdict]) -> Verdict:
        """Of all files: by `verify`, which takes `read_by_others`, and by loading this rank's."""
        self.forget()
        try:
            names = self.covers(candidate)
        except CheckpointError:  # it is not for these ranks, as whoever loads it will say
            names = ()
        verdict = verify(read_by_others=names)
        if not verdict.ok or not names:
            return verdict
        damages = tuple(self.read(candidate))
        return msgspec.structs.replace(verdict, ok=not damages, damages=damages)

    def take(self, path: Path) -> Any:
        """What `read` has loaded of that file, once; None where there is nothing."""
        return self._loaded.pop(path, None)

    def forget(self) -> None:
        """Release what was loaded and not taken."""
        self._loaded.clear()

    @staticmethod
    def _entries(candidate: Candidate, files: Collection[Path]) -> list[FileEntry]:
        entries = candidate.manifest.files if candidate.manifest is not None else ()
        return [entry for entry in entries if candidate.path.parent / entry.path in files]


def parse(path: Path, entry: FileEntry) -> Any:
    """What `mindspore.load_checkpoint` makes of a `.ckpt`, all of whose bytes have verified.

    Raises:
        DamagedCheckpoint: they do not.
        Exception: what MindSpore raises.
    """
    with VerifiedFile(path, entry=entry) as file:
        try:
            with _opened(path, file):
                values = mindspore.load_checkpoint(str(path), format="ckpt")
        except Exception:
            file.finish()  # damaged bytes explain the error better than the error does
            raise
        file.finish()
    return values


@contextmanager
def _opened(path: Path, file: VerifiedFile) -> Iterator[None]:
    """Within, MindSpore on this thread opens `file` where it opens `path`."""
    system, thread, wanted = serialization._ckpt_fs, threading.get_ident(), path.resolve()
    original = system.open

    def open_(name: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and Path(name).resolve() == wanted:
            return _Whole(file)
        return original(name, *args, **kwargs)

    system.open = open_
    try:
        yield
    finally:
        if system.open is open_:
            system.open = original


class _Whole:
    """What MindSpore does with an open file: `with`, and one `read` of everything."""

    def __init__(self, file: VerifiedFile) -> None:
        self._file = file

    def __enter__(self) -> _Whole:
        return self

    def __exit__(self, *_: object) -> None:
        """The file is its owner's to close."""

    def read(self) -> bytearray:
        """All bytes; parts of them while others are still being hashed."""
        size = self._file.seek(0, 2)
        self._file.seek(0)
        content = bytearray(size)
        with memoryview(content) as view:
            done = 0
            while done < size:
                done += self._file.readinto(view[done : done + _PART])
        return content
