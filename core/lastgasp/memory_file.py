"""A file in memory, which others open at `/proc/PID/fd/N` and which goes with the last descriptor of it.

It is a memfd, by libc's own function: a Python that was built for an older libc than the one it runs on, as those of
conda and uv are, has no `os.memfd_create`. Hardened systems forbid memfds that could be executed, or all of them; a
file without a name then takes its place.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from pathlib import Path

_CLOEXEC, _NOEXEC = 1, 8
"""MFD_CLOEXEC, and MFD_NOEXEC_SEAL, which Linux 6.3 to 6.6 may insist on (`vm.memfd_noexec=2`)."""
_FULL = errno.EMFILE, errno.ENFILE, errno.ENOMEM
"""No other file could be opened, either."""

_ROOM = 1 << 20
"""Bytes that a folder must have room for: a container's /dev/shm may be full."""


def memory_file(name: str) -> int:
    """A descriptor of a new, empty file, which children do not inherit.

    Args:
        name: for /proc/PID/fd, which has no slash.

    Raises:
        OSError: there is neither such memory nor a folder for a file.
    """
    for flags in (_CLOEXEC, _CLOEXEC | _NOEXEC):
        try:
            return _memfd(name, flags)
        except OSError as error:
            if error.errno in _FULL:
                raise
            refused = error
    for place in ("/dev/shm", None):  # the latter stands for the system's temporary folder
        try:
            return _nameless(place, name)
        except OSError:
            continue
    raise refused


def _memfd(name: str, flags: int) -> int:
    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)  # glibc 2.27; musl 1.1.20
    number: int = -1 if create is None else create(name.encode(), flags)
    if number < 0:
        found = errno.ENOSYS if create is None else ctypes.get_errno()
        raise OSError(found, os.strerror(found), name)
    return number


def _nameless(place: str | None, name: str) -> int:
    number, path = tempfile.mkstemp(dir=place, prefix=f"{name}-")
    Path(path).unlink(missing_ok=True)
    try:
        os.posix_fallocate(number, 0, _ROOM)
        os.ftruncate(number, 0)
    except OSError:
        os.close(number)
        raise
    return number
