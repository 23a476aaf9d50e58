"""All durable file operations: create, write, fsync, rename, directory fsync, and temporary names.

The whole durable commit (fsync, rename, directory fsync) costs 0.45 ms (`docs/facts/limits.md` §4), so it is
always done.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from . import _clock
from .topology import host_identity

_log = logging.getLogger("lastgasp")
_TEMP = re.compile(r"^\.(?P<name>.+)\.tmp-(?P<pid>[1-9]\d*)-(?P<host>[0-9a-f]{6})[0-9a-f]{6}$")
STALE_AFTER_S = 24 * 3600.0
"""A temporary of another host is left alone for so many seconds: whether its process is alive cannot be seen from
here, so only the age of its last write counts. Clocks may differ by hours."""
LOCK_NAME = ".lastgasp.lock"
LOCK_WAIT_S = 10.0
_NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY)
"""Errors of a file system that cannot sync a directory; any other error is a disk error."""


_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY)
"""Errors of a kernel or a file system (NFS, FUSE) that cannot exchange names."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""As in linux/fcntl.h and linux/fs.h."""


class Disk:
    """The calls that change what is on disk. Tests wrap it to fail or be killed at any of them."""

    def create(self, path: Path, *, direct: bool = False) -> int:
        """Open a new file for writing and return its descriptor; `direct` requests O_DIRECT if possible."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if direct and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):
                return os.open(path, flags | os.O_DIRECT, 0o644)
            # A refused O_DIRECT may have left an empty file, whose random name is ours.
            path.unlink(missing_ok=True)
        return os.open(path, flags, 0o644)

    def pwrite(self, fd: int, data: memoryview | bytes, offset: int) -> int:
        """Write some of `data` at `offset`; returns how many bytes."""
        return os.pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        """Return when the content of `fd` is on the device."""
        os.fsync(fd)

    def rename(self, src: Path, dst: Path) -> None:
        """Rename within one file system, over an existing file."""
        os.replace(src, dst)

    def exchange(self, one: Path, other: Path) -> bool:
        """Let two paths change places at once, whatever they are; False where kernel or file system cannot.

        Raises:
            OSError: one of them is not there, or the disk refused.
        """
        done = exchange(one, other)
        if done not in (0, *_NO_EXCHANGE):
            raise OSError(done, os.strerror(done), str(one), None, str(other))
        return done == 0

    def link(self, src: Path, dst: Path) -> None:
        """Give `src` a second name. Raises OSError where the file system has no links, or not that many."""
        os.link(src, dst)

    def sync_dir(self, directory: Path) -> None:
        """Return when the names in `directory` are on the device.

        Some file systems (FUSE, network) cannot do that for a directory. The files themselves are on the device then,
        and their names follow at some later time; a warning is logged once.
        """
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_FSYNC:
                raise
            _warn_of_no_fsync(fd, directory, error)
        finally:
            os.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a file or a whole directory. Raises FileNotFoundError where there is none."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


DISK = Disk()


def exchange(one: Path, other: Path) -> int:
    """`renameat2(RENAME_EXCHANGE)`, which Python has not; returns its errno, 0 where it is done."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc 2.28; musl 1.2.6
    if rename is None:
        return errno.ENOSYS
    failed = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    return ctypes.get_errno() if failed else 0


_SAID: set[int] = set()
"""File systems for which a warning was logged, by device number."""


def _warn_of_no_fsync(fd: int, directory: Path, error: OSError) -> None:
    """Log a warning once per file system."""
    device = os.fstat(fd).st_dev
    if device in _SAID:
        return
    _SAID.add(device)
    _log.warning(
        "the file system of %s cannot sync directories (%s): a checkpoint survives the end of its processes, but its "
        "name may be lost where the machine loses power in the seconds after it was saved",
        directory, error.strerror,
    )  # fmt: skip


def fsync_dir(directory: Path) -> None:
    """Make the names in `directory` durable."""
    DISK.sync_dir(directory)


def replace_durably(src: Path, dst: Path, disk: Disk = DISK) -> None:
    """Rename `src` over `dst` and return when that is on the device. Both lie in one directory."""
    disk.rename(src, dst)
    disk.sync_dir(dst.parent)


