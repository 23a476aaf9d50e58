"""What a look at all values found, by which the next one finds what has changed since: most of it has not.

A container counts as unchanged if it has the very keys and values that it had. One that has changed is recorded anew by
itself where only values have changed in which nothing can be found, or a tensor has taken the place of another one;
where others have come or gone, all is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from lastgasp.pytorch.compiled import Check
from lastgasp.pytorch.uservalues import kinds
from lastgasp.pytorch.uservalues.contents import (
    MODULES_OWN,
    NOTHING,
    Long,
    Row,
    can_be_copied,
    content_of,
    entries_of,
)
from lastgasp.pytorch.uservalues.kinds import is_function, kind_of, slots_of
from lastgasp.pytorch.uservalues.limits import Limits

PLAINEST = frozenset((type(None), bool, int, float, complex, str, bytes, type))
"""Types of values in which nothing changes."""
_NUMBERS = (kinds.TENSOR, kinds.NDARRAY)
_ALONE = (*_NUMBERS, kinds.BYTES, kinds.ARRAY, kinds.GENERATOR, kinds.RANDOM, kinds.NUMPY_RANDOM)
"""Kinds in which nothing else is found, and of which only a copy tells whether they have changed."""


def check_of(row: Row, skip: frozenset[str]) -> Check:
    """What holds as long as the content of a row is that of its value."""
    value, kind, content, _ = row
    cls = type(value)
    if kind in (kinds.OBJECT, kinds.MODULE):
        own = getattr(value, "__dict__", None)
        if type(own) is dict and not slots_of(cls):
            left = skip or MODULES_OWN if kind is kinds.MODULE else skip
            there = {name: content.get(name, one) for name, one in own.items() if name not in left}
            # another thread may have bound one since
            if all(name in content or is_function(one) for name, one in there.items()):
                return value, cls, tuple(there), tuple(there.values()), len(own)
    elif cls in (list, dict) and not isinstance(content, Long):
        return value, cls, None, content, 0
    return value, cls, None, None, 0


class Trace:
    """Of one look.

    Attributes:
        checks: one for each row whose content may change.
        entries, nbytes: as `Walk` counts them.
    """

    def __init__(self, known: Container[int]) -> None:
        self._known = known
        self.checks: list[Check] = []
        self._rows: list[tuple[int, frozenset[str]]] = []
        self._numbers: dict[int, int] | None = None
        self.entries = self.nbytes = 0

    def add(self, number: int, row: Row, skip: frozenset[str], check: Check | None = None) -> None:
        """A row was recorded, with this number; one whose content never changes needs no check."""
        if row.kind is not kinds.TUPLE:
            self.checks.append(check or check_of(row, skip))
            self._rows.append((number, skip))

    def again(
        self, rows: list[Row], changed: list[int], limits: Limits, end_of: Callable[[Row], Row | None]
    ) -> list[Row] | None:
        """The rows of now; None where all is to be looked at, and this is of no use any more.

        Args:
            limits: of the look; end_of: the row of now of a long container.
        """
        rows = rows.copy()  # any thread may be reading those of the last step
        done = set[int]()
        for i in changed:
            number, skip = self._rows[i]
            row = rows[number]
            if number in done:
                continue
            if isinstance(row.content, Long):
                anew = end_of(row)
            else:
                anew = self._anew(row, self.checks[i][1], skip, limits, rows, done)
            if anew is None:
                return None
            rows[number], self.checks[i] = anew, check_of(anew, skip)
        return rows if self.entries <= limits.entries and self.nbytes <= limits.nbytes else None

    def _anew(
        self, row: Row, cls: type, skip: frozenset[str], limits: Limits, rows: list[Row], done: set[int]
    ) -> Row | None:
        value, kind, before, label = row
        now: object = type(value)
        if now is not cls:
            return None
        if kind in _NUMBERS:
            if not can_be_copied(value) or value.nbytes > limits.single:
                return None
            self.nbytes += value.nbytes - _bytes_of(row)
        content = content_of(value, kind, skip)
        if kind not in _ALONE:
            if cls in (list, dict) and len(content) > limits.long:
                return None
            if not self._same_parts(kind, content, before, limits, rows, done):
                return None
            self.entries += len(content) - len(before)
        return Row(value, kind, content, label)

    def _same_parts(
        self, kind: str, now: Any, before: Any, limits: Limits, rows: list[Row], done: set[int]
    ) -> bool:  # fmt: skip
        """Whether all that something can be found in is in both, at the same places as far as these have names.

        A tensor or an array may have taken the place of another one: it gets the row of that.
        """
        if all(type(one) in PLAINEST for content in (now, before) for one in entries_of(kind, content)):
            return True
        if kind is kinds.SET:
            return False
        first, second = _places(kind, now), _places(kind, before)
        if len(first) != len(second):
            return False
        for (name, one), (before_name, was) in zip(first, second, strict=True):
            if name != before_name or (one is not was and not self._in_its_place(one, was, limits, rows, done)):
                return False
        return True

    def _in_its_place(self, one: Any, was: Any, limits: Limits, rows: list[Row], done: set[int]) -> bool:
        kind = kind_of(type(one))
        if kind not in _NUMBERS or kind is not kind_of(type(was)):
            return False
        if self._numbers is None:
            self._numbers = _alone(rows)
        number = self._numbers.pop(id(was), -1)
        if number < 0 or id(one) in self._numbers or id(one) in self._known:
            return False
        if rows[number].value is not was or not can_be_copied(one) or one.nbytes > limits.single:
            return False
        self._numbers[id(one)] = number
        self.nbytes += one.nbytes - _bytes_of(rows[number])
        rows[number] = anew = Row(one, kind, content_of(one, kind), rows[number].label)
        done.add(number)
        at = next(i for i, (other, _) in enumerate(self._rows) if other == number)
        self.checks[at] = check_of(anew, NOTHING)
        return True


def _alone(rows: list[Row]) -> dict[int, int]:
    """Tensors and arrays that are in one place only: the number of the row, by id; -1 for others."""
    found = {id(row.value): number for number, row in enumerate(rows) if row.kind in _NUMBERS}
    seen = set[int]()
    for row in rows:
        for one in () if isinstance(row.content, Long) else entries_of(row.kind, row.content):
            if id(one) in found:
                found[id(one)] = found[id(one)] if id(one) not in seen else -1
                seen.add(id(one))
    return found


def _bytes_of(row: Row) -> int:
    nbytes: int = row.content[1].nbytes if row.kind is kinds.TENSOR else row.content.nbytes
    return nbytes


def _places(kind: str, content: Any) -> list[tuple[Any, Any]]:
    items = content.items() if isinstance(content, dict) else enumerate(content)
    named = kind in (kinds.OBJECT, kinds.MODULE)
    return [(key if named else None, one) for key, one in items
            if kind_of(type(one)) not in (kinds.PLAIN, kinds.LEFT)]  # fmt: skip
