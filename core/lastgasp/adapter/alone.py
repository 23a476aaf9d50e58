"""A job started twice: another one trains in the same directory at this moment.

Each of the two would remove, replace and resume what the other has saved. Rank 0 holds a lock of POSIX's kind on a file
in the directory: it ends with the process, and no child has it, so nothing that a job leaves behind can be mistaken for
a job.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("lastgasp")

NAME = ".lastgasp.job"
_FLOCK = "hhqqi"
"""struct flock of Linux with 64 bits: type, whence, start, length, process."""


def claim(directory: Path) -> tuple[str, Callable[[], None]]:
    """Take the directory for this process, if nobody has it.

    Returns:
        Who has it already, in words; empty if nobody has, or if it cannot be known (a file system without locks). And
        what gives it back.
    """
    path, mine = directory / NAME, False
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:  # a file of another user: their job may have ended long ago
        log.debug("%s: whether another job trains here is not known: %s", directory, error)
        return "", _nothing

    def release() -> None:
        if mine:
            with contextlib.suppress(OSError):
                path.unlink()
        os.close(fd)

    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = True
    except (BlockingIOError, PermissionError):
        return _holder(fd), release
    except OSError as error:
        log.debug("%s: whether another job trains here is not known: %s", directory, error)
    return "", release


def _holder(fd: int) -> str:
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    except OSError:
        return ""
    if kind == fcntl.F_UNLCK:  # it has just ended
        return ""
    here = pid > 0 and os.path.exists(f"/proc/{pid}")
    return f"process {pid}" if here else "a process in another container, or on another host"


def _nothing() -> None:
    """Nothing was taken."""
