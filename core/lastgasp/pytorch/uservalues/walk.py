"""Looks at all that is found from some roots, and records it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from lastgasp.pytorch.compiled import Check, holds
from lastgasp.pytorch.uservalues import kinds
from lastgasp.pytorch.uservalues.contents import (
    NOTHING,
    PARTS,
    Big,
    Long,
    Row,
    can_be_copied,
    content_of,
    digest_of,
    entries_of,
    in_host_memory,
    version_of,
    weakly,
)
from lastgasp.pytorch.uservalues.limits import Limits, TooMuch
from lastgasp.pytorch.uservalues.trace import PLAINEST, Trace, check_of

_BUILT_IN = (list, dict, set)
_CONTAINERS = (kinds.LIST, kinds.DICT, kinds.SET, kinds.DEQUE)
_COPIED = 64 << 20
"""Bytes of tensors in long containers of which copies are made; what comes after them is known by torch's versions."""
_NAMED = 20
"""Values that are named, where they are not kept."""


@dataclass
class Seen:
    """A root at the last look: what holds as long as nothing is bound anew, its attributes, and what to look at."""

    check: Check
    content: dict[str, Any]
    parts: list[tuple[Any, str, str]]


class Known(Protocol):
    """What one look needs of the ones before.

    Attributes:
        skips: names of attributes that are left out, by the id of the object.
        known: ids of what is restored elsewhere.
        long, big: by id.
        seen: roots, by id.
        moving: ids of long containers whose items change.
        unknown: what is not kept: where, and its type.
    """

    limits: Limits
    skips: dict[int, frozenset[str]]
    known: set[int]
    long: dict[int, Long]
    big: dict[int, Big]
    seen: dict[int, Seen]
    moving: set[int]
    unknown: dict[str, str]


