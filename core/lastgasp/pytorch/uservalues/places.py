"""Which object is where: the ways to all that may change, from the attributes of the roots."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lastgasp.pytorch.uservalues import kinds
from lastgasp.pytorch.uservalues.contents import NOTHING, Big, content_of, entries_of, weakly
from lastgasp.pytorch.uservalues.limits import Limits, TooMuch
from lastgasp.pytorch.uservalues.memory import Known

Path = tuple[Any, ...]
"""Names of a root and of its attribute, then keys and indices; None for what has no place, as in a set."""
Name = tuple[str, str]
"""Of a root and of its attribute."""

_NOT = (kinds.PLAIN, kinds.LEFT, kinds.UNKNOWN, kinds.MODULE)
_WITH_PARTS = (kinds.OBJECT, kinds.DICT, kinds.LIST, kinds.SET, kinds.DEQUE, kinds.TUPLE)
_MOST = 100_000
"""Entries of one attribute that are looked at."""
_HELD = 4 << 20
"""Bytes of one attribute that are kept alive: all of one whose value can be written."""


@dataclass(frozen=True)
class Root:
    """An object of the user's, and the names of its attributes that are not the user's, or are restored elsewhere."""

    name: str
    value: Any
    skip: frozenset[str] = NOTHING


class Places:
    """Those of one moment. Objects are kept alive, but for large ones and those that a large attribute alone has."""

    def __init__(self) -> None:
        self._paths: dict[int, list[Path]] = {}
        self._held: dict[int, Callable[[], Any]] = {}
        self._at: dict[Path, int] = {}

    @classmethod
    def of(cls, roots: Iterable[Root], known: Iterable[object] = ()) -> Places:
        """Where all is now. Never raises."""
        found, own = cls(), dict[Name, Any]()
        for root in roots:
            with contextlib.suppress(Exception):  # the user's object
                own |= {(root.name, name): one for name, one in content_of(root.value, kinds.OBJECT, root.skip).items()}
        found.look_at_all(own, Known(known, memory=False))
        return found

    def look_at_all(self, values: Mapping[Name, Any], known: Container[object]) -> None:
        """Look at these attributes as they are now: what a script frees later must not stay in memory for it."""
        large = dict[Name, Any]()
        for name, value in values.items():
            try:
                self._add([*_reached(name, value, content_of, known, _HELD)])
            except TooMuch:
                large[name] = value
        for name, value in large.items():
            self._add(way for way in _reached(name, value, content_of, known) if self.paths(way[1]))

    def look(self, name: Name, value: Any, contents: Callable[[Any, str], Any], known: Container[object]) -> None:
        """Add what is found from an attribute.

        Args:
            contents: as of `encode`; known: what is restored elsewhere.
        """
        self._add(_reached(name, value, contents, known))

    def _add(self, ways: Iterable[tuple[Path, Any]]) -> None:
        for path, one in ways:
            if not self.paths(one):
                self._paths[id(one)], self._held[id(one)] = [], _held(one)
            self._paths[id(one)].append(path)
            self._at[path] = id(one)

    def at(self, path: Iterable[Any]) -> Any:
        """What was there; None where nothing was."""
        found = self._held.get(self._at.get(tuple(path), 0))
        return None if found is None else found()

    def paths(self, value: Any) -> list[Path]:
        """All ways to this very object."""
        held = self._held.get(id(value))
        return self._paths[id(value)] if held is not None and held() is value else []

    def exactly(self, paths: Iterable[Iterable[Any]]) -> Any:
        """The object to which these are all the ways; None if there is none."""
        wanted = {tuple(one) for one in paths}
        found = self.at(next(iter(wanted)))
        return found if found is not None and set(self.paths(found)) == wanted else None

    def all(self) -> Iterator[Any]:
        """What was found, and lives."""
        return (one for held in self._held.values() if (one := held()) is not None)

    def shared(self) -> Iterator[Any]:
        """What was found from more than one attribute."""
        for number, paths in self._paths.items():
            if len(paths) > 1 and len(names(paths)) > 1 and (found := self._held[number]()) is not None:
                yield found


class Common:
    """What attributes have in common, when some are written for another process and others are left as it has them.

    Args:
        began, start, now: places when the fit began, before its first step, and as they are written.
        own: attributes that can be written.
    """

    def __init__(self, began: Places, start: Places, now: Places, own: Collection[Name]) -> None:
        self._began, self._start, self._now, self._own = began, start, now, set(own)
        self._shared = [one for one in now.shared() if kinds.kind_of(type(one)) is not kinds.TUPLE]
        self._names = self._named()

    def with_others(self, carried: set[Name]) -> set[Name]:
        """Attributes that are to be written if these are.

        Also where no value has changed, but which of them are one thing has; and all that have a tensor in common.
        """
        carried = set(carried)
        for one in (*self._shared, *self._start.shared()):
            now, then = set(self._now.paths(one)), set(self._start.paths(one))
            if now != then and kinds.kind_of(type(one)) is not kinds.TUPLE:
                carried |= names(now | then) & self._own
        while True:
            more = set[Name]()
            for one in self._shared:
                its = names(self._now.paths(one))
                if its & carried and _is_numbers(one) and not self._as_began(one, carried):
                    more |= its & self._own
            if more <= carried:
                return carried
            carried |= more

    def torn(self, carried: set[Name]) -> set[Name]:
        """Those of them that have something in common with each other, or with others, that would be two things."""
        found = set[Name]()
        for one in self._shared:
            its = names(self._now.paths(one))
            if its & carried and not self._as_began(one, carried) and not (_is_numbers(one) and its <= carried):
                found |= its & carried
        return found

    def kept(self, value: Any, carried: set[Name]) -> list[Path]:
        """All ways to it when the fit began, if the new process's object there is to get its content."""
        paths = self._began.paths(value) if type(value) not in (tuple, frozenset) else []
        where, now = names(paths), names(self._now.paths(value))
        good = bool(where & now) and where - now <= carried and not any(None in path for path in paths)
        return paths if good else []

    def _as_began(self, value: Any, carried: set[Name]) -> bool:
        """Who has it now had it when the fit began."""
        return names(self._now.paths(value)) <= names(self.kept(value, carried))

    def name_of(self, value: Any) -> str:
        """Of a tensor that attributes have in common; empty if they do not."""
        return self._names.get(id(value), "")

    def _named(self) -> dict[int, str]:
        """By id. Those in one deque, say, have the same paths, and are told apart by the order they were found in."""
        found, same = dict[int, str](), Counter[str]()
        for one in filter(_is_numbers, self._shared):
            name = min(map(repr, self._now.paths(one)))
            found[id(one)] = f"{name} {same[name]}" if same[name] else name
            same[name] += 1
        return found

    def groups(self, carried: set[Name], unwritten: Collection[Name]) -> Iterator[set[Name]]:
        """Attributes that have something in common, or had when the fit began; unwritten: those stay as they are."""
        for one in (*self._shared, *self._began.shared()):
            its = names(self._now.paths(one)) | names(self.kept(one, carried))
            if its & carried and len(group := its & carried.union(unwritten)) > 1:
                yield group


