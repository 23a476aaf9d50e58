"""Files that must not make anybody wait: a thread writes them, however long the disk takes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from lastgasp import _clock

log = logging.getLogger("lastgasp.controller")

STALLED = 30.0
"""Seconds that one write may take before people are told."""


class RecordWriter:
    """Writes in the order of `put`, on a thread of its own that begins with the first one.

    A file system may stall for minutes; whoever calls `put` never notices. What waits is bounded, because a write
    replaces the one of the same name that has not begun.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Callable[[], None]] = {}
        self._writing, self._since = "", 0.0
        self._closed = self._warned = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, name: str, write: Callable[[], None]) -> None:
        """Have `write` called soon; `name` says for people what it writes. Of no effect once closed."""
        with self._changed:
            if self._closed:
                return
            self._waiting[name] = write
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lastgasp-records", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Everything has been written, or has failed."""
        with self._changed:
            return self._idle()

    def settle(self, seconds: float) -> bool:
        """Wait until everything has been written, for `seconds` at most; False where it has not."""
        with self._changed:
            return self._changed.wait_for(self._idle, seconds)

    def look(self) -> None:
        """Say once when a write hangs; never waits for it."""
        if self._writing and not self._warned and _clock.monotonic() - self._since > STALLED:
            self._warned = True
            log.warning("%s has not been written for %g s: the file system stalls; the job goes on", self._writing,
                        STALLED)  # fmt: skip

    def close(self) -> None:
        """End the thread once it has written what waits; waits for nothing. Says what was not written until now."""
        with self._changed:
            self._closed = True
            if names := [*filter(None, [self._writing]), *self._waiting]:
                log.error("not written, because the file system stalls: %s", ", ".join(names))
            self._changed.notify_all()

    def _idle(self) -> bool:
        return not self._waiting and not self._writing

    def _run(self) -> None:
        while (write := self._next()) is not None:
            try:
                write()
            except Exception as error:  # a record that cannot be written costs the record
                log.error("%s could not be written: %s", self._writing, error)
            with self._changed:
                self._writing = ""
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            name = next(iter(self._waiting))
            self._writing, self._since = name, _clock.monotonic()
            return self._waiting.pop(name)
