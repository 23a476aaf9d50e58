"""The incident records of one job: their contents and when they are written."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from lastgasp import _clock, narration
from lastgasp.events import Incident, encode_incident
from lastgasp.narration import Tally

from . import messages as m
from .actions import RecordPhase, WentOn
from .again import NOT_REPLACED
from .attempt import Attempt
from .auxiliary import RankBuffers
from .ends import kind_of_end
from .ladder import Ladder
from .notes import add_note
from .records import RecordWriter, record_path, write_record
from .repeats import Repeats

log = logging.getLogger("lastgasp.controller")

EXPLAIN_FOR = 10.0
"""Seconds after a recovery during which the kernel is asked how the dead processes ended."""
NOBODY = "this recovery in place failed: no rank came back from it, and the job restarted"


ELSEWHERE = (
    "step {step} was saved in {before}, but the restarted script has its checkpoints in {now} and went on from "
    "step {begun}: it does not see what it has saved. Give it the same directory at each start, without a time or a "
    "process id in its name"
)


class Incidents:
    """Keeps the record of the current attempt, and the previous one's until the job has recovered from it.

    Nothing here waits for a disk: `records` writes in the background, after `flush`.

    Attributes:
        current, previous: the current attempt and the one before it.
        tally: counts over the job.
    """

    def __init__(self, records: RecordWriter) -> None:
        self._records = records
        self.current: Attempt | None = None
        self.previous: Attempt | None = None
        self._held_before = 0
        self._started = (-1, "")
        self.tally, self.before = Tally(), Repeats()
        self._unexplained = set[int]()
        self._changed: dict[str, tuple[Incident, Path]] = {}
        self._in_memory: Attempt | None = None
        """Whose step was last held in memory alone, until the launcher's next attempt has begun to train."""
        self._unsaved: Attempt | None = None
        """Whose step could not be saved, until an attempt has begun to train: it may begin with it, from arenas."""
        self._in_arenas: Attempt | None = None
        """Whose step the current attempt has begun with so."""
        self._directories = set[str]()
        """Of all trainings up to the previous attempt's last one."""
        self._no_step_since: list[Attempt] = []
        """Those before the previous one after whose faults no new step was completed before the next fault."""

    def begin(self, hello: m.Hello, buffers: RankBuffers | None = None) -> Attempt:
        """Start another attempt; called when its first rank joins."""
        if self.current is not None and (led := self.current.led_again(hello)) is not None:
            log.warning("%s", narration.event(led))
        if self.previous is not None and self.previous.recovers:
            self._no_step_since.append(self.previous)
        if self.current is not None:
            self._directories.add(self.current.hello.directory)
        self.previous, self.current = self.current, Attempt.of(hello, buffers)
        if self.previous is not None:
            self.current.learns(self.previous)
        if self.previous is not None and self.previous.again is not None:
            self._in_memory = self.previous
            if self.previous.hello.attempt != hello.attempt:
                add_note(self.previous.notes, NOBODY)
                self.refresh(self.previous)
        if self._in_arenas is not None:
            self._in_memory, self._in_arenas = self._in_arenas, None
        if self.previous is not None and self.previous.machine.outcome.ending == "gave_up" and self.previous.begun:
            self._unsaved = self.previous
        if self.previous is not None and self.previous.hello.attempt == hello.attempt:
            self.current.progressed_before = self.previous.progressed
            again = self.previous.again
            lost = again.lost if again is not None and not again.members else ()
            self.current.replaced = self.previous.replaced + lost
            self.current.enters_after(self.previous.again)
            self.current.training = 0 if self.previous.again is not None else self.previous.training + 1
        if self.current.training and self.previous is not None and self.previous.incident is not None:
            log.warning("%s; the script goes on", narration.event(self.previous.incident))  # it has handled that
            self.current.follows(self.previous.before)
            self.previous, self._no_step_since = None, []
        else:
            self.current.follows(self.previous.repeats if self.previous is not None else self.before)
        if self.previous is not None and self.previous.incident is not None:
            self._held_before = self.previous.newest_held
            self.previous.incident.phases.restarted = _clock.wall_ns()
            self._write(self.previous)
            self.started(*self._started)
        return self.current

    def started(self, attempt: int, how: str) -> None:
        """The launcher reports how it has started the ranks of an attempt, before or after the first of them joins."""
        self._started = (attempt, how)
        current, previous = self.current, self.previous
        if current is None or previous is None or previous.incident is None or current.hello.attempt != attempt:
            return
        previous.incident.restart = how
        self._write(previous)
        self.flush()

    def phase(self, note: RecordPhase) -> None:
        """Record the start of a phase; the last phase writes the record."""
        assert self.current is not None
        self.current.note(note)
        if note.phase == "released":
            self._unexplained = {fault.rank for fault in self.current.machine.faults if fault.kind == "killed"}
            self._write(self.current)
        if note.phase == "released" and self.current.again is not None and self.current.incident is not None:
            log.warning("%s", narration.event(self.current.incident))  # a launcher tells of restarts only

    def went_on(self, action: WentOn) -> None:
        """Another leader has repaired a fault in place: write the record; the attempt goes on as if none had been."""
        attempt = self.current
        if attempt is None or attempt.incident is None:
            return
        attempt.note(RecordPhase(phase="released"))
        attempt.incident.rung, attempt.replaced = "replace", attempt.replaced + action.replaced
        self._write(attempt)
        log.warning("%s", narration.event(attempt.incident))
        attempt.over_again()

    def reached(self, step: int) -> None:
        """Record that a rank completed `step`; the first new step completes the previous incident."""
        self.tally.reached(step)
        previous = self.previous
        if previous is None or not previous.recovers:
            return
        if step > self._held_before and self.current is not None and self.current.progressed_now:
            now, answered = _clock.wall_ns(), [*self._no_step_since, previous]
            self._no_step_since = []
            for attempt in answered:
                if attempt.incident is not None:
                    attempt.incident.phases.first_step = now
                    self.tally.went_on(attempt.incident)
                    self._write(attempt)

    def resumed(self, step: int, from_arena: bool = False) -> None:
        """A rank begins with `step`. After a recovery in place that failed, the first one shows what that has cost.

        Args:
            from_arena: with what was left in its arena.
        """
        unsaved, self._unsaved = self._unsaved, None
        if from_arena and unsaved is not None:
            self._found_in_arenas(unsaved, step)
        if self.current is not None and self.current.training:  # the one before has been trained to its end
            self._in_memory = self._in_arenas = None
        self._begins_elsewhere(step)
        held, current, previous = self._in_memory, self.current, self.previous
        if held is None or held.incident is None or current is None or current.hello.attempt == held.hello.attempt:
            return
        self._in_memory = None
        later = previous.incident.steps_lost or 0 if previous not in (None, held) and previous.incident else 0
        missing = (held.machine.outcome.step or 0) - step - later
        if missing > 0:
            out = held.machine.outcome
            out.lost = (out.lost or 0) + missing
            kept = add_note(held.notes, f"step {out.step} was held in memory alone, and went with the processes: "
                                        f"the job went on from step {step}")  # fmt: skip
            log.warning("note: %s", kept)
            self.refresh(held)
            self.flush()

    def _begins_elsewhere(self, step: int) -> None:
        """A script may name its directory after the time of its start, as Hydra does; then it never finds a save."""
        current, previous = self.current, self.previous
        if current is None or previous is None or previous.incident is None or current.training:
            return
        out, held, now = previous.machine.outcome, previous.newest_durable, current.hello.directory
        restarted = current.hello.attempt != previous.hello.attempt
        if not restarted or now in self._directories or step >= held:
            return
        self._directories.add(now)  # once
        out.lost = (out.lost or 0) + held - step
        before = previous.hello.directory
        text = ELSEWHERE.format(step=held, before=before, now=now, begun=step)
        log.warning("note: %s", add_note(previous.notes, text))
        self.refresh(previous)
        self.flush()

    def _found_in_arenas(self, unsaved: Attempt, step: int) -> None:
        """What nobody was left to save has not been lost with its ranks."""
        out = unsaved.machine.outcome
        out.ending, out.lost = "in_arenas", max(0, unsaved.newest_held + (out.lost or 0) - step)
        out.step, self._in_arenas = step, unsaved
        log.warning("step %d was left in arenas, in memory that launchers keep: training goes on with it", step)
        self.refresh(unsaved)
        self.flush()

    def note(self, text: str) -> None:
        """Add a rank's note to the incident that it belongs to.

        That is the current or just ended recovery; else the incident that led to this attempt; else the next one.
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
        """Ask how dead processes ended: the kernel knows once a process has freed its memory and is a zombie."""
        current = self.current
        over = current.over_since if current is not None else None
        if current is None or over is None or _clock.monotonic() - over > EXPLAIN_FOR:
            return
        for rank in list(self._unexplained):
            if status := status_of(rank):
                self._unexplained.discard(rank)
                self.add_cause(current, rank, status)

    def died_at(self, rank: int, step: int) -> None:
        """Record the step a dead rank had completed, as reported by its host's launcher."""
        current = self.current
        if current is not None and current.machine.died_at(rank, step):
            self.refresh(current)
            self.flush()

    def add_cause(self, attempt: Attempt, rank: int, status: str) -> None:
        """Record how the process of `rank` ended, even after the record was written."""
        faults = attempt.machine.faults
        for i, fault in enumerate(faults):
            if fault.rank == rank and fault.kind == "killed" and status not in fault.cause:
                kind, cause = kind_of_end(status), f"{fault.cause}, {status}"
                faults[i] = msgspec.structs.replace(fault, kind=kind, cause=cause)
                if isinstance(attempt.machine, Ladder) and status.startswith(NOT_REPLACED):
                    attempt.machine.not_in_place = status
                self.refresh(attempt)

    def refresh(self, attempt: Attempt) -> None:
        """Mark the record for rewriting: more is known than was written."""
        if attempt.incident is not None and attempt.over_since is not None:
            attempt.refresh()
            self._write(attempt)

    def flush(self) -> None:
        """Hand changed records to the writer thread, after the orders have been sent."""
        while self._changed:
            incident, directory = self._changed.popitem()[1]
            path, data = record_path(incident, directory), encode_incident(incident)
            self._records.put(f"the incident {path}", functools.partial(write_record, path, data))

    def _write(self, attempt: Attempt) -> None:
        assert attempt.incident is not None
        self._changed[attempt.incident.id] = (attempt.incident, Path(attempt.hello.directory))
