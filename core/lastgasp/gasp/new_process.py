"""A new process that takes a rank's place ends with its launcher, as long as it has not joined the others.

The store in which it would meet them was the launcher's. torch tries to reach that for half an hour; meanwhile the
others have saved and ended, and nobody is left who would end this process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

import msgspec

from lastgasp import exitcodes

from .again import LAUNCHER, ORDER, Again

log = logging.getLogger("lastgasp")

LOOK = 0.5
"""Seconds between two looks at who this process' parent is."""
_joined = threading.Event()


def order_of_this_process() -> Again | None:
    """What the launcher has told a process that takes the place of a dead rank; only the first call returns it."""
    order, launcher = os.environ.pop(ORDER, ""), os.environ.pop(LAUNCHER, "")
    if not order:
        return None
    ends_with(int(launcher) if launcher else os.getppid())
    return msgspec.json.decode(order, type=Again)


def ends_with(launcher: int) -> None:
    """From now on, and until `joined`, this process ends once the process `launcher` is not its parent any more."""
    _joined.clear()
    threading.Thread(target=_watch, args=(launcher,), name="lastgasp-new-process", daemon=True).start()


def joined() -> None:
    """It has a connection with the controller, which tells what happens to the launcher."""
    _joined.set()


def _watch(launcher: int) -> None:
    while not _joined.wait(LOOK):
        if os.getppid() != launcher:
            log.error(
                "the launcher (process %d) is gone before this process had taken a rank's place: it ends", launcher
            )
            sys.stderr.flush()
            os._exit(exitcodes.NOTHING_TO_SAVE)
