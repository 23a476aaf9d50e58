"""How a rank ends once a recovery is over, even if its training thread is stuck; and how long that may take.

What a recovery in place saves is about what the start of a process takes, up to its training. Where the step is on disk
already, to wait for longer than that for a rank to leave its training would cost more than it can save.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import ClassVar, NoReturn

from lastgasp import _clock
from lastgasp.steps.recorder import flush_all

log = logging.getLogger("lastgasp")

LEAST, MOST = 5.0, 30.0
"""Seconds; the second besides `finish_timeout`."""
GIVES_WAY = 5.0
"""Seconds more, in which the others may agree on a new process for this rank: its launcher ends this one then."""
TOLD = 2.0
"""Seconds in which a rank that has said so is ended by the controller or its launcher, where it gets a new process."""
STAYS = "rank {rank} does not leave its training: it ends, and the job restarts"
FLUSH_LIMIT = 2.0
"""Seconds for writing the last step marks of an exiting rank; the launcher writes the remaining ones."""
_took: list[float] = []


def training_begins() -> None:
    """Measure the start of this process, the first time."""
    if not _took:
        _took.append(_clock.process_age())


def start_took() -> float:
    """Seconds from the beginning of this process to that of its first training; 0 before."""
    return _took[0] if _took else 0.0


def limit(finish_timeout: float, *, on_disk: bool) -> float:
    """Seconds for a rank to leave its training; on_disk: all begin again with the checkpoint of its step."""
    most = finish_timeout + MOST
    return min(most, max(LEAST, start_took())) if on_disk else most + GIVES_WAY


def wait_to_be_replaced() -> None:
    """Wait for the end of this process, which has said that it does not leave its training; it may not come."""
    threading.Event().wait(TOLD)


class Leaving:
    """One per session; any thread may call it.

    Args:
        nobody_waits: asked before a process is ended whose training thread has raised, as its script may handle that:
            whether no other rank waits for its end.
    """

    _raised: ClassVar[Leaving | None] = None

    def __init__(self, nobody_waits: Callable[[], bool] = lambda: False) -> None:
        self._nobody_waits = nobody_waits
        self._lock, self._stays = threading.Lock(), False
        self._timer: threading.Timer | None = None
        if (before := Leaving._raised) is not None:  # the script has handled that, and comes to another training
            before.stays()
        Leaving._raised = None

    def raised(self) -> None:
        """The training thread has raised, and this process ends unless the script begins another training."""
        Leaving._raised = self

    def renew(self) -> None:
        """A training begins, which may be left."""
        self._stays = False

    def after(self, seconds: float | None, end: Callable[[], int]) -> None:
        """End this process in so many seconds, unless it `stays`; the first call counts. None: it is not ended.

        Args:
            end: called first, on a thread of its own; returns the exit code. Whoever says meanwhile that the process
                stays waits, until it ends.
        """
        with self._lock:
            if self._timer is None and seconds is not None and not self._stays:
                timer = threading.Timer(seconds, self._leave, (end,))
                timer.daemon = True
                try:
                    timer.start()
                except RuntimeError as error:  # a limit of processes is reached
                    log.warning("this process is not ended in %g s if it hangs: %s", seconds, error)
                else:
                    self._timer = timer

    def stays(self) -> None:
        """The training thread has left its training by itself. Idempotent."""
        with self._lock:
            self._stays = True
            if self._timer is not None:
                self._timer.cancel()

    def _leave(self, end: Callable[[], int]) -> None:
        raised = Leaving._raised is self and threading.main_thread().is_alive()  # else it is about to end, or to hang
        if not self._stays and raised and self._nobody_waits():
            self.stays()
        with self._lock:  # it may stay meanwhile
            if not self._stays:
                leave_now(end())


def leave_now(code: int) -> NoReturn:
    """End the process from any thread, whatever the others do, after flushing its output.

    Its data-loader workers are ended as well: they would notice only seconds later.
    """
    for child in multiprocessing.active_children():
        child.kill()
    flush_all(FLUSH_LIMIT)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # None where it was closed from the start
            stream.flush()
    os._exit(code)
