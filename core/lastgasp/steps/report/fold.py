"""Ranges to steps: which forward, wait for data, save or collective belongs to which step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from .records import Row
from .spans import Range, RangeFold
from .table import Collective, Step, StepTable

KINDS = {
    "dataloader": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "save_checkpoint": "save",
}
"""Names in the domain `default` -> column; `backward` and `optimizer` are lastgasp's own."""
PENDING_MAX = 20_000
"""Ranges that wait for their step to end. More means that steps are not marked: the older half is dropped."""
_NS = 1e-9
_LIMIT = 1 << 62

Span = tuple[int, int]
"""Begin and end, ns since the epoch."""


class KindOf(Protocol):
    """Gives a communication range's kind: an index that all ranks of the job share."""

    def __call__(self, name: str) -> int: ...


class _Text(msgspec.Struct):
    groupName: str = ""
    opName: str = ""


class Kinds:
    """Kinds of collectives: operation and group; the same index on all ranks.

    Attributes:
        known: index -> (operation, group).
    """

    NAMES_MAX = 4096

    def __init__(self) -> None:
        self.known: list[tuple[str, str]] = []
        self._index: dict[tuple[str, str], int] = {}
        self._names: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        """The index of a communication range's name; a name that is not TaskD's JSON is a kind of its own."""
        found = self._names.get(name)
        if found is None:
            if len(self._names) >= self.NAMES_MAX:  # counts that change with every batch
                self._names.clear()
            found = self._names[name] = self._of(_parsed(name))
        return found

    def _of(self, kind: tuple[str, str]) -> int:
        if kind not in self._index:
            self._index[kind] = len(self.known)
            self.known.append(kind)
        return self._index[kind]


def _parsed(name: str) -> tuple[str, str]:
    try:
        text = msgspec.json.decode(name, type=_Text)
    except msgspec.DecodeError:
        return name[:100], ""
    return text.opName, text.groupName


class RankFold:
    """Turns the rows of one rank into its table of steps. Call `feed` in the order of the files, `end` at their end.

    A range belongs to the step within whose time on the host it began. Between two steps, a save belongs to the
    step before and everything else to the step after: it waits for the data of that step. Where the step before is
    not marked, what began before a step is of others, except its data.

    Attributes:
        table: the steps that are complete; the newest one stays out until the next one or `end`.
        dropped: marks that lastgasp lost and counted.
        counts: what became of the rows.
    """

    def __init__(self, kind_of: KindOf, table: StepTable) -> None:
        self.table, self.dropped = table, 0
        self._kind_of = kind_of
        self._ranges = RangeFold(self._take)
        self.counts = self._ranges.counts
        self._processes: dict[int, _Process] = {}
        self._newest: _Process | None = None

    def feed(self, rows: Iterable[Row]) -> None:
        """The next rows."""
        self._ranges.feed(rows)

    def end(self) -> None:
        """There are no more rows."""
        self._ranges.end()
        for process in self._processes.values():
            process.end()

    def _take(self, found: Range) -> None:
        if not 0 < found.host_begin <= found.host_end < _LIMIT:
            return
        process = self._processes.get(found.pid)
        if process is None:
            process = self._begin(found.pid)
        if found.domain == "default":
            kind = KINDS.get(found.name)
            if kind is not None:
                process.part(kind, found)
            elif (number := step_number(found.name)) is not None:
                process.step(number, found)
        elif found.domain == "communication":
            process.part("communication", found, self._kind_of(found.name))
        elif found.domain == "lastgasp" and found.name.startswith("dropped "):
            count = found.name.removeprefix("dropped ")
            self.dropped += int(count) if count.isdecimal() and len(count) < 19 else 0

    def _begin(self, pid: int) -> _Process:
        if self._newest is not None:
            self._newest.end()
            self._newest.last = False
        self._newest = self._processes[pid] = _Process(self.table)
        return self._newest


def step_number(name: str) -> int | None:
    """`step 7`, `Step 4`, `train_step 5` as TaskD's reader takes them; None: no step (docs/facts/taskd.md §7)."""
    words = name.split(maxsplit=2)
    if len(words) < 2 or "step" not in words[0].lower() or not words[1].isdecimal() or len(words[1]) > 18:
        return None
    return int(words[1])


