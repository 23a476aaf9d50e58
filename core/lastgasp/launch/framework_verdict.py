"""A framework that ends a training for good tells the launcher so: another attempt would only repeat its verdict.

The exit code alone does not tell: 16 is Megatron's word on a result, and any other script's business. So the rank
leaves a file in the user's runtime directory, named by the round that its launcher has started.
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
    """What a framework has said about its job.

    Args:
        code: the exit code that it chose; the launcher's, too.
        why: one line.
    """

    code: int
    why: str

    def __str__(self) -> str:
        return (
            f"stopped with exit code {self.code}: {self.why}. A restart would not change it; the checkpoints are kept, "
            "and the job goes on from them when it is started again."
        )


def give(verdict: Verdict) -> bool:
    """On a rank that is about to exit: the launcher shall not restart. False where it cannot be told. Never raises."""
    mark = os.environ.get(MARK)
    if not mark:
        return False
    try:
        with open_private(runtime_directory(), create=True) as folder:
            # Each rank has its own name for it while it writes, and all of them say the same.
            replace_in(folder, f"verdict-{mark}", msgspec.json.encode(verdict), f".verdict-{mark}-{os.getpid()}")
    except (OSError, ConfigError) as error:
        log.warning("the launcher could not be told that another attempt would be in vain: %s", error)
        return False
    return True


def take(mark: str) -> Verdict | None:
    """In the launcher, once the workers of the round `mark` have ended. None where none was given. Never raises."""
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
