"""The user's values of one rank for a process that takes the place of another one."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lastgasp.pytorch.uservalues import kinds
from lastgasp.pytorch.uservalues.contents import NOTHING, Row, can_be_copied, content_of, places_in, put
from lastgasp.pytorch.uservalues.kinds import put_attributes
from lastgasp.pytorch.uservalues.memory import overlapping
from lastgasp.pytorch.uservalues.places import Path, Places, Root

_OWN = (kinds.LEFT, kinds.UNKNOWN, kinds.MODULE)
"""Kinds that only their process can have."""


@dataclass(eq=False, slots=True)
class _Packed:
    """A value that may change; `content` is None where it is not handed over.

    Attributes:
        paths: all ways to it when training began, that lead to it in another process, too.
        extra: what a new one is made with; root: it is that root; own: attributes of a list of the user's class, say.
        is_view: it lies in the memory of something else, as a new one would not.
    """

    kind: str
    cls: type | None
    content: Any
    paths: list[Path] = field(default_factory=list)
    extra: Any = None
    root: str = ""
    own: dict[str, Any] = field(default_factory=dict)
    is_view: bool = False


_CONTAINERS = (kinds.LIST, kinds.DICT, kinds.SET, kinds.DEQUE)
_GONE = _Packed(kinds.LEFT, None, None)
_ITS_OWN = "its own"
"""A factory that only its process can have."""


def packed(roots: Iterable[Root], known: Iterable[object] = (), began: Places | None = None) -> bytes:
    """All values of the roots, as they stand now.

    Args:
        known: as of `UserValues`.
        began: where all was before the first step of this entry.

    Raises:
        Exception: of any kind, where an object of the user's cannot be pickled.
    """
    roots, known = list(roots), list(known)
    packing = _Packing(known, roots, began or Places())
    values = {
        root.name: {
            name: packing.packed(value) for name, value in content_of(root.value, kinds.OBJECT, root.skip).items()
        }
        for root in roots
    }
    return pickle.dumps((values, [*packing.done.values()]))


class _Packing:
    def __init__(self, known: Collection[object], roots: Collection[Root], began: Places) -> None:
        self._known, self._roots = {id(one) for one in known}, {id(one.value): one.name for one in roots}
        self._began, self._views = began, overlapping([*Places.of(roots, known).all(), *known])
        self.done: dict[int, _Packed] = {}

    def packed(self, value: Any) -> Any:
        kind, done = kinds.kind_of(type(value)), self.done
        if kind is kinds.PLAIN or id(value) in done:
            return value if kind is kinds.PLAIN else done[id(value)]
        if id(value) in self._roots:
            return _Packed(kinds.LEFT, None, None, root=self._roots[id(value)])
        numbers = kind in (kinds.TENSOR, kinds.NDARRAY)
        if kind in _OWN or id(value) in self._known or (numbers and not can_be_copied(value)):
            return _GONE
        paths = [path for path in self._began.paths(value) if None not in path] if kind is not kinds.TUPLE else []
        found = done[id(value)] = _Packed(kind, type(value), None, paths, _extra(value))
        found.is_view = id(value) in self._views
        content = content_of(value, kind)
        if isinstance(content, dict) and kind in (kinds.OBJECT, kinds.DICT):
            found.content = {key: self.packed(one) for key, one in content.items()}
        elif kind in (kinds.LIST, kinds.TUPLE, kinds.DEQUE, kinds.SET):
            found.content = [self.packed(one) for one in content]
        elif kind is kinds.TENSOR:
            found.content = (0, content[1].cpu())
        else:
            found.content = content
        if kind in _CONTAINERS and hasattr(value, "__dict__"):
            found.own = {name: self.packed(one) for name, one in kinds.attributes(value).items()}
        return found


def _extra(value: Any) -> Any:
    if isinstance(value, collections.deque):
        return value.maxlen
    if isinstance(value, Tensor):
        return value.requires_grad and value.is_leaf, value.device.type
    if isinstance(value, torch.Generator):
        return value.device.type
    factory = value.default_factory if isinstance(value, collections.defaultdict) else None
    try:
        pickle.dumps(factory)
    except Exception:  # a lambda
        return _ITS_OWN
    return factory


def fill(roots: Iterable[Root], data: bytes, began: Places | None = None) -> list[str]:
    """Give the roots of this process the values in `data`, which another rank of this very job has packed.

    What training there has left where it was when it began is filled here, so that whoever holds it has the values,
    too. All else is made anew: what stands in its place may be a constant of the script's.

    Args:
        began: where all was in this process, before the first step.

    Returns:
        Names of attributes that are others by it, numbers and texts aside: they may be the other rank's own.
    """
    (values, everything), named, roots = pickle.loads(data), list[str](), list(roots)
    filling = _Filling({root.name: root.value for root in roots}, everything, began or Places())
    for root in roots:
        now, wanted = content_of(root.value, kinds.OBJECT, root.skip), values.get(root.name, {})
        for name, value in wanted.items():
            before, filling.complete = _digest(now[name]) if name in now else b"", True
            found = filling.filled(now.get(name, _GONE), value)
            if found is _GONE:
                continue
            now[name] = found
            if isinstance(value, _Packed) and (before != _digest(found) or not filling.complete):
                named.append(f"{root.name}.{name}")
        put(Row(root.value, kinds.OBJECT, None, root.name), root.value, now, root.skip, remove=False)
    return named


def _digest(value: Any) -> bytes:
    return pickle.dumps(_Packing((), (), Places()).packed(value))


class _Filling:
    """Attributes: whether all has been there since this was set."""

    def __init__(self, roots: dict[str, Any], everything: list[_Packed], began: Places) -> None:
        self._roots, self._done, self._live = roots, dict[int, Any](), dict[int, Any]()
        self._used = {id(one) for one in roots.values()}
        self._partial = set[int]()
        self.complete = True
        for value in everything:  # before anything else is put to use: no two values become one thing
            for path in value.paths:
                if self._takes(one := began.at(path), value):
                    self._live[id(value)] = one
                    break

    def _takes(self, now: Any, value: _Packed) -> bool:
        if type(now) is not value.cls or id(now) in self._used or not _fits(now, value):
            return False
        self._used.add(id(now))
        return True

    def filled(self, now: Any, value: Any) -> Any:
        """What stands in the place of `now`."""
        if not isinstance(value, _Packed):
            return value
        complete, self.complete = self.complete, id(value) not in self._partial
        found = self._filled(now, value)
        if not self.complete:
            self._partial.add(id(value))
        self.complete = complete and self.complete
        return found

    def _filled(self, now: Any, value: _Packed) -> Any:
        if value.root:
            return self._roots.get(value.root, now)
        if value.content is None or value.cls is None:
            self.complete = self.complete and now is not _GONE
            return now
        if id(value) in self._done:
            return self._done[id(value)]
        if value.kind == kinds.TUPLE:
            self._done[id(value)] = found = self._tuple(now, value)
            return found
        live = self._live.get(id(value), _GONE)
        if live is _GONE and _is_partly(value) and self._takes(now, value):
            live = now  # it has a file here, say
        if live is _GONE and (value.extra == _ITS_OWN or value.is_view):
            self.complete = False
            return now
        try:
            live = _made(value) if live is _GONE else live
        except Exception:  # a class that makes none without arguments
            self.complete = False
            return now
        self._done[id(value)] = live
        content = self._content(live, value)
        if content is not None:
            put(Row(live, value.kind, None, ""), live, content, NOTHING, remove=False)
        if value.own:
            there = kinds.attributes(live)
            own = {name: self.filled(there.get(name, _GONE), one) for name, one in value.own.items()}
            put_attributes(live, {name: one for name, one in own.items() if one is not _GONE}, NOTHING, remove=False)
        return live

    def _tuple(self, now: Any, value: _Packed) -> Any:
        count = len(value.content)
        parts = now if isinstance(now, tuple | frozenset) and len(now) == count else (_GONE,) * count
        found = [self.filled(one, part) for one, part in zip(parts, value.content, strict=True)]
        if any(one is _GONE for one in found):
            return now
        assert value.cls is not None
        return value.cls(*found) if hasattr(value.cls, "_fields") else value.cls(found)

    def _content(self, live: Any, value: _Packed) -> Any:
        """None where it can only stay."""
        if value.kind in (kinds.OBJECT, kinds.DICT):
            there = content_of(live, value.kind)
            found = {key: self.filled(there.get(key, _GONE), one) for key, one in value.content.items()}
            found = {key: one for key, one in found.items() if one is not _GONE}
            return {**there, **found} if value.kind == kinds.OBJECT else found
        if value.kind not in (kinds.LIST, kinds.SET, kinds.DEQUE):
            return value.content
        there = dict(places_in(value.kind, content_of(live, value.kind)))
        same = len(there) == len(value.content)
        parts = [self.filled(there[i] if same else _GONE, one) for i, one in enumerate(value.content)]
        if any(one is _GONE for one in parts):
            return None
        return set(parts) if value.kind == kinds.SET else parts


def _is_partly(value: _Packed) -> bool:
    """Something in it was not handed over."""
    parts = value.content.values() if isinstance(value.content, dict) else value.content
    return value.kind in (kinds.OBJECT, kinds.DICT, kinds.LIST) and any(
        isinstance(one, _Packed) and one.cls is None and not one.root for one in parts
    )


def _fits(now: Any, value: _Packed) -> bool:
    if value.kind == kinds.TENSOR and (now.shape, now.dtype) != (value.content[1].shape, value.content[1].dtype):
        return False
    if value.kind == kinds.NDARRAY:
        return bool((now.shape, now.dtype, now.flags.writeable) == (value.content.shape, value.content.dtype, True))
    return bool(_extra(now) == value.extra)


def _made(value: _Packed) -> Any:
    """An object of that class, to be filled."""
    cls: Any = value.cls
    if value.kind == kinds.TENSOR:
        trained, device = value.extra
        return value.content[1].to(device, copy=True).requires_grad_(trained)
    if value.kind == kinds.NDARRAY:
        return value.content.copy()
    if value.kind == kinds.GENERATOR:
        return torch.Generator(value.extra)
    if cls is np.random.Generator:
        return cls(getattr(np.random, value.content["bit_generator"])())
    if value.kind == kinds.ARRAY:
        return value.content[:]
    if cls is collections.deque:
        return cls(maxlen=value.extra)
    if cls is collections.defaultdict:
        return cls(value.extra)
    return cls.__new__(cls) if value.kind == kinds.OBJECT else cls()