def write_all(fd: int, data: memoryview, offset: int, disk: Disk = DISK) -> None:
    """Write all of `data` at `offset`. Falls back from O_DIRECT when the file system refuses it."""
    done = 0
    while done < len(data):
        try:
            done += disk.pwrite(fd, data[done:], offset + done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _drop_direct(fd):
                raise


def _drop_direct(fd: int) -> bool:
    """Turn O_DIRECT off; False when it was not on."""
    if not is_direct(fd):
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return True


def is_direct(fd: int) -> bool:
    """Whether what is written to `fd` goes past the page cache."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def write_tail(fd: int, data: memoryview, offset: int, disk: Disk = DISK) -> None:
    """Write the last bytes of a file, whose length need not suit O_DIRECT."""
    _drop_direct(fd)
    write_all(fd, data, offset, disk)


def write_atomically(path: Path, data: bytes, disk: Disk = DISK, mode: int | None = None) -> None:
    """Write `data` to `path` durably and atomically: a crash leaves either the old content or the new.

    Args:
        path: the file.
        data: its new content.
        disk: performs the writes.
        mode: its permissions; None for those of a new file.

    Raises:
        OSError: the disk is full or refuses; nothing at `path` has changed then.
    """
    temp = unique_temp(path)
    try:
        fd = disk.create(temp)
        try:
            write_all(fd, memoryview(data), 0, disk)
            if mode is not None:
                os.fchmod(fd, mode)
            disk.fsync(fd)
        finally:
            os.close(fd)
        replace_durably(temp, path, disk)
    except OSError:
        with contextlib.suppress(OSError):
            disk.remove(temp)
        raise


def make_directory(directory: Path) -> None:
    """Create `directory` and its parents durably, unless it exists."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    directory.mkdir(exist_ok=True)
    fsync_dir(directory.parent)


def open_regular(path: Path) -> int:
    """Open a regular file for reading; others are refused, as a pipe could block for ever and a device has no end.

    Raises:
        OSError: it is something else, is not there, or cannot be read.
    """
    _must_be_regular(os.stat(path), path)  # before opening, as opening a device may have effects
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _must_be_regular(os.fstat(fd), path)
    except OSError:
        os.close(fd)
        raise
    return fd


def _must_be_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def read_bounded(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        OSError: it is longer, no regular file, not there, or cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit + 1) if os.fstat(file.fileno()).st_size <= limit else None
    if data is None or len(data) > limit:
        raise OSError(errno.EFBIG, f"has more than the {limit} bytes that are allowed", str(path))
    return data


def unique_temp(path: Path) -> Path:
    """Return a name beside `path` that no other process or thread uses: `.{name}.tmp-{pid}-{host}{random}`."""
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{host_tag()}{secrets.token_hex(3)}")


@functools.cache
def host_tag() -> str:
    """Six hex digits that identify this host's /proc."""
    return xxhash.xxh3_64_hexdigest(host_identity().encode())[:6]


def is_temp(path: Path) -> bool:
    """Whether the name has exactly the form of `unique_temp`."""
    return _TEMP.match(path.name) is not None


def is_stale(path: Path, older_than_s: float = STALE_AFTER_S) -> bool:
    """Whether `path` is a temporary of a dead process: of this host, or unwritten for `older_than_s`."""
    match = _TEMP.match(path.name)
    if match is None:
        return False
    if match["host"] == host_tag():
        return not _alive(int(match["pid"]))
    try:
        return _earliest_now_ns(path.parent) - _last_write_ns(path) > older_than_s * 1e9
    except OSError:
        return False


def _earliest_now_ns(directory: Path) -> int:
    """The time by this host's clock or the file system's, whichever is behind: recent by either is recent."""
    probe = unique_temp(directory / "clock")
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b".")
        os.fsync(fd)
        return min(_clock.wall_ns(), os.fstat(fd).st_mtime_ns)
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _last_write_ns(path: Path) -> int:
    """Newest modification time of a file or of anything in a directory."""
    inside: Iterable[Path] = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
    return max(entry.lstat().st_mtime_ns for entry in (path, *inside))


def remove_stale_temps(directory: Path, older_than_s: float = STALE_AFTER_S) -> list[Path]:
    """Remove temporaries of dead processes in `directory`; return the removed paths.

    Touches only names of the exact pattern of `unique_temp`. A racing removal is no error. One that cannot be removed
    (another user's, or still open somewhere on NFS) is named and left.

    Raises:
        OSError: the directory cannot be listed.
    """
    removed = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        try:
            if is_stale(path, older_than_s):
                DISK.remove(path)
                removed.append(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("%s, which a dead process has left, cannot be removed: %s", path, error)
    return removed


@contextlib.contextmanager
def locked(directory: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[bool]:
    """Hold the advisory lock of `directory` among threads, processes and (where flock reaches) hosts.

    The kernel releases it when the holder dies. Yields False, with a warning, if it could not be acquired: the
    file system has no locks, or a stopped process has held it for `wait_s` seconds. A gasp must not be lost
    because of that; two writers of one name could then corrupt it, which verification detects.
    """
    fd = _open_lock(directory / LOCK_NAME)
    try:
        got = fd >= 0 and _acquire(fd, _clock.monotonic() + wait_s)
        if not got:
            _log.warning("no lock on %s: continuing without it", directory)
        yield got
    finally:
        if fd >= 0:
            os.close(fd)


def _open_lock(path: Path) -> int:
    """Open the lock file, private to this user; -1 if another user could hold it, or has created it.

    The owner of the directory may own the lock as well, as he controls the directory anyway.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o600)
    except OSError:
        return -1
    try:
        found = os.fstat(fd)
        _must_be_regular(found, path)
        if found.st_uid not in (os.geteuid(), os.stat(path.parent).st_uid):
            raise OSError(errno.EPERM, f"belongs to user {found.st_uid}", str(path))
        if found.st_mode & 0o077 and found.st_uid == os.geteuid():
            os.fchmod(fd, 0o600)  # anyone who can open it can hold it and delay each commit
    except OSError as error:
        _log.warning("%s is not a reliable lock: %s", path, error.strerror)
        os.close(fd)
        return -1
    return fd


def _acquire(fd: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if _clock.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        except OSError:
            return False
