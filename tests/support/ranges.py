"""What a ring holds, as ranges with names, for tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lastgasp.steps import format as layout
from lastgasp.steps.marks import Marks


class Seen(NamedTuple):
    """One finished range; times in monotonic ns."""

    name: str
    begin: int
    end: int
    device: tuple[int, int]
    domain: str
    value: int

    def holds(self, other: Seen) -> bool:
        """Whether `other` lies inside."""
        return self.begin <= other.begin and other.end <= self.end


def seen(marks: Marks) -> list[Seen]:
    """All ranges that nobody has taken yet, in the order in which they ended."""
    names, found = marks.names(), list[Seen]()
    for record in layout.RECORD.iter_unpack(marks.records(layout.DEFAULT_CAPACITY)):
        begin, end, _, value, device_begin, device_end, slot, _ = record
        name = names[slot]
        text = name.text.replace("{}", str(value))
        found.append(Seen(text, begin, end, (device_begin, device_end), name.domain, value))
    return found


def named(ranges: Iterable[Seen], prefix: str) -> list[Seen]:
    """Those whose names begin so."""
    return [one for one in ranges if one.name.startswith(prefix)]
