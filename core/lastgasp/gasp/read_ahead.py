"""What was just saved is read once while the job starts again, so that its ranks find it in memory.

A gasp is written past the page cache (`checkpoint.digest`), which is the fastest way to the disk and leaves nothing of
it in memory. Between its commit and the moment at which the ranks that begin with it read it, they start, make their
process group and their model; meanwhile the disk is idle. The ranks verify what they read as ever: this changes where
their bytes come from, and nothing else.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from lastgasp._fs import open_regular
from lastgasp.arena import available

log = logging.getLogger("lastgasp.controller")

SHARE = 0.5
"""The part of a host's available memory up to which a checkpoint is read: more would push out what was read first."""
PIECE = 1 << 20
"""Bytes that are read at a time."""


class ReadAhead:
    """One per controller. Nobody waits for it, and what it cannot read the ranks read themselves.

    Args:
        room: bytes of memory that are available; None where that is not known.

    Attributes:
        thread: reads, or has read, the last one.
    """

    def __init__(self, room: Callable[[], int | None] = available) -> None:
        self._room, self._stop = room, threading.Event()
        self.thread: threading.Thread | None = None

    def begin(self, checkpoint: str, alone: bool) -> None:
        """Read that file, or all files in that directory, in the background. What is still being read is left.

        Args:
            alone: all ranks are on this host. Otherwise a directory is not read: most of it is for others.
        """
        self.stop()
        self._stop = threading.Event()
        arguments = (Path(checkpoint), alone, self._stop)
        self.thread = threading.Thread(target=self._run, args=arguments, name="lastgasp-ahead", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Let it end after the current piece, without waiting for it."""
        self._stop.set()

    def _run(self, checkpoint: Path, alone: bool, stop: threading.Event) -> None:
        try:
            inside = sorted(checkpoint.rglob("*")) if alone else []
            files = [path for path in (checkpoint, *inside) if path.is_file()]
            size, room = sum(path.stat().st_size for path in files), self._room()
            if room is None or size > SHARE * room:
                log.debug("%s is not read ahead: it has %d bytes, and %s are available", checkpoint, size, room)
                return
            with mmap.mmap(-1, PIECE) as buffer:
                for path in files:
                    _read(path, buffer, stop)
        except OSError as error:
            log.debug("%s is not read ahead: %s", checkpoint, error)


def _read(path: Path, buffer: mmap.mmap, stop: threading.Event) -> None:
    fd, offset = open_regular(path), 0
    try:
        while not stop.is_set() and (count := os.preadv(fd, [buffer], offset)):
            offset += count
    finally:
        os.close(fd)
