"""How the last recovery ended, for a launcher whose own ranks could not tell it: from the records of the job."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lastgasp.events import decode_incident
from lastgasp.gasp.signin import Entry

log = logging.getLogger("lastgasp.launch")

LIMIT = 5.0
"""Seconds that reading the records may take; a launcher that ends waits no longer for a file system."""
_LOOK_BACK = 20


@dataclass(frozen=True)
class LastWord:
    """What became of the last step; `ending` is empty where nobody knows (`events.Ending`)."""

    ending: str = ""
    step: int = -1
    directory: str = ""

    @property
    def safe(self) -> str:
        """For people: which step is safe; empty where that is not known."""
        if self.ending not in ("saved", "nothing_to_save") or self.step < 0:
            return ""
        return f"step {self.step} is safe in {self.directory}" if self.step else "no step was completed yet"


def last_word(entries: dict[int, Entry], job: str, attempt: int, led: str = "") -> LastWord:
    """The best of what the ranks of this host have told, the controller has (`led`), and the records say.

    Args:
        entries: of the ranks that have signed in.
        led: how the recovery ended, as the controller of this process says; empty without.
    """
    for ending in ("saved", "nothing_to_save"):
        for entry in entries.values():
            if entry.ending == ending and led in ("", ending):
                return LastWord(ending, entry.step, entry.directory)
    for directory in sorted({entry.directory for entry in entries.values()}):
        found = _within(LIMIT, directory, job, attempt)
        if found.ending:
            return found
    told = next((entry.ending for entry in entries.values() if entry.ending), "")
    return LastWord(led or told)


def _within(seconds: float, directory: str, job: str, attempt: int) -> LastWord:
    found: list[LastWord] = []
    thread = threading.Thread(
        target=lambda: found.append(_recorded(directory, job, attempt)), name="lastgasp-records", daemon=True
    )
    thread.start()
    thread.join(seconds)
    return found[0] if found else LastWord()


def _recorded(directory: str, job: str, attempt: int) -> LastWord:
    """From the newest record of this attempt."""
    try:
        paths = sorted(Path(directory, "incidents").glob("*.json"), reverse=True)[:_LOOK_BACK]
        for path in paths:
            incident = decode_incident(path.read_bytes())
            if (incident.job, incident.attempt) == (job, attempt) and incident.ending != "open":
                step = incident.step_saved
                return LastWord(incident.ending, -1 if step is None else step, directory)
    except (OSError, msgspec.DecodeError) as error:  # ValidationError is one
        log.debug("the records of %s cannot be read: %s", directory, error)
    return LastWord()
