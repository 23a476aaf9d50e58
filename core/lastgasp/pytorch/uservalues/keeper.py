"""Records at each boundary what a user's objects keep in plain Python, and puts it back when training is entered again.

A process that goes on repeats a step: a list to which each step appends would have that step twice. What is found from
the given roots is recorded by reference, and copied only where it has no parts; long containers are expected to change
at their ends, large tensors not at all, and both are verified when a fault is answered. What cannot be kept within the
limits makes the run one that is not entered again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from operator import is_
from typing import Any

from torch import Tensor

from lastgasp.pytorch.compiled import changes_of
from lastgasp.pytorch.uservalues import kinds
from lastgasp.pytorch.uservalues.contents import NOTHING, PARTS, Big, Long, Row, content_of, entries_of, places_in, put
from lastgasp.pytorch.uservalues.limits import Limits, TooMuch
from lastgasp.pytorch.uservalues.places import Places, Root
from lastgasp.pytorch.uservalues.trace import Trace
from lastgasp.pytorch.uservalues.walk import Seen, Walk

_ALL: list[int] = []
_MISSED, _TRIED = 4, 32
"""Looks in succession that could not begin with the last one; then each how manieth is followed again."""


class UserValues:
    """What is found from some roots. Call `take` at each boundary; everything else is for a fault.

    Args:
        roots: objects of the user's.
        known: modules, parameters and buffers that are restored elsewhere.
        limits: of its cost.

    Attributes:
        refused: why nothing is kept; empty if all is that can be.
        unknown: what is not kept although it may change: where, and its type.
    """

    def __init__(self, roots: Iterable[Root], known: Iterable[object] = (), limits: Limits | None = None) -> None:
        self.roots, self.limits = list(roots), limits or Limits()
        self.left_out = list(known)
        self.known = {id(one) for one in self.left_out} - {id(root.value) for root in self.roots}
        self.skips = {id(root.value): root.skip for root in self.roots}
        self._rows: list[Row] = []
        self.long: dict[int, Long] = {}
        self.big: dict[int, Big] = {}
        self.moving: set[int] = set()
        self.seen: dict[int, Seen] = {}
        self.refused, self.unknown = "", dict[str, str]()
        self._before, self._slow, self._verifying = 0.0, 0, 0.0
        self._clock = time.perf_counter
        self._changes = changes_of()
        self._trace: Trace | None = None
        self._missed = 0

    @property
    def rows(self) -> list[Row]:
        """What was recorded at the last `take`."""
        return self._rows

    # -- at a boundary ------------------------------------------------------------------------------------

    def take(self) -> None:
        """Record everything as it stands. Never raises."""
        if self.refused:
            return
        clock = self._clock
        now = time.perf_counter()
        began = now if clock is time.perf_counter else clock()
        first = not self._rows
        try:
            changed = self._changes(self._trace.checks) if self._trace is not None else _ALL
            if changed is not None:
                self._look(changed)
        except TooMuch as error:
            self._refuse(str(error))
        except Exception as error:  # the user's objects; training must not end for it
            self._refuse(f"the values of the user's objects cannot be recorded: {type(error).__name__}: {error}")
        used, step, self._before, self._verifying = clock() - began + self._verifying, now - self._before, now, 0.0
        if used > self.limits.seconds and used > self.limits.share * step and not first:
            self._took_long(used, step)
        elif self._clock is not time.perf_counter:
            self._slow, self._clock = 0, time.perf_counter

    def _took_long(self, used: float, step: float) -> None:
        if self._clock is time.perf_counter:  # also that of other threads: from now on
            self._clock = time.thread_time
            return
        self._slow += 1
        if self._slow >= self.limits.patience and not self.refused:
            self._refuse(f"recording the values of the user's objects takes {used * 1000:.3g} ms of each step of "
                         f"{step * 1000:.3g} ms")  # fmt: skip

    def _look(self, changed: list[int]) -> None:
        trace, rows = self._trace, None
        if trace is not None:
            walk = Walk(self)
            rows = walk.again(trace, self._rows, changed)
        self._missed = self._missed + 1 if rows is None else 0
        if rows is None:
            walk = Walk(self, self._missed < _MISSED or self._missed % _TRIED == 0)
            rows = walk.all([(root.value, kinds.OBJECT, root.name) for root in reversed(self.roots)])
            self._trace = walk.trace
        self._rows, self.long, self.big = rows, walk.long, walk.big

    def _refuse(self, why: str) -> None:
        self.refused, self._rows, self._trace = why, [], None
        self.long, self.big, self.seen = {}, {}, {}

    def verify(self) -> None:
        """Long containers are compared now: what is due after a boundary may clear them. The next `take` counts it."""
        if not self.long:
            return
        began = self._clock()
        for long in self.long.values():
            long.verified = long.verified or not long.changed()
        self._verifying += self._clock() - began

    def let_go(self) -> None:
        """The training is over, and nothing of it is kept in memory but what `put_back` needs: `take` begins anew."""
        self.left_out.clear()
        self.seen.clear()
        self._trace = None

    def note(self) -> str:
        """What is not kept although it may change, in one line; empty if all is kept."""
        named = [f"{label} ({name})" for label, name in self.unknown.items()]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        return f"a survivor's values may have the repeated step twice: {', '.join(named[:3])}{more}" if named else ""

    # -- after a fault ------------------------------------------------------------------------------------

    def cannot(self) -> str:
        """Why the values of the last boundary cannot be put back; empty if they can.

        Any thread may ask. Never raises.
        """
        if self.refused:
            return self.refused
        try:
            unverified: list[Long | Big] = [one for one in self.long.values() if not one.verified]
            return next(filter(None, (one.changed() for one in [*unverified, *self.big.values()])), "")
        except Exception as error:  # the user's objects, which training may still be changing
            return f"the values of the user's objects cannot be compared: {type(error).__name__}: {error}"

    def put_back(self, entered: bool = False, before: Places | None = None, now: Places | None = None) -> None:
        """Have all as at the last `take`, in the very objects that were there.

        Args:
            entered: the training was entered again, and its hooks have made things anew: those that cannot be put back
                are left, and what was made anew in the place where hooks had made a value gets its content.
            before, now: where all was when hooks had run in the entry of which this has the values, and in this one.
        """
        index = {id(row.value): row for row in self._rows}
        instead: dict[int, Any] = {}
        if entered:
            used = set[int]()
            if before is not None and now is not None:
                self._made_anew(before, now, index, instead, used)
            for row in self._rows:
                self._match(row, index, instead, used)
        for row in self._rows:
            skip, value = self.skips.get(id(row.value), NOTHING), instead.get(id(row.value), row.value)
            content = _resolved(row, instead)
            if entered and row.kind in (*PARTS, kinds.SET, kinds.DEQUE):
                content = _with_others(row, content, content_of(value, row.kind, skip), index)
            put(row, value, content, skip, remove=not entered)

    def _made_anew(
        self, before: Places, now: Places, index: dict[int, Row], instead: dict[int, Any], used: set[int]
    ) -> None:
        """What hooks have made anew at each start: no two values become one thing."""
        for row in self._rows:
            found = [now.at(path) for path in before.paths(row.value) if None not in path]
            if row.kind == kinds.TUPLE or any(one is row.value for one in found):
                continue
            for one in found:
                if type(one) is type(row.value) and id(one) not in used | index.keys() and _fits(one, row.value):
                    instead[id(row.value)] = one
                    used.add(id(one))
                    break

    def _match(self, row: Row, index: dict[int, Row], instead: dict[int, Any], used: set[int]) -> None:
        """Find what was made anew for the values in a row that have what cannot be put back, a file say."""
        if row.kind not in PARTS or isinstance(row.content, Long):
            return
        live = content_of(instead.get(id(row.value), row.value), row.kind, self.skips.get(id(row.value), NOTHING))
        for key, value in places_in(row.kind, row.content):
            known, now = index.get(id(value)), _at(live, key)
            if known is None or now is value or id(value) in instead or id(now) in index or id(now) in used:
                continue
            if type(now) is type(value) and known.kind in PARTS and _fits(now, value) and _has_others(known, index):
                instead[id(value)] = now
                used.add(id(now))


def _has_others(row: Row, index: dict[int, Row]) -> bool:
    return not isinstance(row.content, Long) and any(_is_other(one, index) for one in entries_of(row.kind, row.content))


def _resolved(row: Row, instead: dict[int, Any]) -> Any:
    """The content of a row, with what stands for its values now."""
    content = row.content.items if isinstance(row.content, Long) else row.content
    if row.kind not in (*PARTS, kinds.SET, kinds.DEQUE):
        return content

    def now(value: Any) -> Any:
        if isinstance(value, tuple | frozenset) and instead and id(value) not in instead:
            instead[id(value)] = _remade(value, [now(one) for one in value])
        return value.found() if isinstance(value, Big) else instead.get(id(value), value)

    if isinstance(content, dict):
        return {key: now(value) for key, value in content.items()}
    return type(content)(map(now, content))


def _remade(value: Any, parts: list[Any]) -> Any:
    """A tuple of these parts: the very one, if they are its own."""
    if all(map(is_, value, parts)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _with_others(row: Row, content: Any, live: Any, index: dict[int, Row]) -> Any:
    """The content of a row, where what cannot be put back is as it is now."""
    if isinstance(row.content, Long):
        return content
    if row.kind in (kinds.SET, kinds.DEQUE):
        return live if any(_is_other(value, index) for value in row.content) else content
    others = [key for key, value in places_in(row.kind, row.content) if _is_other(value, index)]
    if row.kind == kinds.LIST:
        if others and len(live) != len(content):
            return live
        return [live[key] if key in others else value for key, value in enumerate(content)]
    for key in others:
        if key in live:
            content[key] = live[key]
        elif row.kind != kinds.DICT:
            del content[key]
    return content


def _is_other(value: Any, index: dict[int, Row]) -> bool:
    """It is not put back; nor is a tuple that has such a thing."""
    if isinstance(value, tuple | frozenset):
        return any(_is_other(one, index) for one in value)
    return isinstance(value, Big) or (id(value) not in index and kinds.kind_of(type(value)) is not kinds.PLAIN)


def _at(live: Any, key: Any) -> Any:
    if isinstance(live, dict):
        return live.get(key)
    return live[key] if key < len(live) else None


def _fits(now: Any, value: Any) -> bool:
    """Whether one can get the content of the other."""
    return not isinstance(now, Tensor) or (now.shape, now.dtype, now.device) == (value.shape, value.dtype, value.device)
