"""Compare a checkpoint with its manifest. Every outcome is a verdict; nothing on disk raises."""

from __future__ import annotations

import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from lastgasp.errors import ConfigError
from lastgasp.ports import Layout

from .digest import READ_SIZE, hash_range
from .manifest import FileEntry, Manifest, ManifestProblem
from .pairing import read_pair

DamageKind = Literal["no_manifest", "bad_manifest", "missing", "size", "digest", "unreadable", "foreign"]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, from any thread, one call at a time."""
_ALONE = 32 << 20
"""Below this many bytes a second thread costs more than it brings."""


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong with one file. `offset` and `length` in bytes; length 0 means the whole file."""

    file: str
    kind: DamageKind
    offset: int = 0
    length: int = 0
    detail: str
    proven: bool = False
    """The content was read and is bad; it will not get better. Only then may it be quarantined."""

    def __str__(self) -> str:
        where = f" bytes {self.offset}-{self.offset + self.length}" if self.length else ""
        return f"{self.file}{where}: {self.detail}"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank found about its share of one checkpoint. `step` is None when no manifest tells it."""

    path: Path
    step: int | None
    ok: bool
    damages: tuple[Damage, ...] = ()

    @property
    def reasons(self) -> list[str]:
        """One line per damage, naming file and byte range."""
        return [str(damage) for damage in self.damages]

    @property
    def proven(self) -> bool:
        """Whether some damage is proven rather than a failure to read."""
        return any(damage.proven for damage in self.damages)


class _Chunk(msgspec.Struct, frozen=True):
    path: Path
    entry: FileEntry
    index: int

    @property
    def span(self) -> tuple[int, int]:
        offset = self.index * self.entry.chunk_size
        return offset, min(self.entry.chunk_size, self.entry.size - offset)


def verify(
    checkpoint: Path,
    layout: Layout,
    *,
    manifest: Manifest | None = None,
    share: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
    threads: int = 2,
) -> Verdict:
    """Check names, sizes and the share's chunk digests.

    Args:
        checkpoint: the checkpoint; layout: how it lies.
        manifest: what to compare with; None reads it from disk. Ranks that agreed on one give it here.
        share: (i, n) checks the chunks whose number modulo n is i. Names and sizes are always checked.
        progress: told about bytes; threads: how many read and hash.

    Raises:
        ConfigError: a share or a number of threads that makes no sense.
    """
    _check_arguments(share, threads)
    found = read_pair(checkpoint, layout) if manifest is None else manifest
    if isinstance(found, ManifestProblem):
        return Verdict(path=checkpoint, step=None, ok=False, damages=(manifest_damage(checkpoint, found),))
    damages, sound = _structure(checkpoint, layout, found)
    chunks = [
        _Chunk(checkpoint.parent / entry.path, entry, index)
        for entry in sound
        for index in range(len(entry.chunks))
    ]
    damages += _Reader(chunks[share[0] :: share[1]], progress).run(threads)
    return Verdict(path=checkpoint, step=found.step, ok=not damages, damages=tuple(damages))


def manifest_damage(checkpoint: Path, problem: ManifestProblem) -> Damage:
    """The damage that a manifest's problem is."""
    return Damage(
        file=checkpoint.name,
        kind="no_manifest" if problem.kind == "missing" else "bad_manifest",
        detail=problem.text,
        proven=problem.kind == "damaged",
    )


def _check_arguments(share: tuple[int, int], threads: int) -> None:
    if not 0 <= share[0] < share[1]:
        raise ConfigError("share", share, "(i, n) with 0 <= i < n", "Give (rank, world_size).")
    if threads < 1:
        raise ConfigError("threads", threads, "at least 1", "Leave it out for 2.")


def _structure(checkpoint: Path, layout: Layout, manifest: Manifest) -> tuple[list[Damage], list[FileEntry]]:
    """Damages of names and sizes, and the entries whose content is worth reading."""
    damages, sound = [], []
    for entry in manifest.files:
        damage = _size_damage(checkpoint.parent / entry.path, entry)
        if damage is None:
            sound.append(entry)
        else:
            damages.append(damage)
    return damages + _foreign(checkpoint, layout, manifest), sound


