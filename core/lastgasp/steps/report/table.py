"""One rank's steps as numbers: compact columns in bounded memory, oldest first."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

import msgspec

STEPS_MAX = 100_000
"""Steps kept per rank, 13 MB. Beyond it the older half is thinned to half or less, evenly over all that it spans:
chosen by a hash of the number, so that all ranks keep the same ones and no period (a save every 100 steps) is hit."""
LEVEL_MAX = 31
"""Of thinning: one of so many steps, as a power of two, is kept."""
COLLECTIVES_MAX = 500_000
"""Collectives kept per rank, 10 MB. Beyond it the older half goes."""
SAVES_MAX = 20_000
"""Saves kept per rank, 3 MB; beyond it the older half goes."""
ALL_STEPS_MAX = 1_000_000
"""Steps of all ranks together: with more than ten ranks each keeps less, down to `STEPS_MIN`."""
STEPS_MIN = 500

TIMES = (
    "time", "period", "data", "forward", "backward", "optimizer", "save", "communication", "forward_own",
    "backward_own",
)  # fmt: skip
"""Columns in seconds; see `Step`."""
_WHOLE = ("number", "begin", "end", "nth", "first", "count")
_KNUTH = 2654435761


class Step(msgspec.Struct, gc=False):
    """One step of one rank. Times in seconds; `begin` and `end` in ns since the epoch, on the host.

    Attributes:
        nth: how many steps this process has made with this one; small for the first ones after a start.
        time: of the step's range; on the device where its rows are there.
        period: from the end of the step before to the end of this one; `time` where there is none before.
        data, forward, backward, optimizer, save, communication: covered by ranges of that kind.
        forward_own: `forward` without the collectives in it.
        backward_own: `backward` without the waits for collectives in it; NaN where none is in it.
    """

    number: int
    begin: int
    end: int
    nth: int = 0
    time: float = 0.0
    period: float = 0.0
    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    save: float = 0.0
    communication: float = 0.0
    forward_own: float = 0.0
    backward_own: float = math.nan


Collective = tuple[int, int, float]
"""Kind (an index that all ranks share), begin (ns since the epoch), seconds."""
Save = tuple[int, int, float]
"""Step, begin (ns since the epoch), seconds."""


class StepTable:
    """The steps of one rank. A step that was made again after a resume counts once: the later one.

    Attributes:
        undone: steps that were made again.
        earlier: the same where it began with its first step again: perhaps another training, in the same process.
        thinned: steps left out to bound memory.
        seen: steps taken in, with those.
    """

    def __init__(self, steps_max: int = STEPS_MAX, collectives_max: int = COLLECTIVES_MAX) -> None:
        self._steps_max, self._collectives_max = steps_max, collectives_max
        self._whole = {name: array("q") for name in _WHOLE}
        self._times = {name: array("d") for name in TIMES}
        self._kinds, self._begins, self._lengths = array("q"), array("q"), array("d")
        self._saves: list[Save] = []
        self.undone = self.earlier = self.thinned = self.seen = 0

    def __len__(self) -> int:
        return len(self._whole["number"])

    @property
    def numbers(self) -> Sequence[int]:
        """Step numbers, rising."""
        return self._whole["number"]

    @property
    def begins(self) -> Sequence[int]:
        """When each began, ns since the epoch."""
        return self._whole["begin"]

    @property
    def ends(self) -> Sequence[int]:
        """When each ended, ns since the epoch."""
        return self._whole["end"]

    @property
    def nths(self) -> Sequence[int]:
        """How many steps its process had made with each."""
        return self._whole["nth"]

    def newest_process(self) -> int:
        """Place of its first step; 0 where all steps are of one process."""
        nths = self.nths
        return next((at for at in range(len(nths) - 1, 0, -1) if nths[at - 1] >= nths[at]), 0)

    def times(self, column: str) -> Sequence[float]:
        """One of `TIMES`, seconds per step."""
        return self._times[column]

    def collectives(self, place: int) -> list[Collective]:
        """Those of the step at `place`, by their begin."""
        first = self._whole["first"][place]
        last = first + self._whole["count"][place]
        return sorted(
            zip(self._kinds[first:last], self._begins[first:last], self._lengths[first:last], strict=True),
            key=lambda item: item[1],
        )

    def collective_count(self, place: int) -> int:
        """How many there are of the step at `place`."""
        return self._whole["count"][place]

    @property
    def saves(self) -> Sequence[Save]:
        """All saves, in the order in which they came; also those of undone steps, as they took their time."""
        return self._saves

    def append(self, step: Step, collectives: Iterable[Collective] = ()) -> None:
        """The newest step; those with its number or a higher one are undone."""
        numbers = self._whole["number"]
        if numbers and step.number in (1, numbers[0]):  # another training: the first one may have been resumed
            self.earlier += len(numbers)
            self.undone -= len(numbers)
        if numbers and step.number <= numbers[-1]:
            self._undo(bisect_left(numbers, step.number), len(numbers))
        self._put(len(numbers), step, collectives)

    def insert(self, step: Step, collectives: Iterable[Collective] = ()) -> None:
        """A step whose rows came late, from a process that ended: its place follows from its time."""
        numbers, place = self._whole["number"], bisect_right(self._whole["begin"], step.begin)
        if place < len(numbers) and numbers[place] <= step.number:
            self.seen += 1
            self.undone += 1
            return
        first = bisect_left(numbers, step.number, 0, place)
        self._undo(first, place)
        self._put(first, step, collectives)

    def add_save(self, step: int, begin: int, seconds: float) -> None:
        """A save that ended."""
        self._saves.append((step, begin, seconds))
        if len(self._saves) > SAVES_MAX:
            del self._saves[: SAVES_MAX // 2]

    def add(self, column: str, begin: int, seconds: float) -> int | None:
        """More of a kind for the step under way at `begin`, which has been taken in before.

        Returns:
            The step's number; None where there is no such step.
        """
        place = bisect_right(self._whole["begin"], begin) - 1
        if place < 0:
            return None
        self._times[column][place] += seconds
        return self.numbers[place]

    def _put(self, place: int, step: Step, collectives: Iterable[Collective]) -> None:
        self.seen += 1
        first = len(self._kinds)
        for kind, begin, seconds in collectives:
            self._kinds.append(kind)
            self._begins.append(begin)
            self._lengths.append(seconds)
        for name, column in self._times.items():
            column.insert(place, getattr(step, name))
        whole = (step.number, step.begin, step.end, step.nth, first, len(self._kinds) - first)
        for name, value in zip(_WHOLE, whole, strict=True):
            self._whole[name].insert(place, value)
        if len(self) > self._steps_max:
            self._thin()
        if len(self._kinds) > self._collectives_max:
            self._forget_collectives()

    def _undo(self, first: int, last: int) -> None:
        self.undone += last - first
        for whole in self._whole.values():
            del whole[first:last]
        for times in self._times.values():
            del times[first:last]

    def _thin(self) -> None:
        half, numbers, level = len(self) // 2, self._whole["number"], 0
        keep = list(range(half))
        while len(keep) > half // 2 and level < LEVEL_MAX:
            level += 1
            keep = [place for place in keep if _chosen(numbers[place], level)]
        self.thinned += half - len(keep)
        for whole in self._whole.values():
            whole[:half] = array("q", [whole[place] for place in keep])
        for times in self._times.values():
            times[:half] = array("d", [times[place] for place in keep])

    def _forget_collectives(self) -> None:
        firsts, counts = self._whole["first"], self._whole["count"]
        oldest, kept = len(self), 0
        while oldest and kept + counts[oldest - 1] <= self._collectives_max // 2:
            oldest -= 1
            kept += counts[oldest]
        for place in range(oldest):
            counts[place] = 0
        kinds, begins, lengths = array("q"), array("q"), array("d")
        for place in range(oldest, len(self)):
            first, last = firsts[place], firsts[place] + counts[place]
            firsts[place] = len(kinds)
            kinds += self._kinds[first:last]
            begins += self._begins[first:last]
            lengths += self._lengths[first:last]
        self._kinds, self._begins, self._lengths = kinds, begins, lengths


def _chosen(number: int, level: int) -> bool:
    """One of 2**level; those of a higher level are among those of a lower one."""
    return (number * _KNUTH & 0xFFFFFFFF) >> (32 - level) == 0


def limits(ranks: int) -> tuple[int, int]:
    """Steps and collectives to keep per rank, so that a report takes at most some 400 MB.

    From 2000 ranks on 0.2 MB per rank.
    """
    steps = max(STEPS_MIN, min(STEPS_MAX, ALL_STEPS_MAX // max(1, ranks)))
    return steps, steps * (COLLECTIVES_MAX // STEPS_MAX)
