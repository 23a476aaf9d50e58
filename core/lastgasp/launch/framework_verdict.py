"""Lets a framework that ends a training for good inform the launcher: another attempt would only repeat its decision.

The exit code alone is ambiguous: 16 means an invalid result in Megatron, but anything in other scripts. So the rank
leaves a file in the user's runtime directory, named after the attempt that its launcher has started.
"""

from __future__ import annotations

import contextlib
import logging
import os

import msgspec

from lastgasp.errors import ConfigError
from lastgasp.gasp.rundir import open_private, replace_in, runtime_directory
from lastgasp.launch.orphans import MARK

log = logging.getLogger("lastgasp.launch")


class Verdict(msgspec.Struct, frozen=True):
    """A framework's decision about its job.

    Args:
        code: the exit code that it chose, also used by the launcher.
        why: one line.
    """

    code: int
    why: str

    def __str__(self) -> str:
        return (
            f"stopped with exit code {self.code}: {self.why}. A restart would not change it; the checkpoints are kept, "
            "and the job resumes from them when it is started again."
        )


def give(verdict: Verdict) -> bool:
    """On an exiting rank: tell the launcher not to restart. Return False if that fails. Never raises."""
    mark = os.environ.get(MARK)
    if not mark:
        return False
    try:
        with open_private(runtime_directory(), create=True) as folder:
            # Each rank writes under a temporary name of its own, and all write the same.
            replace_in(folder, f"verdict-{mark}", msgspec.json.encode(verdict), f".verdict-{mark}-{os.getpid()}")
    except (OSError, ConfigError) as error:
        log.warning("the launcher could not be informed that another attempt would be useless: %s", error)
        return False
    return True


def take(mark: str) -> Verdict | None:
    """In the launcher, once the workers of the attempt `mark` have ended. None if there is no verdict. Never raises."""
    name = f"verdict-{mark}"
    try:
        with open_private(runtime_directory()) as folder:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
            try:
                found = msgspec.json.decode(os.read(fd, 65536), type=Verdict)
            finally:
                os.close(fd)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
    except (OSError, ConfigError, msgspec.MsgspecError):
        return None
    return found
