"""The file by which `lastgasp ps` finds the job, written by the thread for records so that nobody waits for a disk."""

from __future__ import annotations

from .records import RecordWriter
from .rundir import Announcement


class Announced:
    """From the controller's start to its end.

    Args:
        records: writes the file.
        token: the job's secret; started_s: wall-clock seconds.
    """

    def __init__(self, records: RecordWriter, token: str, started_s: int) -> None:
        self._records, self._token, self._started_s = records, token, started_s
        self._file: Announcement | None = None

    def begin(self, address: str) -> None:
        """Write it; the job has no name yet."""
        self._records.put("the file for lastgasp ps", lambda: self._write(address))

    def _write(self, address: str) -> None:
        self._file = Announcement(address, self._token, self._started_s)

    def tell(self, job: str, directory: str) -> None:
        """Add the name of the job and its directory."""
        self._records.put("the job's name for lastgasp ps", lambda: self._tell(job, directory))

    def _tell(self, job: str, directory: str) -> None:
        if self._file is not None:
            self._file.tell(job, directory)

    def withdraw(self) -> None:
        """Remove it."""
        self._records.put("the end of the file for lastgasp ps", self._remove)

    def _remove(self) -> None:
        if self._file is not None:
            self._file.withdraw()
