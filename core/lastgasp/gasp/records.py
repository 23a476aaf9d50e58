"""The records of incidents; they are written in the background, so that no caller waits for a slow disk."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from lastgasp import _clock, _fs
from lastgasp.events import Incident, encode_incident

log = logging.getLogger("lastgasp.controller")

LOOK = 0.002
"""Seconds between two looks whether all is written."""
STALLED = 30.0
"""Seconds that one write may take before a warning."""


class RecordWriter:
    """Writes in the order of `put`, in a thread that starts with the first one.

    A file system may stall for minutes without delaying callers of `put`. The queue is bounded, because a write
    replaces a pending one of the same name.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Callable[[], None]] = {}
        self._writing, self._since = "", 0.0
        self._closed = self._warned = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, name: str, write: Callable[[], None]) -> None:
        """Queue a call of `write`; `name` describes for people what it writes. No effect once closed."""
        with self._changed:
            if self._closed:
                return
            self._waiting[name] = write
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="lastgasp-records", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # a limit of processes is reached
                    log.warning("%s waits to be written until the next one is: %s", name, error)
                else:
                    self._thread = thread
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether everything has been written or has failed."""
        with self._changed:
            return self._idle()

    def settle(self, seconds: float) -> bool:
        """Wait until everything has been written, for `seconds` at most; return whether it has."""
        with self._changed:
            return self._changed.wait_for(self._idle, seconds)

    async def written(self, seconds: float) -> None:
        """As `settle`, on an event loop."""
        deadline = _clock.monotonic() + seconds
        while not self.idle and _clock.monotonic() < deadline:  # noqa: ASYNC110 (a thread writes)
            await asyncio.sleep(LOOK)

    def look(self) -> None:
        """Warn once when a write hangs, without waiting for it."""
        if self._writing and not self._warned and _clock.monotonic() - self._since > STALLED:
            self._warned = True
            log.warning("%s has not been written for %g s: the file system stalls; the job continues", self._writing,
                        STALLED)  # fmt: skip

    def close(self) -> None:
        """Let the thread end after the pending writes, without waiting for it. Logs what is not written yet."""
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
            except Exception as error:  # only the record is lost
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


def record_path(incident: Incident, directory: Path) -> Path:
    """The path of an incident's record."""
    return directory / "incidents" / f"{incident.id}.json"


def write_record(path: Path, data: bytes) -> None:
    """Write one encoded record, atomically."""
    _make_folder(path.parent)
    _fs.write_atomically(path, data)


def _make_folder(folder: Path) -> None:
    """Make the folder of the records; it is theirs who own the checkpoints, though a launcher of root's makes it."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return
    with contextlib.suppress(OSError):
        above = folder.parent.stat()
        made = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)  # no link put in its place
        try:
            if os.fstat(made).st_uid == os.geteuid() != above.st_uid:
                os.fchmod(made, stat.S_IMODE(above.st_mode))
                os.fchown(made, above.st_uid, above.st_gid)
        finally:
            os.close(made)


def write_incident(incident: Incident, directory: Path) -> Path:
    """Write `<directory>/incidents/<id>.json`, atomically."""
    path = record_path(incident, directory)
    write_record(path, encode_incident(incident))
    return path
