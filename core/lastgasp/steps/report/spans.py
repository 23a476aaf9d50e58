"""Rows to ranges: the two or four rows of one Id become one value with begin and end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from .records import Row

HOST_BEGIN, HOST_END, STREAM_BEGIN, STREAM_END = 2, 4, 16, 32
"""Values of Flag; 1 and 8 are instants, which take no time (docs/facts/taskd.md §6)."""
_BEGINS, _ENDS = (HOST_BEGIN, STREAM_BEGIN), (HOST_END, STREAM_END)
OPEN_MAX = 256
"""Ids open at once; TaskD's own reader expects about 100 (taskd.md §7). Beyond it the oldest are given up that
only wait for their device's rows; without such ones the oldest of all."""
PROCESSES_MAX = 4
"""Processes of one rank whose ranges may be open at once: a restart's rows may overlap with recovered ones."""


class Range(msgspec.Struct, gc=False):
    """One range of one process; times in ns since the epoch, 0 where there was no row.

    Attributes:
        stream: it had rows for the device as well; then the device's times are the ones that count.
    """

    name: str
    domain: str
    pid: int
    tid: int
    stream: bool
    host_begin: int
    host_end: int = 0
    device_begin: int = 0
    device_end: int = 0

    @property
    def begin(self) -> int:
        """On the device where it is known, else on the host."""
        return self.device_begin if 0 < self.device_begin <= self.device_end else self.host_begin

    @property
    def end(self) -> int:
        """On the device where it is known, else on the host."""
        return self.device_end if 0 < self.device_begin <= self.device_end else self.host_end


@dataclass
class Counts:
    """What became of the rows of one rank.

    Attributes:
        rows: of Kind 1, read so far.
        other_kinds: of kinds that TaskD can write and never enables (API calls, kernels).
        unbegun: rows whose beginning is not there: aged away, or of a process that has ended.
        unended: ranges that never ended: the rank died in them, or their end was lost.
        host_times: stream ranges whose device times are their host times, to the nanosecond.
        device_times: stream ranges whose device times are their own.
        no_device: stream ranges without rows of the device.
    """

    rows: int = 0
    other_kinds: int = 0
    unbegun: int = 0
    unended: int = 0
    host_times: int = 0
    device_times: int = 0
    no_device: int = 0


class RangeFold:
    """Rows of one rank in, finished ranges out.

    An Id counts per process, from 1; after a restart it begins anew. So the open ones are kept per process, by the
    pid on the host's rows; a device's row has none, and belongs to the process of the host's row before it.

    Args:
        emit: called with each finished range.
    """

    def __init__(self, emit: Callable[[Range], object]) -> None:
        self._emit = emit
        self._pid = -1
        self._tables: dict[int, dict[int, Range]] = {-1: {}}
        self._open = self._tables[-1]
        self.counts = Counts()

    def feed(self, rows: Iterable[Row]) -> None:
        """Take the next rows, in the order of the file."""
        counts, opened = self.counts, self._open
        for row in rows:
            flag = row.Flag
            if row.Kind != 1:
                counts.other_kinds += 1
                continue
            counts.rows += 1
            if row.SourceKind == 0:
                owner = row.MsptiObjectId.Pt if row.MsptiObjectId is not None else None
                if owner is not None and owner.ProcessId != self._pid:
                    opened = self._switch(owner.ProcessId)
                if flag in _BEGINS:
                    tid, before = owner.ThreadId if owner is not None else 0, len(opened)
                    opened[row.Id] = Range(row.Name, row.Domain, self._pid, tid, flag == STREAM_BEGIN, row.Timestamp)
                    if len(opened) == before:  # the same pid again, in a new container: Ids begin anew
                        counts.unended += 1
                    elif before >= OPEN_MAX:
                        self._give_up(opened)
                    continue
            found = opened.get(row.Id)
            if found is None:
                counts.unbegun += flag not in (1, 8)
            elif row.SourceKind == 0:
                if flag in _ENDS:
                    found.host_end = row.Timestamp
                    if found.device_end or not found.stream:
                        self._finish(opened.pop(row.Id))
            elif flag == STREAM_BEGIN:
                found.device_begin = row.Timestamp
            elif flag == STREAM_END:
                found.device_end = row.Timestamp
                if found.host_end:
                    self._finish(opened.pop(row.Id))

    def end(self) -> None:
        """There are no more rows: what has an end on the host counts, the rest was cut off."""
        for table in self._tables.values():
            self._close(list(table.values()))
            table.clear()

    def _switch(self, pid: int) -> dict[int, Range]:
        table = self._tables.pop(pid, {})
        self._tables[pid] = table  # now the youngest
        while len(self._tables) > PROCESSES_MAX:
            self._close(list(self._tables.pop(next(iter(self._tables))).values()))
        self._pid, self._open = pid, table
        return table

    def _give_up(self, opened: dict[int, Range]) -> None:
        ended = [key for key, found in opened.items() if found.host_end]
        self._close([opened.pop(key) for key in (ended or list(opened))[: OPEN_MAX // 2]])

    def _close(self, ranges: Iterable[Range]) -> None:
        for found in ranges:
            if found.host_end:
                self._finish(found)
            else:
                self.counts.unended += 1

    def _finish(self, found: Range) -> None:
        if found.stream:
            if not found.device_end:
                self.counts.no_device += 1
            elif found.device_begin == found.host_begin and found.device_end == found.host_end:
                self.counts.host_times += 1
            else:
                self.counts.device_times += 1
        self._emit(found)
