"""Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open; written as it is read.

A process per rank; in it threads `step`, `marks` and `communication`. Ranges that overlap without one holding the
other (DDP's buckets, a save in the background) stand in lanes of their own: the format wants them nested.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from .fold import step_number
from .job import Progress, RankData, size_of
from .records import RankReader
from .sources import Place, data_files, first_time
from .spans import Range, RangeFold

THREADS = ("step", "marks", "communication")
LANES = 16
"""Lanes per thread; what fits into none of them goes into the last one."""
REMEMBERED = 8
"""Ranges per lane that a new one is compared with."""
BEFORE_NS = 1_000_000_000
"""How long before the first step ranges are shown: the first wait for data."""


def write_trace(
    target: Path, place: Place, ranks: Mapping[int, RankData], last: int | None = None, progress: Progress | None = None
) -> int:
    """Write the ranges of `ranks` to `target`; reads the files a second time, in bounded memory.

    Args:
        last: only the newest steps, so many per rank.
        progress: called with the bytes done and the total.

    Returns:
        The number of ranges written.

    Raises:
        OSError: `target` cannot be written.
    """
    total, done = sum(size_of(place.ranks[rank]) for rank in ranks), 0
    begins = {rank: _begin(place.ranks[rank], data, last) for rank, data in ranks.items()}
    origin = min(begins.values(), default=0)

    def tell(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(min(done, total), total)

    with target.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":{"origin_unix_ns":"%d"},"traceEvents":[\n' % origin)
        count = 0
        for number, (rank, data) in enumerate(ranks.items()):
            writer = _Writer(file, rank, begins[rank], origin)
            writer.process(data.information.host, first=number == 0)
            fold = RangeFold(writer.take)
            for rows in RankReader(place.ranks[rank]).read(tell):
                fold.feed(rows)
            fold.end()
            count += writer.count
        file.write(b"\n]}\n")
    return count


def _begin(directory: Path, data: RankData, last: int | None) -> int:
    """From when on a rank's ranges are written."""
    table = data.table
    if len(table):
        return table.begins[max(0, len(table) - last)] if last is not None else table.begins[0] - BEFORE_NS
    files = data_files(directory)
    return first_time(files[0]) if files else 0


class _Writer:
    """The events of one rank."""

    def __init__(self, file: IO[bytes], rank: int, begin: int, origin: int) -> None:
        self._file, self._rank, self._begin, self._origin = file, rank, begin, origin
        self._lanes: dict[int, list[list[tuple[int, int]]]] = {thread: [] for thread in range(len(THREADS))}
        self.count = 0

    def process(self, host: str, first: bool) -> None:
        """Name and place of the process."""
        name = f"rank {self._rank}" + (f" ({host})" if host else "")
        self._event({"ph": "M", "pid": self._rank, "name": "process_name", "args": {"name": name}}, first)
        order = {"ph": "M", "pid": self._rank, "name": "process_sort_index", "args": {"sort_index": self._rank}}
        self._event(order)

    def take(self, found: Range) -> None:
        """A finished range."""
        begin, end = found.begin, found.end
        if begin < self._begin or end < begin or found.domain == "lastgasp":
            return
        name, args, thread = found.name, dict[str, str](), 1
        if found.domain == "communication":
            thread, (name, args) = 2, _parsed(name)
        elif found.domain == "default" and step_number(name) is not None:
            thread = 0
        self.count += 1
        self._event(
            {
                "ph": "X",
                "pid": self._rank,
                "tid": self._lane(thread, begin, end),
                "ts": round((begin - self._origin) / 1e3, 3),
                "dur": round((end - begin) / 1e3, 3),
                "name": name,
                "cat": found.domain or "default",
                "args": args,
            }
        )

    def _lane(self, thread: int, begin: int, end: int) -> int:
        lanes = self._lanes[thread]
        lane = next((at for at, ranges in enumerate(lanes) if _fits(ranges, begin, end)), None)
        if lane is None:
            lane = min(len(lanes), LANES - 1)
            if len(lanes) < LANES:
                lanes.append([])
                self._name(thread, lane)
        ranges = lanes[lane]
        while ranges and begin <= ranges[-1][0] and ranges[-1][1] <= end:
            ranges.pop()
        ranges.append((begin, end))
        del ranges[:-REMEMBERED]
        return thread * LANES + lane

    def _name(self, thread: int, lane: int) -> None:
        tid = thread * LANES + lane
        name = THREADS[thread] + (f" {lane + 1}" if lane else "")
        self._event({"ph": "M", "pid": self._rank, "tid": tid, "name": "thread_name", "args": {"name": name}})
        order = {"ph": "M", "pid": self._rank, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
        self._event(order)

    def _event(self, event: Mapping[str, Any], first: bool = False) -> None:
        self._file.write((b"" if first else b",\n") + msgspec.json.encode(event))


def _fits(ranges: list[tuple[int, int]], begin: int, end: int) -> bool:
    """Whether no range of the lane overlaps with it without holding it, or being held."""
    return not any(first < begin < last < end or begin < first < end < last for first, last in ranges)


def _parsed(name: str) -> tuple[str, dict[str, str]]:
    """The operation's name and all details in the range."""
    try:
        args = msgspec.json.decode(name, type=dict[str, str])
    except msgspec.DecodeError:
        return name, {}
    return args.get("opName") or "collective", args