def names(paths: Iterable[Path]) -> set[Name]:
    """The attributes from which they lead."""
    return {path[:2] for path in paths}


def _is_numbers(value: Any) -> bool:
    return kinds.kind_of(type(value)) in (kinds.TENSOR, kinds.NDARRAY)


def _held(value: Any) -> Callable[[], Any]:
    large = _is_numbers(value) and value.nbytes > Limits.single
    return weakly(value) if large else lambda: value


def _reached(
    name: Name, value: Any, contents: Callable[[Any, str], Any], known: Container[object], most: float = math.inf
) -> Iterator[tuple[Path, Any]]:
    """All that may change, once for each way to it. Raises TooMuch beyond `most` bytes."""
    stack: list[tuple[Path, Any]] = [(name, value)]
    seen, left = set[int](), _MOST
    while stack:
        path, one = stack.pop()
        one = one.found() if isinstance(one, Big) else one
        kind = kinds.kind_of(type(one))
        if kind in _NOT or one in known:
            continue
        yield path, one
        if id(one) in seen:
            continue
        seen.add(id(one))
        if most < math.inf and (most := most - _size(one, kind)) < 0:
            raise TooMuch(".".join(name))
        if kind not in _WITH_PARTS:
            continue
        try:
            count = len(one) if kind != kinds.OBJECT else 1
            if count > left:  # before it is copied
                continue
            left -= count
            content = contents(one, kind)
        except Exception:  # the user's object; KeyError where it was not recorded
            continue
        found = [((*path, key), part) for key, part in _parts(kind, content)]
        if kind != kinds.OBJECT and getattr(one, "__dict__", None):  # a list of the user's class, say
            found += [((*path, None), part) for part in kinds.attributes(one).values()]
        stack += found[::-1]


def _size(value: Any, kind: str) -> float:
    """Bytes that live as long as it, with texts, without other parts; no more than it has where it is written."""
    try:
        if _is_numbers(value):
            return value.nbytes if value.nbytes <= Limits.single else 0
        if kind in (kinds.BYTES, kinds.ARRAY):
            return memoryview(value).nbytes
        if kind not in _WITH_PARTS or (kind != kinds.OBJECT and len(value) > _HELD // 8):
            return 0 if kind not in _WITH_PARTS else math.inf
        own = kinds.attributes(value) if kind == kinds.OBJECT else value
        parts = (*dict.keys(own), *dict.values(own)) if isinstance(own, dict) else value
        texts = sum(len(one) for one in parts if isinstance(one, str | bytes))
        return texts if kind == kinds.OBJECT else texts + 8 * len(value)
    except Exception:  # the user's object
        return math.inf


def _parts(kind: str, content: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(content, dict):
        for key, part in content.items():
            if type(key) is tuple:
                yield None, key
            if not isinstance(part, _PLAINEST):
                yield key if type(key) is str or (type(key) is int and abs(key) < 1 << 63) else None, part
        return
    placed = kind in (kinds.LIST, kinds.TUPLE) and not isinstance(content, frozenset)
    for i, part in enumerate(entries_of(kind, content)):
        if not isinstance(part, _PLAINEST):
            yield i if placed else None, part


_PLAINEST = (type(None), int, float, str, bytes)
