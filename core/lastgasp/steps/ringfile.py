"""Makes the file of a marks ring, and finds those that other processes have left."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lastgasp import _clock

from . import format as layout
from . import ring

log = logging.getLogger("lastgasp")

PREFIX = "lastgasp-marks"
VARIABLE = "LASTGASP_RING_DIR"


@dataclass(frozen=True)
class RingFile:
    """A mapped ring, new and empty, locked as long as this process lives and `file` is open.

    Attributes:
        mapping: its memory, fully allocated, so that no mark waits for a page or dies because there is none.
        path, file: None for anonymous memory, which cannot be found after a SIGKILL.
    """

    mapping: mmap.mmap
    path: Path | None = None
    file: io.FileIO | None = None

    def close(self, remove: bool) -> None:
        """Close the file, and remove it if requested. Views keep the memory until they are released."""
        if remove and self.path is not None:
            self.path.unlink(missing_ok=True)
        try:
            self.mapping.close()
        except BufferError:
            pass  # a RingReader of this process; the memory is released with it
        if self.file is not None:
            status = os.fstat(self.file.fileno())
            ring.own.pop((status.st_dev, status.st_ino), None)  # what is left may be recovered, even by this process
            self.file.close()


def places() -> list[Path]:
    """Where rings are made and looked for: shared memory, or the system's temporary directory if there is none.

    LASTGASP_RING_DIR names another directory; then rings are made and looked for there alone.
    """
    if named := os.environ.get(VARIABLE):
        return [Path(named)]
    return [Path("/dev/shm"), Path(tempfile.gettempdir())]


def ring_files() -> Iterator[Path]:
    """The ring files of this user, of living and of dead processes."""
    for place in dict.fromkeys(places()):
        yield from sorted(place.glob(f"{PREFIX}-{os.getuid()}-*"))


def create(header: Mapping[str, int], capacity: int) -> RingFile:
    """A new ring in the first place that has room, in anonymous memory as the last resort.

    Args:
        header: further fields of the header: rank, mask, ...
        capacity: records, a power of two.
    """
    reasons = []
    for place in dict.fromkeys(places()):
        try:
            return _create_in(place, header, capacity)
        except OSError as error:
            reasons.append(f"{place}: {error.strerror or error}")
            log.info("no marks ring there: %s", reasons[-1])
    log.warning(
        "step marks are kept in this process's own memory (%s): they are written as usual, but the last second is "
        "lost if this process is killed. Give it 2 MB of shared memory or of temporary space.",
        "; ".join(reasons),
    )
    mapping = mmap.mmap(-1, layout.size_of(capacity))
    _fill(mapping, header, capacity)
    return RingFile(mapping)


def _create_in(place: Path, header: Mapping[str, int], capacity: int) -> RingFile:
    """Create it without a name until it is locked: an unlocked ring looks like a dead process's.

    Where the file system must have a name for it that is another one, which a process that dies meanwhile leaves.
    """
    name = f"{PREFIX}-{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"
    size, temporary, path = layout.size_of(capacity), place / f".{name}", place / name
    file = _nameless(place)
    named = file is None
    if file is None:
        file = io.FileIO(temporary, "x+", opener=_open_private)
    try:
        # A lack of space is an error here; in the mapping it would be a SIGBUS at some mark.
        os.posix_fallocate(file.fileno(), 0, size)
        mapping = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        _fill(mapping, header, capacity)
        fcntl.lockf(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if named:
            os.rename(temporary, path)
        else:
            _name(file, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        file.close()
        raise
    ring.own[_key(file)] = mapping
    return RingFile(mapping, path, file)


def _nameless(place: Path) -> io.FileIO | None:
    """An open file that goes with its process as long as nobody links it; None where there are no such."""
    if not hasattr(os, "O_TMPFILE"):  # a Python built for an older system
        return None
    try:
        return io.FileIO(os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), "r+")
    except OSError:
        return None


def _name(file: io.FileIO, path: Path) -> None:
    own = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(str(file.fileno()), path, src_dir_fd=own)  # what the entry leads to: link() alone does not follow it
    finally:
        os.close(own)


def _key(file: io.FileIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _fill(mapping: mmap.mmap, header: Mapping[str, int], capacity: int) -> None:
    if capacity.bit_count() != 1:
        raise OSError(errno.EINVAL, f"a capacity of {capacity}, which is not a power of two")
    view = ring.View(memoryview(mapping))
    fields = {"capacity": capacity, "next_id": 1, "wall_offset": wall_offset(), "pid": os.getpid(), **header}
    for field, value in (ring.CONSTANT | fields).items():
        view[field] = value
    view.release()


def wall_offset() -> int:
    """What to add to CLOCK_MONOTONIC to get the time since the epoch, in ns: the closest of a few readings."""
    best: tuple[int, int] | None = None
    for _ in range(5):
        before, wall, after = time.monotonic_ns(), _clock.wall_ns(), time.monotonic_ns()
        reading = after - before, wall - (before + after) // 2
        best = min(best or reading, reading)
    assert best is not None
    return best[1]
