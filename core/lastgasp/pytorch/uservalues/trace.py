"""What a look at all values found, by which the next one finds what has changed since: most of it has not.

A container counts as unchanged if it has the very keys and values that it had. One that has changed is recorded anew by
itself where only values have changed in which nothing can be found; where others have come or gone, all is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

from lastgasp.pytorch.compiled import compiled
from lastgasp.pytorch.uservalues import kinds
from lastgasp.pytorch.uservalues.contents import MODULES_OWN, Long, Row, can_be_copied, content_of, entries_of
from lastgasp.pytorch.uservalues.kinds import is_function, kind_of, slots_of

Check = tuple[Any, type, tuple[str, ...] | None, Any, int]
"""A value, its class, and either names and values of attributes with the number of all, or the content of a list or of
a dict; None in its place where it has to be looked at in each step."""
Changes = Callable[[list[Check]], list[int] | None]

PLAINEST = frozenset((type(None), bool, int, float, complex, str, bytes, type))
"""Types of values in which nothing changes."""
_NUMBERS = (kinds.TENSOR, kinds.NDARRAY)
_ALONE = (*_NUMBERS, kinds.BYTES, kinds.ARRAY, kinds.GENERATOR, kinds.RANDOM, kinds.NUMPY_RANDOM)
"""Kinds in which nothing else is found, and of which only a copy tells whether they have changed."""


def changes_of() -> Changes:
    """Who finds the numbers of checks that do not hold any more (None: all do); ask once, call often."""
    copies = compiled()
    return copies.changes if copies is not None else _changes


def _changes(checks: list[Check]) -> list[int] | None:
    return [i for i, check in enumerate(checks) if not holds(check)] or None


def holds(check: Check) -> bool:
    """Whether a value has what it had; False also where that cannot be told."""
    value, cls, names, expected, count = check
    if type(value) is not cls or expected is None:
        return False
    if names is not None:
        try:
            own = value.__dict__
            return len(own) == count and all(map(is_, map(own.__getitem__, names), expected))
        except Exception:  # there is none of that name; or the user's object
            return False
    if len(value) != len(expected):
        return False
    if cls is dict:
        return all(map(is_, value, expected)) and all(map(is_, value.values(), expected.values()))
    return all(map(is_, value, expected))


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
        entries: as `Walk` counts them.
    """

    def __init__(self) -> None:
        self._checks: list[Check] = []
        self._rows: list[tuple[int, frozenset[str]]] = []
        self.entries = 0

    def add(self, number: int, row: Row, skip: frozenset[str], check: Check | None = None) -> None:
        """A row was recorded, with this number; one whose content never changes needs no check."""
        if row.kind is not kinds.TUPLE:
            self._checks.append(check or check_of(row, skip))
            self._rows.append((number, skip))

    def changed(self, changes: Changes) -> list[int] | None:
        """Which checks do not hold any more; None if all do."""
        return changes(self._checks)

    def again(
        self, rows: list[Row], changed: list[int], long: int, end_of: Callable[[Row], Row | None]
    ) -> list[Row] | None:
        """The rows of now; None where all is to be looked at, and this is of no use any more.

        Args:
            long: as in `Limits`; end_of: the row of now of a long container.
        """
        rows = rows.copy()  # any thread may be reading those of the last step
        for i in changed:
            number, skip = self._rows[i]
            row = rows[number]
            anew = end_of(row) if isinstance(row.content, Long) else self._anew(row, self._checks[i][1], skip, long)
            if anew is None:
                return None
            rows[number], self._checks[i] = anew, check_of(anew, skip)
        return rows

    def _anew(self, row: Row, cls: type, skip: frozenset[str], long: int) -> Row | None:
        value, kind, before, label = row
        if type(value) is not cls:
            return None
        if kind in _NUMBERS:
            copy = before[1] if kind is kinds.TENSOR else before
            if not can_be_copied(value) or value.nbytes != copy.nbytes:
                return None
        content = content_of(value, kind, skip)
        if kind not in _ALONE:
            if (cls in (list, dict) and len(content) > long) or not _same_parts(kind, content, before):
                return None
            self.entries += len(content) - len(before)
        return Row(value, kind, content, label)


def _same_parts(kind: str, now: Any, before: Any) -> bool:
    """Whether all that something can be found in is in both, at the same places as far as these have names."""
    if all(type(one) in PLAINEST for content in (now, before) for one in entries_of(kind, content)):
        return True
    if kind is kinds.SET:
        return False
    return _places(kind, now) == _places(kind, before)


def _places(kind: str, content: Any) -> list[tuple[Any, int]]:
    items = content.items() if isinstance(content, dict) else enumerate(content)
    named = kind in (kinds.OBJECT, kinds.MODULE)
    return [(key if named else None, id(one)) for key, one in items
            if kind_of(type(one)) not in (kinds.PLAIN, kinds.LEFT)]  # fmt: skip