class Walk:
    """One look at everything.

    Args:
        values: what is known; traced: the next look may begin with what this one finds.
    """

    def __init__(self, values: Known, traced: bool = True) -> None:
        self._values, self._limits = values, values.limits
        self._rows: list[Row] = []
        self._seen: set[int] = set()
        self._entries = self._bytes = self._once = 0
        self._copied = sum(one.copied for one in values.long.values())
        self.long: dict[int, Long] = {}
        self.big: dict[int, Big] = {}
        self._trace = Trace(values.known) if traced else None

    @property
    def trace(self) -> Trace | None:
        """For the next look; None where it has to look at all: what is large must not be kept alive for it."""
        if self._trace is None or self.big:
            return None
        self._trace.entries, self._trace.nbytes = self._entries, self._bytes
        return self._trace

    def again(self, trace: Trace, rows: list[Row], changed: list[int]) -> list[Row] | None:
        """The rows of now; None where `all` is needed, of another `Walk`.

        Args:
            trace, rows: of the last look; changed: which of its checks do not hold any more.
        """
        for number in changed:  # what a root had must not be kept alive
            self._values.seen.pop(id(trace.checks[number][0]), None)
        return trace.again(rows, changed, self._limits, self._longer)

    def _longer(self, row: Row) -> Row | None:
        good = self._is_long(row.value) and self._end_of(row.value, row.kind, row.label)
        return self._rows.pop() if good else None

    def all(self, roots: list[tuple[Any, str, str]]) -> list[Row]:
        """The rows of what is found from values of a kind and a name; those of objects come before their parts'."""
        self._look(roots, self._rows, self._seen)
        return self._rows

    def _look(self, stack: list[tuple[Any, str, str]], rows: list[Row], seen: set[int]) -> None:
        values, frozen = self._values, rows is not self._rows
        while stack:
            value, kind, label = stack.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            if kind in (kinds.TENSOR, kinds.NDARRAY):
                self._numbers(value, kind, label, rows, frozen)
                continue
            if not frozen and self._is_long(value) and self._end_of(value, kind, label):
                continue
            if id(value) in values.skips and not frozen:
                stack += self._root(value, kind, label)
                continue
            content = content_of(value, kind)
            self._record(Row(value, kind, content, label), rows)
            if type(value) not in _BUILT_IN and kind in _CONTAINERS and hasattr(value, "__dict__"):
                own = kinds.attributes(value)
                self._record(Row(value, kinds.OBJECT, own, label), rows)
                stack += self._parts_of(own, kinds.OBJECT, label, frozen)
            stack += self._parts_of(content, kind, label, frozen)

    def _root(self, value: Any, kind: str, label: str) -> list[tuple[Any, str, str]]:
        """Attributes of a root. A module has many parts, and most of them have not changed since the last look."""
        values = self._values
        skip, seen = values.skips[id(value)], values.seen.get(id(value))
        if seen is None or not holds(seen.check):
            content = content_of(value, kind, skip)
            row = Row(value, kind, content, label)
            check = check_of(row, skip)
            seen = Seen(check, content, self._parts_of(content, kind, label, False))
            values.seen.pop(id(value), None)
            if check[3] is not None and not any(isinstance(one, Big) for one in content.values()):
                values.seen[id(value)] = seen
        else:
            self._count(len(seen.content), label, False)
        self._record(Row(value, kind, seen.content, label), self._rows, skip, seen.check)
        return seen.parts

    def _record(
        self, row: Row, rows: list[Row], skip: frozenset[str] = NOTHING, check: Check | None = None
    ) -> None:
        rows.append(row)
        if self._trace is not None and rows is self._rows:
            self._trace.add(len(rows) - 1, row, skip, check)

    def _parts_of(self, content: Any, kind: str, label: str, frozen: bool) -> list[tuple[Any, str, str]]:
        entries = entries_of(kind, content)
        if not entries:
            return []
        self._count(len(content), label, frozen)
        found, named = [], content if isinstance(content, dict) else None
        if all(map(PLAINEST.__contains__, map(type, entries))):
            return []
        for key, value in named.items() if named is not None else enumerate(entries):
            what = kinds.kind_of(type(value))
            if what is kinds.PLAIN or what is kinds.LEFT or id(value) in self._values.known:
                continue
            where = f"{label}.{key}" if kind in (kinds.OBJECT, kinds.MODULE) else label
            if what is kinds.UNKNOWN or (what in (kinds.TENSOR, kinds.NDARRAY) and not can_be_copied(value)):
                self._name(where, value)
                continue
            found.append((value, what, where))
            numbers = what in (kinds.TENSOR, kinds.NDARRAY)
            if numbers and kind in PARTS and not frozen and value.nbytes > self._limits.single:
                content[key] = self._large(value, where)  # the row must not keep it alive
        return found

    def _is_long(self, value: Any) -> bool:
        long = type(value) in (list, dict) and len(value) > self._limits.long
        return long and id(value) not in self._values.moving

    def _name(self, where: str, value: Any) -> None:
        unknown = self._values.unknown
        if len(unknown) < _NAMED:
            unknown.setdefault(where, type(value).__name__)

    def _count(self, entries: int, label: str, frozen: bool) -> None:
        limits = self._limits
        if frozen:
            self._once += entries
        else:
            self._entries += entries
        if self._entries > limits.entries or self._once > limits.once:
            raise TooMuch(f"the user's objects have more than {limits.once if frozen else limits.entries} values that "
                          f"may change (up to {label})")  # fmt: skip

    def _numbers(self, value: Any, kind: str, label: str, rows: list[Row], frozen: bool) -> None:
        """A tensor or an array."""
        if value.nbytes > self._limits.single:
            if frozen and isinstance(value, Tensor):
                rows.append(Row(value, kind, (version_of(value), None), label))
            else:
                self._large(value, label)
            return
        if frozen:
            self._copied += value.nbytes
            if isinstance(value, Tensor) and (self._copied > _COPIED or not in_host_memory(value)):
                rows.append(Row(value, kind, (version_of(value), None), label))
                return
        else:
            self._bytes += value.nbytes
            if self._bytes > self._limits.nbytes:
                raise TooMuch(f"tensors and arrays of the user's objects that may change have more than "
                              f"{self._limits.nbytes / 1e6:.3g} MB (up to {label})")  # fmt: skip
        self._record(Row(value, kind, content_of(value, kind), label), rows)

    def _large(self, value: Any, label: str) -> Big:
        known = self.big.get(id(value))
        if known is not None:
            return known
        big, version = self._values.big.get(id(value)), version_of(value)
        if big is None or big.found() is not value:
            big = Big(weakly(value), label, value.nbytes, version)
        elif big.version != version:
            raise TooMuch(f"{label} changes, and has {value.nbytes / 1e6:.3g} MB, more than can be copied in each step")
        elif big.digest is None:
            looked_at = in_host_memory(value) and value.nbytes <= self._limits.hashed and not _is_file(value)
            big.digest = digest_of(value) if looked_at else b""
            if not big.digest and not isinstance(value, Tensor) and not _is_file(value):
                raise TooMuch(f"{label} has {value.nbytes / 1e6:.3g} MB, and may change")
        self.big[id(value)] = big
        return big

    def _end_of(self, value: Any, kind: str, label: str) -> bool:
        """Record what is new at the end of a long container; False if its items change."""
        known = self._values.long.get(id(value))
        long = known if known is not None and known.value is value else None
        new = long.grown() if long is not None else None
        if long is None or new is None:
            long = Long(value, label, content_of(value, kind))
            new = list(entries_of(kind, long.items))
        elif long.moves():
            self._values.moving.add(id(value))
            return False
        long.verified = False
        copied = self._copied
        if parts := self._parts_of(new, kinds.LIST, label, True):
            self._look(parts[::-1], long.rows, set())
        long.copied += self._copied - copied
        self.long[id(value)] = long
        self._record(Row(value, kind, long, label), self._rows)
        return True


def _is_file(value: Any) -> bool:
    """Whether training can only read it, from a disk."""
    return isinstance(value, np.memmap) and value.mode == "r"
