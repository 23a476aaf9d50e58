"""The hang watchdog: finds ranks without progress and which of them are to blame. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from . import messages as m

FLOOR = 60.0
"""Seconds; the least that "auto" ever waits."""
UNLEARNT = 1800.0
"""Seconds; what "auto" waits before it has seen enough progress (compilation, first data)."""
OUTSIDE_FLOOR = 600.0
"""Seconds; the least that "auto" waits outside a step, where epochs end and loggers upload."""
FACTOR = 10.0
LEARNT_AFTER = 20
SILENT = 5.0
"""Seconds without a heartbeat after which a stalled rank counts as the culprit."""
SUSPENDED = 2.0
"""A gap of so many seconds between two checks means that the watchdog was stopped (laptop lid, Ctrl-Z, debugger)."""

# A rank that waits for others is in backward (or in a collective of validation or a save); the others wait for
# one that is stuck elsewhere.
_IN_STEP: frozenset[str] = frozenset({"forward", "backward", "update"})
_WAITING: frozenset[str] = frozenset({"backward"})


@dataclass
class _Track:
    tick: int = -1
    step: int = -1
    phase: str = "start"
    moved: float = 0.0
    heard: float = 0.0
    longest: float = 0.0
    gaps: int = 0


@dataclass
class Progress:
    """Learns how long the job usually goes without progress, and detects when it takes too long.

    Args:
        limit: seconds without any progress; 0 learns it.

    Attributes:
        step_takes: seconds from the step before the newest one that is known to that; 0 as long as it is not known.
    """

    limit: float
    step_takes: float = 0.0
    _newest: tuple[int, float] | None = None
    """The newest step that a heartbeat has told of, and when."""
    _tracks: dict[int, _Track] = field(default_factory=dict)
    _by_heard: OrderedDict[int, _Track] = field(default_factory=OrderedDict)
    """The same, ordered by the time of the last heartbeat, oldest first."""
    _started: int = 0
    """Ranks that are past their start."""
    _witness: _Track | None = None
    """A rank whose progress proves that the job does not hang; while it does, the others need no check."""
    _looked: float | None = None

    def joined(self, rank: int, now: float) -> None:
        """Watch this rank."""
        self.left(rank)
        self._tracks[rank] = self._by_heard[rank] = _Track(moved=now, heard=now)

    def left(self, rank: int) -> None:
        """Stop watching it."""
        track = self._tracks.pop(rank, None)
        self._by_heard.pop(rank, None)
        if track is not None:
            self._started -= track.phase != "start"
            self._witness = None if track is self._witness else self._witness

    def heard(self, rank: int, status: m.Status, now: float) -> None:
        """A heartbeat, with or without progress in it."""
        track = self._tracks.get(rank)
        if track is None:
            return
        self._started += (status.phase != "start") - (track.phase != "start")
        track.heard, track.phase, track.step = now, status.phase, status.step
        before, self._newest = self._newest, max(self._newest or (-1, now), (status.step, now), key=lambda one: one[0])
        if before is not None and self._newest[0] > before[0]:
            self.step_takes = (now - before[1]) / (self._newest[0] - before[0])
        self._by_heard.move_to_end(rank)
        if status.tick != track.tick:
            # Gaps that accumulated while the watchdog was stopped say nothing about the job.
            if track.tick >= 0 and not self._away(now):
                track.longest, track.gaps = max(track.longest, now - track.moved), track.gaps + 1
            track.tick, track.moved = status.tick, now

    def allowed(self, rank: int) -> float:
        """Seconds that this rank may currently go without progress."""
        return self._allowed(self._tracks[rank])

    def _allowed(self, track: _Track) -> float:
        if self.limit > 0:
            return self.limit
        if track.gaps < LEARNT_AFTER:
            return UNLEARNT
        floor = FLOOR if track.phase in _IN_STEP else OUTSIDE_FLOOR
        return max(floor, FACTOR * track.longest)

    def silent(self, now: float, stopped: frozenset[int]) -> frozenset[int]:
        """Ranks without a heartbeat for as long as the job may go without progress; 0.5 s is usual.

        A rank whose process is not stopped gets at least a minute: its save may hold the GIL.
        """
        if self.was_suspended(now):
            return frozenset()
        limit, found = max(self.limit or FLOOR, SILENT), set[int]()
        for rank, track in self._by_heard.items():
            if now - track.heard <= limit:
                break  # so are all behind it
            if now - track.heard > (limit if rank in stopped else max(limit, FLOOR)):
                found.add(rank)
        return frozenset(found)

    def standing_still(self, now: float, stopped: frozenset[int], limit: float) -> frozenset[int]:
        """Ranks that have been stopped for `limit` seconds; or have said nothing for much longer, as on another host.

        What a start does may hold the GIL for minutes, and with it the heartbeats.
        """
        if self.was_suspended(now):
            return frozenset()
        longest, found = max(limit, self.limit, OUTSIDE_FLOOR), set[int]()
        for rank, track in self._by_heard.items():
            if now - track.heard <= limit:
                break  # so are all behind it
            if rank in stopped or now - track.heard > longest:
                found.add(rank)
        return frozenset(found)

    def hung(self, now: float, stopped: frozenset[int]) -> frozenset[int]:
        """The culprits, once no rank has made progress for too long; all ranks when none stands out."""
        if self.was_suspended(now) or not self._started or self._in_time(self._witness, now):
            return frozenset()
        started = {r: t for r, t in self._tracks.items() if t.phase != "start"}
        self._witness = max(started.values(), key=lambda track: track.moved + self._allowed(track))
        if self._in_time(self._witness, now):
            return frozenset()
        everybody = frozenset(self._tracks)
        # A rank that was stopped before its first heartbeat of training is to blame like any other.
        halted = stopped & everybody
        return halted if halted and halted < everybody else self._culprits(started, now) or everybody

    def _in_time(self, track: _Track | None, now: float) -> bool:
        return track is not None and track.phase != "start" and now - track.moved < self._allowed(track)

    def describe(self, rank: int, now: float) -> str:
        """One line for the incident."""
        track = self._tracks[rank]
        silent = f", no heartbeat for {now - track.heard:.1f} s" if now - track.heard > SILENT else ""
        return f"no progress for {now - track.moved:.1f} s in {track.phase} after step {track.step}{silent}"

    def _away(self, now: float) -> bool:
        return self._looked is not None and now - self._looked >= SUSPENDED

    def was_suspended(self, now: float) -> bool:
        """Whether nobody has looked for a while: what seemed to stand still then says nothing."""
        away, self._looked = self._away(now), now
        if not away:
            return False
        for track in self._tracks.values():
            track.moved = track.heard = now
        return True

    @staticmethod
    def _culprits(tracks: dict[int, _Track], now: float) -> frozenset[int]:
        """Silent processes, else those not waiting for a peer; empty if that would be all ranks."""
        everybody = frozenset(tracks)
        for suspects in (
            frozenset(r for r, t in tracks.items() if now - t.heard > SILENT),
            frozenset(r for r, t in tracks.items() if t.phase not in _WAITING),
        ):
            if suspects and suspects < everybody:
                return suspects
        return frozenset()
