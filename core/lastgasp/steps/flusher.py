"""The thread that writes marks to disk four times a second and watches the switch file."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from lastgasp import _clock

from . import bits
from .ageing import Ageing
from .drain import Drain
from .marks import Marks
from .rankfiles import RankFiles

log = logging.getLogger("lastgasp.steps")

PERIOD_S = 0.25
"""Seconds from a mark to its write."""
SWITCH_PERIOD_S = 1.0
"""TaskD's own period (docs/facts/taskd.md §6)."""
Poll = Callable[[int], int | None]


class Flusher:
    """One per rank, from `start` to `stop`. It never raises; an error is logged once and the write is retried.

    Args:
        drain: what each turn does first.
        ageing: what keeps the files below their limit; None for no limit.
        poll: `SwitchFile.poll`; given the mask, it returns the one to set or None.
        period: seconds between turns.
    """

    def __init__(
        self,
        marks: Marks,
        files: RankFiles,
        *,
        drain: Drain | None = None,
        ageing: Ageing | None = None,
        poll: Poll | None = None,
        period: float = PERIOD_S,
    ) -> None:
        self._marks, self._files = marks, files
        self._drain = drain if drain is not None else Drain(marks, files)
        self._ageing, self._poll, self._period = ageing, poll, period
        self._pid = os.getpid()
        # Reentrant: a signal handler may ask for a flush while its thread is asking for one.
        self._changed = threading.Condition(threading.RLock())
        self._asked = self._served = self._written = 0
        self._stopping = False
        self._serving = False
        """Whether the thread accepts requests; otherwise the caller writes synchronously."""
        self._next_poll = _clock.monotonic()
        self._file = files.path
        self._bug_told = False
        self._thread = threading.Thread(target=self._loop, name="lastgasp-marks", daemon=True)

    def start(self) -> None:
        """Start the thread: rows reach the disk soon after the end of their range."""
        self._serving = True
        try:
            self._thread.start()
        except RuntimeError as error:
            self._serving = False
            log.warning("no thread for the step marks (%s): they are written at the end of training only", error)

    @property
    def running(self) -> bool:
        """Whether the thread exists, even inside a write that hangs."""
        return self._thread.is_alive()

    def flush(self, timeout: float) -> bool:
        """Write what was marked before the call to disk; from any thread, and from a signal handler.

        Args:
            timeout: seconds, even if the disk hangs.

        Returns:
            True when it is there.
        """
        if os.getpid() != self._pid:
            return False
        with self._changed:
            if self._serving and self._thread.is_alive():
                ticket = self._ask()
                self._changed.wait_for(lambda: self._served >= ticket, timeout)
                return self._written >= ticket
        return self._write()

    def stop(self, timeout: float) -> bool:
        """Flush once more, then end the thread; a disk that hangs keeps it alive, without harm. Idempotent.

        Returns:
            True when everything is on disk.
        """
        if os.getpid() != self._pid:
            return False
        self._stopping = True
        deadline = _clock.monotonic() + timeout
        written = self.flush(timeout)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(max(deadline - _clock.monotonic(), 0.0))
        return written

    def _ask(self) -> int:
        self._asked += 1
        self._changed.notify_all()
        return self._asked

    # -- the thread --------------------------------------------------------------------------------

    def _loop(self) -> None:
        while self._turn():
            if not self._stopping:
                self._guarded(self._look_at_switch)
                self._guarded(self._age)

    def _turn(self) -> bool:
        """Write once; return False when the thread is to end and has served all requests."""
        with self._changed:
            self._changed.wait_for(lambda: self._asked > self._served, self._period)
            asked = self._asked
        written = self._write()
        with self._changed:
            self._served = asked
            self._written = asked if written else self._written
            self._serving = not self._stopping or self._asked > asked
            self._changed.notify_all()
            return self._serving

    def _write(self) -> bool:
        return self._guarded(self._drain.run) is True

    def _look_at_switch(self) -> None:
        if self._poll is None or _clock.monotonic() < self._next_poll:
            return
        self._next_poll = _clock.monotonic() + SWITCH_PERIOD_S
        before = self._marks.mask
        mask = self._poll(before)
        if mask is not None:
            # Only the bits that the file changed: a command may have arrived while it was read.
            self._marks.switch(mask & ~before, before & ~mask)
            log.info("the switch file sets the step marks: %s", bits.describe(mask))

    def _age(self) -> None:
        if self._ageing is None:
            return
        if self._file not in (None, self._files.path):
            self._ageing.hasten()
        self._file = self._files.path
        self._ageing.tick(self._file)

    def _guarded(self, work: Callable[[], object]) -> object:
        """A bug here is no reason to stop training, nor to stop writing."""
        try:
            return work()
        except Exception:
            if not self._bug_told:
                self._bug_told = True
                log.exception("the step marks have a bug, logged once; training continues")
            return None