def _size_damage(path: Path, entry: FileEntry) -> Damage | None:
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return Damage(file=entry.path, kind="missing", length=entry.size, detail="file is missing")
    except OSError as error:
        return _unreadable(entry.path, 0, entry.size, error)
    if not stat.S_ISREG(status.st_mode):
        return Damage(file=entry.path, kind="unreadable", length=entry.size, detail="is not a regular file")
    if status.st_size == entry.size:
        return None
    low, high = sorted((status.st_size, entry.size))
    detail = f"has {status.st_size} bytes, not {entry.size}"
    return Damage(file=entry.path, kind="size", offset=low, length=high - low, detail=detail, proven=True)


def _foreign(checkpoint: Path, layout: Layout, manifest: Manifest) -> list[Damage]:
    """Files that the manifest does not name. Hidden ones (`.nfs...`, `.DS_Store`) are nobody's data."""
    try:
        found = layout.files(checkpoint)
    except OSError as error:
        return [_unreadable(checkpoint.name, 0, 0, error)]
    extra = sorted(set(found) - {entry.path for entry in manifest.files})
    return [
        Damage(file=name, kind="foreign", detail="is not in the manifest: move it out of the checkpoint")
        for name in extra
        if not name.rpartition("/")[2].startswith(".")
    ]


def _unreadable(file: str, offset: int, length: int, error: OSError) -> Damage:
    detail = f"cannot be read: {error.strerror or error}"
    return Damage(file=file, kind="unreadable", offset=offset, length=length, detail=detail)


class _Reader:
    """Reads and hashes chunks with a few threads that take turns, so that the disk sees one long read."""

    def __init__(self, chunks: list[_Chunk], progress: Progress | None) -> None:
        self._chunks = chunks
        self._next = iter(chunks)
        self._total = sum(chunk.span[1] for chunk in chunks)
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def run(self, threads: int) -> list[Damage]:
        """Damages in the order of files and offsets, adjacent ones merged."""
        if threads == 1 or self._total < _ALONE:
            found = self._work()
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="lastgasp-verify") as pool:
                jobs = [pool.submit(self._work) for _ in range(threads)]
            found = [pair for job in jobs for pair in job.result()]
        order = {id(chunk): number for number, chunk in enumerate(self._chunks)}
        return merge([damage for _, damage in sorted(found, key=lambda pair: order[id(pair[0])])])

    def _work(self) -> list[tuple[_Chunk, Damage]]:
        found = []
        with mmap.mmap(-1, READ_SIZE) as pages, memoryview(pages) as buffer, _Files() as files:
            for chunk in self._turns():
                damage = _check(chunk, files, buffer)
                if damage:
                    found.append((chunk, damage))
                self._tell(chunk.span[1])
        return found

    def _turns(self) -> Iterator[_Chunk]:
        while True:
            with self._lock:
                chunk = next(self._next, None)
            if chunk is None:
                return
            yield chunk

    def _tell(self, nbytes: int) -> None:
        if self._progress:
            with self._lock:
                self._done += nbytes
                self._progress(self._done, self._total)


class _Files:
    """The descriptor of the file that is being read; one open file at a time."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._fd = -1

    def fd(self, path: Path) -> int:
        if path != self._path:
            self._close()
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._path = path
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._fd

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._path = -1, None


def _check(chunk: _Chunk, files: _Files, buffer: memoryview) -> Damage | None:
    offset, length = chunk.span
    try:
        digest, count = hash_range(files.fd(chunk.path), offset, length, buffer)
    except OSError as error:
        return _unreadable(chunk.entry.path, offset, length, error)
    if digest == chunk.entry.chunks[chunk.index]:
        return None
    if count < length:
        detail, proven = "ended while it was being read", False
    else:
        detail, proven = "content differs from its digest", True
    return Damage(file=chunk.entry.path, kind="digest", offset=offset, length=length, detail=detail, proven=proven)


def merge(damages: list[Damage]) -> list[Damage]:
    """Join neighbours of one file that lie next to each other and say the same."""
    merged: list[Damage] = []
    for damage in damages:
        last = merged[-1] if merged else None
        if last and _touches(last, damage):
            merged[-1] = msgspec.structs.replace(last, length=last.length + damage.length)
        else:
            merged.append(damage)
    return merged


def _touches(last: Damage, damage: Damage) -> bool:
    return (last.file, last.kind, last.detail) == (
        damage.file,
        damage.kind,
        damage.detail,
    ) and last.offset + last.length == damage.offset
