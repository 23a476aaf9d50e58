"""How the last recovery ended, from the job's records, for a launcher whose own ranks could not report it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from lastgasp.events import decode_incident
from lastgasp.gasp.signin import Entry

log = logging.getLogger("lastgasp.launch")

LIMIT = 5.0
"""Seconds for reading the records; an exiting launcher does not wait longer for a file system."""
_LOOK_BACK = 20


@dataclass(frozen=True)
class LastWord:
    """What became of the last step; `ending` is empty if unknown (`events.Ending`)."""

    ending: str = ""
    step: int = -1
    directory: str = ""

    @property
    def safe(self) -> str:
        """A text about which step is safe; empty if unknown."""
        if self.ending not in ("saved", "nothing_to_save") or self.step < 0:
            return ""
        return f"step {self.step} is safe in {self.directory}" if self.step else "no step was completed yet"


def last_word(entries: dict[int, Entry], job: str, attempt: int, led: str = "", since_ns: int = 0) -> LastWord:
    """Return the best information from the ranks of this host, the controller (`led`) and the records.

    Args:
        entries: those of the ranks that have signed in.
        led: how the recovery ended according to this process's controller; empty without one.
        since_ns: when the job began; records from before are those of an earlier job of this name.
    """
    for ending in ("saved", "nothing_to_save"):
        for entry in entries.values():
            if entry.ending == ending and led in ("", ending):
                return LastWord(ending, entry.step, entry.directory)
    for directory in sorted({entry.directory for entry in entries.values()}):
        found = _within(LIMIT, partial(_recorded, directory, job, attempt, since_ns))
        if found.ending:
            return found
    told = next((entry.ending for entry in entries.values() if entry.ending), "")
    return LastWord(led or told)


def _within(seconds: float, look: Callable[[], LastWord]) -> LastWord:
    found: list[LastWord] = []
    thread = threading.Thread(target=lambda: found.append(look()), name="lastgasp-records", daemon=True)
    with contextlib.suppress(RuntimeError):  # a limit of processes is reached
        thread.start()
        thread.join(seconds)
    return found[0] if found else LastWord()


def _recorded(directory: str, job: str, attempt: int, since_ns: int) -> LastWord:
    """From the newest record of this attempt."""
    try:
        paths = sorted(Path(directory, "incidents").glob("*.json"), reverse=True)[:_LOOK_BACK]
        for path in paths:
            incident = decode_incident(path.read_bytes())
            own = (incident.job, incident.attempt) == (job, attempt) and (incident.phases.detected or 0) >= since_ns
            if own and incident.ending != "open":
                step, ending = incident.step_saved, incident.ending
                ending = "saved" if ending == "in_place" and incident.files else ending  # written before it went on
                return LastWord(ending, -1 if step is None else step, directory)
    except (OSError, msgspec.DecodeError) as error:  # ValidationError is one
        log.debug("the records of %s cannot be read: %s", directory, error)
    return LastWord()
