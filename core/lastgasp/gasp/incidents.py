"""The incident records of one job: what is put into them, when, and by whom they are written."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from lastgasp import _clock
from lastgasp.events import Incident, encode_incident
from lastgasp.narration import Tally

from . import messages as m
from .actions import RecordPhase
from .attempt import Attempt, record_path, write_record
from .ends import kind_of_end
from .notes import add_note
from .records import RecordWriter

log = logging.getLogger("lastgasp.controller")

EXPLAIN_FOR = 10.0
"""Seconds after a recovery in which the kernel is asked how the dead processes ended."""


class Incidents:
    """Keeps the record of the attempt that runs, and of the one before until the job has recovered from it.

    Nothing here waits for a disk: `records` writes, after `flush`.

    Attributes:
        current, previous: the attempt that runs, and the one before it.
        tally: of the whole job.
    """

    def __init__(self, records: RecordWriter) -> None:
        self._records = records
        self.current: Attempt | None = None
        self.previous: Attempt | None = None
        self._held_before = 0
        self.tally = Tally()
        self._unexplained = set[int]()
        self._changed: dict[str, tuple[Incident, Path]] = {}

    def begin(self, hello: m.Hello) -> Attempt:
        """Another attempt, made by the first rank that joins it."""
        self.previous, self.current = self.current, Attempt.of(hello)
        if self.previous is not None and self.previous.incident is not None:
            self._held_before = self.previous.newest_held
            self.previous.incident.phases.restarted = _clock.wall_ns()
            self._write(self.previous)
        return self.current

    def phase(self, note: RecordPhase) -> None:
        """A phase of the recovery began; the record is written with the last one."""
        assert self.current is not None
        self.current.note(note)
        if note.phase == "released":
            self._unexplained = {fault.rank for fault in self.current.machine.faults if fault.kind == "killed"}
            self._write(self.current)

    def reached(self, step: int) -> None:
        """A rank has completed `step`: the first new one is the last thing that the incident before waits for."""
        self.tally.reached(step)
        previous = self.previous
        if previous is None or previous.incident is None or previous.incident.phases.first_step is not None:
            return
        if step > self._held_before and self.current is not None and self.current.progressed:
            previous.incident.phases.first_step = _clock.wall_ns()
            self.tally.went_on(previous.incident)
            self._write(previous)

    def note(self, text: str) -> None:
        """Keep what a rank has to say, with the incident that it belongs to.

        That is the recovery which is on, or has just ended; else the one that this attempt answers; else the next.
        """
        current, previous = self.current, self.previous
        if current is None:
            return
        answers = current.incident is None and previous is not None and previous.incident is not None
        owner = previous if answers else current
        assert owner is not None
        if kept := add_note(owner.notes, text):
            log.warning("note: %s", kept)
            if owner.incident is not None and owner.over_since is not None:
                self._write(owner)

    def explain(self, status_of: Callable[[int], str]) -> None:
        """Ask how the dead ended: the kernel knows once a process has freed its memory and is a zombie."""
        current = self.current
        over = current.over_since if current is not None else None
        if current is None or over is None or _clock.monotonic() - over > EXPLAIN_FOR:
            return
        for rank in list(self._unexplained):
            if status := status_of(rank):
                self._unexplained.discard(rank)
                self.add_cause(current, rank, status)

    def stood_at(self, rank: int, step: int) -> None:
        """The launcher of its host tells which step a dead rank had completed."""
        current = self.current
        if current is not None and current.machine.stood_at(rank, step):
            self._again(current)
            self.flush()

    def add_cause(self, attempt: Attempt, rank: int, status: str) -> None:
        """How the process of `rank` ended; also after the record was written."""
        faults = attempt.machine.faults
        for i, fault in enumerate(faults):
            if fault.rank == rank and fault.kind == "killed" and status not in fault.cause:
                kind, cause = kind_of_end(status), f"{fault.cause}, {status}"
                faults[i] = msgspec.structs.replace(fault, kind=kind, cause=cause)
                self._again(attempt)

    def _again(self, attempt: Attempt) -> None:
        """More is known than was written."""
        if attempt.incident is not None and attempt.over_since is not None:
            attempt.refresh()
            self._write(attempt)

    def flush(self) -> None:
        """Hand what has changed to the thread that writes; after the orders that went with it."""
        while self._changed:
            incident, directory = self._changed.popitem()[1]
            path, data = record_path(incident, directory), encode_incident(incident)
            self._records.put(f"the incident {path}", functools.partial(write_record, path, data))

    def _write(self, attempt: Attempt) -> None:
        assert attempt.incident is not None
        self._changed[attempt.incident.id] = (attempt.incident, Path(attempt.hello.directory))