class _Process:
    """The steps of one process, in the order in which they end."""

    def __init__(self, table: StepTable) -> None:
        self.last = True
        self._table = table
        self._pending: list[tuple[str, Range, int]] = []
        self._held: tuple[int, Range] | None = None
        self._closed_until = 0
        self._series = ""
        self._made = 0
        self._before: tuple[int, int] | None = None  # number and end of the step before

    def part(self, kind: str, found: Range, collective: int = -1) -> None:
        """A range that is part of a step."""
        if found.host_begin < self._closed_until:
            seconds = (found.end - found.begin) * _NS
            number = self._table.add(kind, found.host_begin, seconds)
            if kind == "save" and number is not None:
                self._table.add_save(number, found.begin, seconds)
            return
        self._pending.append((kind, found, collective))
        if len(self._pending) > PENDING_MAX:
            del self._pending[: PENDING_MAX // 2]

    def step(self, number: int, found: Range) -> None:
        """A step has ended. The one before it is now complete, including late rows."""
        series = found.name.partition(" ")[0]
        if series != (self._series or series):  # MindSpore may write two series (docs/facts/mindformers.md §6)
            return
        self._series = series
        if self._held is not None:
            self._complete(*self._held, found.host_begin)
            if number <= self._held[0]:  # a restart with the same pid, as happens in containers
                self._made, self._before = 0, None
        self._held = number, found

    def end(self) -> None:
        """The rows have ended."""
        if self._held is not None:
            self._complete(*self._held, _LIMIT)
        self._held = None
        self._pending.clear()

    def _complete(self, number: int, found: Range, following: int) -> None:
        spans: dict[str, list[Span]] = {}
        collectives: list[Collective] = []
        rest = []
        strange = self._of_unmarked(number, found)
        for item in self._pending:
            kind, part, collective = item
            if part.host_begin < strange.get(kind, 0):
                if kind == "save":
                    self._table.add_save(number, part.begin, (part.end - part.begin) * _NS)
                continue
            if part.host_begin >= (following if kind == "save" else found.host_end):
                rest.append(item)
                continue
            begin, end = part.begin, part.end
            spans.setdefault(kind, []).append((begin, end))
            if kind == "save":
                self._table.add_save(number, begin, (end - begin) * _NS)
            elif kind == "communication":
                collectives.append((collective, begin, (end - begin) * _NS))
        self._pending = rest
        self._closed_until = found.host_end
        self._made += 1
        step = self._measured(number, found, spans)
        (self._table.append if self.last else self._table.insert)(step, collectives)
        self._before = number, found.end

    def _of_unmarked(self, number: int, found: Range) -> dict[str, int]:
        """Kind -> before when its ranges are of steps that were not marked; none after the step before."""
        if self._before is not None and self._before[0] == number - 1:
            return {}
        data = [part.host_begin for kind, part, _ in self._pending if kind == "data"]
        fetched = max((begin for begin in data if begin < found.host_begin), default=0)
        return dict.fromkeys((*KINDS.values(), "communication"), found.host_begin) | {"data": fetched}

    def _measured(self, number: int, found: Range, spans: dict[str, list[Span]]) -> Step:
        step = Step(number, found.host_begin, found.host_end, self._made)
        step.time = step.period = (found.end - found.begin) * _NS
        if self._before is not None and self._before[0] == number - 1 and self._before[1] < found.end:
            step.period = (found.end - self._before[1]) * _NS
        for kind, parts in spans.items():
            setattr(step, kind, covered(parts) * _NS)
        step.forward_own = step.forward
        waits = spans.get("communication")
        if waits:
            step.forward_own -= overlap(spans.get("forward", ()), waits) * _NS
            step.backward_own = _own(spans.get("backward", ()), waits)
        return step


def covered(spans: Iterable[Span]) -> int:
    """ns covered by at least one of them."""
    return sum(end - begin for begin, end in _merged(spans))


def _merged(spans: Iterable[Span]) -> list[Span]:
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


def overlap(these: Iterable[Span], those: Iterable[Span]) -> int:
    """ns covered by both."""
    first, second = _merged(these), _merged(those)
    return covered(first) + covered(second) - covered([*first, *second])


def _own(backward: Iterable[Span], waits: Sequence[Span]) -> float:
    """Seconds of backward that are no waiting; NaN where no collective begins in it.

    DDP starts its collectives while backward is running: from the first to the last of a chain that overlaps, backward
    computes, and waits from then on until the chain ends.
    """
    total, found = 0, False
    for begin, end in backward:
        at, last = begin, 0
        for first, until in sorted(span for span in waits if begin <= span[0] < end):
            found = True
            total += first - at if first >= at else first - last
            last, at = first, max(at, until)
        total += max(0, end - at)
    return total * _NS if found else math.nan
