"""An incident's phases as spans on a scale where milliseconds and restarts of seconds can both be read.

Pure: the table and the picture are made of what is computed here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import msgspec

from lastgasp.events import Fault, Incident, Phases
from lastgasp.narration import STARTING

Group = Literal["notice", "agree", "write", "commit", "restart"]

# What happens between the moment of one phase and the next one that is known.
_ACTIVITY: dict[str, tuple[str, Group]] = {
    "fault": ("notice", "notice"),
    "detected": ("agree", "agree"),
    "agreed": ("prepare", "agree"),
    "first_byte": ("write", "write"),
    "saved": ("commit", "commit"),
    "committed": ("release", "commit"),
    "released": ("restart", "restart"),
    "restarted": ("load, first step", "restart"),
}
_IN_PLACE: dict[str, tuple[str, Group]] = {
    "released": ("leave, join again", "restart"),
    "restarted": ("state, first step", "restart"),
}
"""What happens instead where the fault was answered in place."""
_NARROWEST = 1.0
"""Width of a span of no length, where ten times the duration is one more."""


@dataclass(frozen=True)
class Moment:
    """When one phase began, in ms after the first one that is known."""

    phase: str
    at_ms: float


@dataclass(frozen=True)
class Span:
    """What happened between two moments, in ms after the first."""

    activity: str
    group: Group
    begin_ms: float
    end_ms: float

    @property
    def ms(self) -> float:
        """How long it took."""
        return self.end_ms - self.begin_ms


def moments(phases: Phases) -> list[Moment]:
    """The phases that are known, in the order of their meaning.

    Times come from clocks of several processes; one that lies before its forerunner is moved up to it.
    """
    known = [(name, time) for name, time in msgspec.structs.asdict(phases).items() if time is not None]
    found: list[Moment] = []
    for name, time in known:
        at = (time - known[0][1]) / 1e6
        found.append(Moment(name, max(at, found[-1].at_ms if found else 0.0)))
    return found


def spans(phases: Phases, in_place: bool = False) -> list[Span]:
    """What happened between the known moments, without gaps."""
    known, activity = moments(phases), _ACTIVITY | (_IN_PLACE if in_place else {})
    return [Span(*activity[begin.phase], begin.at_ms, end.at_ms) for begin, end in pairwise(known)]


def shown(phase: str, incident: Incident) -> str:
    """A phase for people: in place nothing is restarted."""
    return "joined again" if incident.rung and phase == "restarted" else phase.replace("_", " ")


def rung(incident: Incident) -> str:
    """By which rung the fault was answered in place, or why it was not; empty where the job asked for neither."""
    if incident.rung:
        return f"in place: {incident.rung}"
    return f"not in place: {incident.not_in_place}" if incident.not_in_place else ""


def duration(ms: float) -> str:
    """For people: `0.4 ms`, `12 ms`, `3.21 s`, `4 min 05 s`."""
    if ms < 10:
        return f"{ms:.1f} ms"
    if ms < 1000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{ms / 1000:.2f} s"
    minutes, seconds = divmod(round(ms / 1000), 60)
    return f"{minutes} min {seconds:02d} s"


class Scale:
    """Maps times to positions: each span gets a width that grows with the logarithm of its duration.

    Args:
        parts: spans that follow each other; an empty list maps everything to 0.
    """

    def __init__(self, parts: list[Span]) -> None:
        self._times = [parts[0].begin_ms] if parts else [0.0]
        self._places = [0.0]
        for part in parts:
            self._times.append(part.end_ms)
            self._places.append(self._places[-1] + _NARROWEST + math.log10(1 + part.ms))

    @property
    def end(self) -> float:
        """Position of the last moment."""
        return self._places[-1]

    @property
    def edges(self) -> list[float]:
        """Position of each moment; two moments of one time have different positions."""
        return list(self._places)

    def place(self, at_ms: float) -> float:
        """Position of a time; outside of all spans that of the nearest end."""
        after = bisect_right(self._times, at_ms)
        if after == 0:
            return 0.0
        if after == len(self._times):
            return self.end
        begin, end = self._times[after - 1], self._times[after]
        low, high = self._places[after - 1], self._places[after]
        return low + (high - low) * (at_ms - begin) / (end - begin)


def headline(incident: Incident) -> str:
    """One sentence: which rank failed where, and the result."""
    if incident.rung == "grow":
        return f"ranks that were missing were taken in: {outcome(incident)}"
    # A collective that failed on a peer is how the others saw it, not what went wrong.
    causes = [fault for fault in incident.faults if fault.kind != "peer"] or incident.faults
    first = causes[0] if causes else None
    who = f"rank {first.rank} {_verb(first)}" if first else "no fault was recorded"
    more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    return f"{who}{more}: {outcome(incident)}"


def _verb(fault: Fault) -> str:
    """Without a step it had not begun to train."""
    if fault.step >= 0 or fault.kind not in STARTING:
        return _VERB[fault.kind]
    return f"{STARTING[fault.kind]} while it was starting"


_VERB = {
    "killed": "was killed",
    "exception": "raised an exception",
    "exit": "ended in the middle of training",
    "sigterm": "was asked to stop",
    "interrupt": "was interrupted",
    "hang": "hung",
    "lost": "was lost",
    "peer": "saw a collective fail",
}


def outcome(incident: Incident) -> str:
    """What came of it: saved, by whom, and how many steps are lost."""
    lost = "" if incident.steps_lost is None else f", {incident.steps_lost} steps lost"
    if incident.ending == "saved":
        savers = ", ".join(str(rank) for rank in incident.savers) or "?"
        return f"step {incident.step_saved} saved by rank {savers}{lost}"
    if incident.ending == "in_place":
        where = "on disk" if incident.from_files else "held in memory"
        how = "done" if incident.rung == "grow" else "answered"
        return f"step {incident.step_saved} {where}{lost}, {how} in place ({incident.rung})"
    if incident.ending == "in_arenas":
        return f"step {incident.step_saved} left in arenas, and gone on with{lost}"
    if incident.ending == "nothing_to_save" and incident.reason:
        return f"nothing to save, {incident.reason}"
    words = {"nothing_to_save": "nothing to save", "gave_up": "gave up", "open": "not ended"}
    return f"{words[incident.ending]}{lost}"
