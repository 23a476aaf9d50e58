"""Standard output and error of this process: closed from the start, or a pipe that nobody reads any more."""

from __future__ import annotations

import os
import select
import stat
import sys

_STANDARD = (0, 1, 2)
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
