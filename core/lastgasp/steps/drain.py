"""From the ring to the rank's files: the flusher's work without its thread."""

from __future__ import annotations

import errno
import logging
import os
import time

from lastgasp import _clock

from . import format as layout
from .marks import Marks
from .rankfiles import RankFiles
from .rows import Origin, Renderer, dropped

log = logging.getLogger("lastgasp.steps")

BATCH = 4096
"""Ranges of one write, at most."""
CHUNK = 128
"""Ranges rendered before the GIL is offered to the training thread: some 0.3 ms."""
TELL_AGAIN_S = 600.0
"""Minimum seconds between warnings about an intermittently failing disk."""


class Drain:
    """Takes records out of the ring once their rows are in the file. For one thread at a time.

    A disk that fails leaves them in the ring, where newer ones are dropped and counted once it is full; the next
    `run` tries again.

    Args:
        marks: the source.
        files: where the rows go.
        device: number of this rank's device on its host.
    """

    def __init__(self, marks: Marks, files: RankFiles, device: int = 0) -> None:
        self._marks, self._files = marks, files
        self._origin = Origin(os.getpid(), max(device, 0), marks.wall_offset)
        self._renderer = Renderer(self._origin, marks.names)
        self._unreadable = 0
        self._told_dropped = 0
        self._trouble: tuple[int | None, float] | None = None
        self._failing = False

    def run(self) -> bool:
        """Write what was recorded before the call; return False if the disk refused (logged once)."""
        head = self._marks.head
        try:
            if self._files.wanting:
                self._files.prepare()
            while self._marks.tail < head and self._batch():
                pass
            self._tell_dropped()
        except OSError as error:
            self._fails(error)
            return False
        self._works()
        return self._marks.tail >= head

    def _batch(self) -> bool:
        records = self._marks.records(BATCH)
        count = len(records) // layout.RECORD.size
        if not count:
            return False
        try:
            rows = self._render(records)
        except Exception:
            # They would block all later ones for ever.
            self._unreadable += count
            log.exception("%d step marks could not be made into rows and are dropped; this is a bug in lastgasp", count)
        else:
            self._files.append(rows)
        self._marks.consumed(count)
        return True

    def _render(self, records: bytes) -> bytes:
        size = CHUNK * layout.RECORD.size
        parts = []
        for at in range(0, len(records), size):
            if at:
                time.sleep(0)
            parts.append(self._renderer.render(records[at : at + size]))
        return b"".join(parts)

    def _tell_dropped(self) -> None:
        lost = self._marks.dropped + self._unreadable
        if lost > self._told_dropped:
            self._files.append(
                dropped(lost - self._told_dropped, self._marks.take_id(), _clock.wall_ns(), self._origin)
            )
            self._told_dropped = lost

    def _fails(self, error: OSError) -> None:
        now = _clock.monotonic()
        if self._trouble is None or self._trouble[0] != error.errno or now - self._trouble[1] > TELL_AGAIN_S:
            self._trouble = error.errno, now
            self._failing = True
            log.warning(
                "step marks cannot be written to %s: %s. They are kept in memory while there is room, then dropped "
                "and counted; training continues. %s",
                self._files.directory,
                error,
                _REMEDIES.get(error.errno or 0, "Make sure that the directory is writable."),
            )

    def _works(self) -> None:
        if self._failing:
            self._failing = False
            log.info("step marks are written to %s again", self._files.directory)


_REMEDIES = {
    errno.ENOSPC: "Free some space.",
    errno.EDQUOT: "Free some of the quota.",
    errno.EROFS: "Set LASTGASP_PROFILING_DIR to a directory that can be written.",
    errno.EACCES: "Give it to this user, or set LASTGASP_PROFILING_DIR to another directory.",
}
