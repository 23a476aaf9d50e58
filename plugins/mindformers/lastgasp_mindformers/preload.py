"""A `.ckpt` in one pass: what a rank verifies is what MindSpore parses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore
from mindspore.train import serialization

from lastgasp.adapter import Place, Preload, replace_attribute
from lastgasp.adapter.checkpoint import Candidate, FileEntry, VerifiedFile

FileOf = Callable[[Candidate, int], Path]
"""The file that a rank loads of a checkpoint; raises CheckpointError where there is none."""
_PART = 4 << 20
"""Bytes copied at a time, while others are still being hashed."""


class FilePreload(Preload):
    """This rank's `.ckpt`.

    Args:
        file_of: which file that is; place: of this rank.
    """

    def __init__(self, file_of: FileOf, place: Place) -> None:
        super().__init__()
        self._file_of, self._rank, self._world_size = file_of, place.rank, place.world_size

    def covers(self, candidate: Candidate) -> Collection[str]:
        """Of all ranks."""
        files = {self._file_of(candidate, rank) for rank in range(self._world_size)}
        return {entry.path for entry in _entries(candidate, files) if entry.path.endswith(".ckpt")}

    def mine(self, candidate: Candidate) -> list[FileEntry]:
        """One."""
        return _entries(candidate, {self._file_of(candidate, self._rank)})

    def parse(self, path: Path, entry: FileEntry) -> Any:
        """As `mindspore.load_checkpoint` does."""
        return parse(path, entry)


def _entries(candidate: Candidate, files: Collection[Path]) -> list[FileEntry]:
    entries = candidate.manifest.files if candidate.manifest is not None else ()
    return [entry for entry in entries if candidate.path.parent / entry.path in files]


def parse(path: Path, entry: FileEntry) -> Any:
    """The result of `mindspore.load_checkpoint` for a `.ckpt` all of whose bytes have verified.

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
    """Within it, MindSpore on this thread gets `file` when it opens `path`."""
    thread, wanted = threading.get_ident(), path.resolve()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def open_(name: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and Path(name).resolve() == wanted:
                return _Whole(file)
            return original(name, *args, **kwargs)

        return open_

    undo = replace_attribute(serialization._ckpt_fs, "open", make)
    try:
        yield
    finally:
        undo()


class _Whole:
    """What MindSpore does with an open file: `with`, and one `read` of everything."""

    def __init__(self, file: VerifiedFile) -> None:
        self._file = file

    def __enter__(self) -> _Whole:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: the owner closes the file."""

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
