"""Standard output and error of this process: closed from the start, unread pipes, files that take nothing more."""

from __future__ import annotations

import errno
import os
import resource
import select
import stat
import sys

_STANDARD = (0, 1, 2)
_FULL = os.makedev(1, 7)
"""/dev/full."""
UNREAD = frozenset({1, 120})
"""How Python ends where nobody reads what it writes: with an exception, or with a last flush that failed."""


def keep_open() -> None:
    """Put /dev/null where standard input, output or error are closed (`>&-`), for this process and its children.

    The first files and sockets of a program would get their numbers otherwise, and what is printed goes into them.
    """
    for fd in _STANDARD:
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def nobody_reads() -> bool:
    """Whether standard output or error is a pipe, a socket or a terminal whose other end is gone (`job | head`).

    Whatever is printed there raises.
    """
    poller = select.poll()
    for fd in _STANDARD[1:]:
        if _has_other_end(fd):
            poller.register(fd, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poller.poll(0))


def is_lost(number: int) -> bool:
    """Whether an error with this number is what printing ends with here, now and in each later process."""
    return (number in (errno.EPIPE, errno.EIO) and nobody_reads()) or number in _taking_nothing()


def why_lost(cause: str) -> str:
    """Why all that is printed here raises; empty where that is not so.

    Args:
        cause: the exception that has ended a training, in one line; empty where none has. Where files take nothing
            more, it must say the same: much is not printed to standard output.
    """
    if nobody_reads():
        return "nobody reads its output any more (a closed pipe or terminal)"
    return next((why for number, why in _taking_nothing().items() if not cause or f"[Errno {number}]" in cause), "")


def _taking_nothing() -> dict[int, str]:
    """Why standard output or error takes nothing more, by the number of the error."""
    found, (limit, _) = dict[int, str](), resource.getrlimit(resource.RLIMIT_FSIZE)
    for fd in _STANDARD[1:]:
        try:
            status = os.fstat(fd)
        except OSError:
            continue
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == _FULL:
            found[errno.ENOSPC] = "its output goes to /dev/full, which takes nothing"
        if stat.S_ISREG(status.st_mode) and resource.RLIM_INFINITY != limit <= status.st_size:
            found[errno.EFBIG] = f"the file of its output has reached the limit of {limit} bytes (ulimit -f)"
    return found


def write_error(text: str) -> None:
    """Write a line to standard error, if there is one that somebody reads."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # AttributeError: Python has none where it was closed
        pass


def _has_other_end(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or (stat.S_ISCHR(mode) and os.isatty(fd))
