"""The user's values of one rank for a process that takes the place of another one."""

from __future__ import annotations

import collections
import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from lastgasp.pytorch.uservalues import kinds
from lastgasp.pytorch.uservalues.contents import NOTHING, Row, can_be_copied, content_of, places_in, put
from lastgasp.pytorch.uservalues.keeper import Root

_OWN = (kinds.LEFT, kinds.UNKNOWN, kinds.MODULE)
"""Kinds that only their process can have."""


@dataclass(eq=False, slots=True)
class _Packed:
    """A value that may change; `content` is None where it is not handed over."""

    kind: str
    cls: type | None
    content: Any


_GONE = _Packed(kinds.LEFT, None, None)


def packed(roots: Iterable[Root], known: Iterable[object] = ()) -> bytes:
    """All values of the roots, as they stand now.

    Args:
        known: as of `UserValues`.

    Raises:
        Exception: of any kind, where an object of the user's cannot be pickled.
    """
    left_out = {id(one) for one in known}
    done: dict[int, _Packed] = {}
    values = {
        root.name: {
            name: _packed(value, done, left_out)
            for name, value in content_of(root.value, kinds.OBJECT, root.skip).items()
        }
        for root in roots
    }
    return pickle.dumps(values)


def _packed(value: Any, done: dict[int, _Packed], known: set[int]) -> Any:
    kind = kinds.kind_of(type(value))
    if kind is kinds.PLAIN or id(value) in done:
        return value if kind is kinds.PLAIN else done[id(value)]
    numbers = kind in (kinds.TENSOR, kinds.NDARRAY)
    if kind in _OWN or id(value) in known or (numbers and not can_be_copied(value)):
        return _GONE
    found = done[id(value)] = _Packed(kind, type(value), None)
    content = content_of(value, kind)
    if isinstance(content, dict) and kind in (kinds.OBJECT, kinds.DICT):
        found.content = {key: _packed(one, done, known) for key, one in content.items()}
    elif kind in (kinds.LIST, kinds.TUPLE, kinds.DEQUE, kinds.SET):
        found.content = [_packed(one, done, known) for one in content]
    elif kind is kinds.TENSOR:
        found.content = (0, content[1].cpu())
    else:
        found.content = content
    return found


def fill(roots: Iterable[Root], data: bytes) -> list[str]:
    """Give the roots of this process the values in `data`, which another rank of this very job has packed.

    What is there already is filled, so that whoever holds it has the values, too.

    Returns:
        Names of attributes that are others by it, numbers and texts aside: they may be the other rank's own.
    """
    values, done, named = pickle.loads(data), dict[int, Any](), list[str]()
    for root in roots:
        now, wanted = content_of(root.value, kinds.OBJECT, root.skip), values.get(root.name, {})
        for name, value in wanted.items():
            before = _digest(now[name]) if name in now else b""
            found = _filled(now.get(name, _GONE), value, done)
            if found is _GONE:
                continue
            now[name] = found
            if isinstance(value, _Packed) and before != _digest(found):
                named.append(f"{root.name}.{name}")
        put(Row(root.value, kinds.OBJECT, None, root.name), root.value, now, root.skip, remove=False)
    return named


def _digest(value: Any) -> bytes:
    return pickle.dumps(_packed(value, {}, set()))


def _filled(now: Any, value: Any, done: dict[int, Any]) -> Any:
    """What stands in the place of `now`: `now` itself with the content of `value` where that can be."""
    if not isinstance(value, _Packed):
        return value
    if value.content is None or value.cls is None:
        return now
    if id(value) in done:
        return done[id(value)]
    if value.kind == kinds.TUPLE:
        return _tuple(now, value, done)
    live = now if type(now) is value.cls and _fits(now, value) else _made(value)
    done[id(value)] = live
    content = _content(live, value, done)
    if content is not None:
        put(Row(live, value.kind, None, ""), live, content, NOTHING, remove=False)
    return live


def _tuple(now: Any, value: _Packed, done: dict[int, Any]) -> Any:
    count = len(value.content)
    parts = now if isinstance(now, tuple | frozenset) and len(now) == count else (_GONE,) * count
    found = [_filled(one, part, done) for one, part in zip(parts, value.content, strict=True)]
    if any(one is _GONE for one in found):
        return now
    assert value.cls is not None
    return value.cls(*found) if hasattr(value.cls, "_fields") else value.cls(found)


def _content(live: Any, value: _Packed, done: dict[int, Any]) -> Any:
    """None where it can only stay."""
    if value.kind in (kinds.OBJECT, kinds.DICT):
        there = content_of(live, value.kind)
        found = {key: _filled(there.get(key, _GONE), one, done) for key, one in value.content.items()}
        found = {key: one for key, one in found.items() if one is not _GONE}
        return {**there, **found} if value.kind == kinds.OBJECT else found
    if value.kind not in (kinds.LIST, kinds.SET, kinds.DEQUE):
        return value.content
    there = dict(places_in(value.kind, content_of(live, value.kind)))
    same = len(there) == len(value.content)
    parts = [_filled(there[i] if same else _GONE, one, done) for i, one in enumerate(value.content)]
    if any(one is _GONE for one in parts):
        return None
    return set(parts) if value.kind == kinds.SET else parts


def _fits(now: Any, value: _Packed) -> bool:
    return value.kind != kinds.TENSOR or (now.shape, now.dtype) == _form(value)


def _form(value: _Packed) -> tuple[Any, Any]:
    return value.content[1].shape, value.content[1].dtype


def _made(value: _Packed) -> Any:
    """An object of that class, to be filled."""
    cls: Any = value.cls
    if value.kind == kinds.TENSOR:
        return value.content[1].clone()
    if value.kind == kinds.NDARRAY:
        return value.content.copy()
    if value.kind == kinds.GENERATOR:
        return torch.Generator()
    if value.kind == kinds.ARRAY:
        return value.content[:]
    if cls in (collections.defaultdict, collections.deque) or value.kind != kinds.OBJECT:
        return cls()
    return cls.__new__(cls)
