"""Whether the host of a launcher that comes back has the directory of the job, and not one of its own in its place.

At a start the ranks find that out themselves (`sharing.require_shared`). One that is taken in gets the state from
others in memory, and would look at the directory when its first fault is to be saved.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path

from lastgasp import _clock
from lastgasp._fs import unique_temp, write_atomically
from lastgasp.sharing import SEEN_WITHIN, sees

log = logging.getLogger("lastgasp.launch")

RENEW = 600.0
"""Seconds after which the file is written again: one that nobody writes counts as a remnant, and may be removed."""
AGAIN = 60.0
"""Seconds after which it is tried again where it could not be written."""
LIMIT = 2.0
"""Seconds to remove it, and for a file system to answer after `SEEN_WITHIN`."""


class Marker:
    """A file in the directory of the job by which other hosts know it, until `remove`. Waits on a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._path = directory, unique_temp(directory / "shared")
        self._written, self._over, self._told = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._keep, name="lastgasp-marker", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Of the file; empty as long as there is none."""
        return self._path.name if self._written.is_set() else ""

    def _keep(self) -> None:
        while not self._over.wait(self._write()):
            pass
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _write(self) -> float:
        """Returns the seconds until it is to be called again."""
        try:
            write_atomically(self._path, b"is this directory shared?\n")
        except OSError as error:
            log.log(logging.DEBUG if self._told else logging.WARNING,
                    "no lost host can be taken in without a restart now: %s", error)  # fmt: skip
            self._told = True
            return AGAIN
        self._written.set()
        self._told = False
        return RENEW

    def remove(self) -> None:
        """Idempotent."""
        self._over.set()
        self._thread.join(LIMIT)


class Look:
    """Whether this host sees the marker; found out on a thread of its own, within `SEEN_WITHIN`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._begun, self._found = _clock.monotonic(), list[bool]()
        threading.Thread(target=self._look, name="lastgasp-look", daemon=True).start()

    def _look(self) -> None:
        self._found.append(sees(self._directory, self._name))

    @property
    def sees(self) -> bool:
        """It does."""
        return self._found == [True]

    @property
    def blind(self) -> str:
        """Why it has to be taken for another directory; empty where it is the same, or as long as that is open."""
        late = _clock.monotonic() > self._begun + SEEN_WITHIN + LIMIT
        if self.sees or not (self._found or late):
            return ""
        if not self._found:
            return f"{self._directory} does not answer. Start this launcher again once it does"
        return (f"{self._directory} is not the directory that the job's other hosts have: what they wrote there was "
                f"not seen in {SEEN_WITHIN:g} s. Mount it, and start this launcher again")  # fmt: skip
