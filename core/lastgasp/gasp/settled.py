"""Find what the controller's side has already saved, for a rank that was cut off from it and recovers on its own."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lastgasp._fs import read_bounded
from lastgasp.events import Incident, decode_incident

log = logging.getLogger("lastgasp")

LOOK_BACK = 50
"""Records that are read, newest first."""
LONGEST = 64 << 20
"""Bytes of a record."""


@dataclass(frozen=True)
class SavedElsewhere:
    """Reads the incident records of a job: the controller writes one as soon as it has committed.

    Args:
        directory: of the checkpoints; job, attempt: this rank's.
        since_s: when the job's controller started, by its own clock, which also stamps the records; earlier ones belong
            to other jobs of that name. None if there never was a controller.
    """

    directory: Path
    job: str
    attempt: int
    since_s: int | None

    def look(self, step: int) -> tuple[int, str] | None:
        """Step and path of the checkpoint of `step`, or of a later one, that the controller of this attempt has
        committed; None if there is none."""
        if self.since_s is None:
            return None
        try:
            records = sorted((self.directory / "incidents").glob("*.json"), reverse=True)[:LOOK_BACK]
        except OSError:
            return None
        fitting = (found for found in map(_read, records) if found is not None and self._fits(found, step))
        return next(((found.step_saved or 0, found.files[0]) for found in fitting), None)

    def _fits(self, found: Incident, step: int) -> bool:
        same = (found.job, found.attempt, found.ending) == (self.job, self.attempt, "saved") and bool(found.files)
        released = found.phases.released or 0
        of_this_run = released >= (self.since_s or 0) * 1_000_000_000
        led = not found.led_by.startswith("rank ")  # another uncoordinated rank knows no more than this one
        return same and of_this_run and led and (found.step_saved if found.step_saved is not None else -1) >= step


def _read(path: Path) -> Incident | None:
    try:
        return decode_incident(read_bounded(path, LONGEST))
    except (OSError, msgspec.DecodeError) as error:
        log.debug("%s: %s", path, error)
        return None
