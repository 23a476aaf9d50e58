"""Whether a value that cannot be written has changed, as far as its own process can tell."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import xxhash

from lastgasp.pytorch.uservalues import kinds
from lastgasp.pytorch.uservalues.contents import Big, bytes_of, can_be_copied, content_of, version_of
from lastgasp.pytorch.uservalues.portable import RANDOM, Contents, encode

_OTHERS = (kinds.LEFT, kinds.UNKNOWN, kinds.MODULE)
_NUMBERS = (kinds.TENSOR, kinds.NDARRAY)


@dataclass(frozen=True)
class Told:
    """Attributes: digest of all in it that can be told; the objects of which it can only be told which they are.

    It equals nothing where the digest is empty.
    """

    digest: bytes
    others: list[weakref.ref[Any]]

    def __eq__(self, now: object) -> bool:
        if not isinstance(now, Told) or not self.digest or self.digest != now.digest:
            return False
        return all(a() is b() is not None for a, b in zip(self.others, now.others, strict=True))


def told(value: Any, contents: Contents, known: Container[object], apart: Collection[int], limit: int) -> Told:
    """What there is to tell. Never raises.

    Args:
        contents, known: as of `encode`; apart: ids of what another attribute restores.
        limit: bytes that are looked at, about.
    """
    telling = _Telling(contents, known, apart, limit)
    try:
        data = msgspec.msgpack.encode(telling.node(value))
        return Told(xxhash.xxh3_128_digest(data), [weakref.ref(one) for one in telling.others])
    except Exception:  # the user's objects
        return Told(b"", [])


class _Telling:
    def __init__(self, contents: Contents, known: Container[object], apart: Collection[int], limit: int) -> None:
        self._contents, self._known, self._apart, self._left = contents, known, apart, limit
        self._places: dict[int, int] = {}
        self.others: list[Any] = []

    def node(self, value: Any) -> Any:
        value = value.found() if isinstance(value, Big) else value
        kind, cls = kinds.kind_of(type(value)), type(value)
        name = f"{cls.__module__}.{cls.__qualname__}"
        if kind is kinds.PLAIN:
            return self._plain(value, name)
        if id(value) in self._places:
            return self._places[id(value)]
        self._places[id(value)] = len(self._places)
        left = kind in _OTHERS or (kind in _NUMBERS and not can_be_copied(value))
        if left or id(value) in self._apart or value in self._known:
            if not cls.__weakrefoffset__:
                return [name, id(value)]
            self.others.append(value)
            return [name]
        if kind in _NUMBERS:
            return self._numbers(value, kind, name)
        content = self._contents(value, kind)
        if kind in (kinds.BYTES, kinds.ARRAY):
            self._left -= memoryview(content).nbytes
            return [name, len(content), bytes(content) if self._left >= 0 else None]
        if kind in RANDOM:
            return [name, encode(content, content_of)[0]]
        parts = self._parts(value, content)
        if kind is not kinds.OBJECT and getattr(value, "__dict__", None):  # a list of the user's class, say
            parts.append(self._parts(value, self._contents(value, kinds.OBJECT)))
        return [name, *parts]

    def _plain(self, value: Any, name: str) -> Any:
        if isinstance(value, str | bytes):
            self._left -= len(value)
        return [name, len(value) if isinstance(value, str | bytes) and self._left < 0 else repr(value)]

    def _numbers(self, value: Any, kind: str, name: str) -> Any:
        form = [name, str(value.dtype), list(value.shape)]
        self._left -= value.nbytes
        if self._left < 0:
            return [*form, version_of(value)]
        content = self._contents(value, kind)
        if isinstance(value, torch.Tensor):
            return [*form, bytes_of(value if content[1] is None else content[1])]
        return [*form, content.tobytes()]

    def _parts(self, value: Any, content: Any) -> list[Any]:
        self._left -= 8 * len(content)
        parts: list[Any] = [len(content)]
        if isinstance(value, set | frozenset) and self._left >= 0:  # whose order depends on what was in them before
            content = sorted(content, key=repr)
        for one in (entry for pair in content.items() for entry in pair) if isinstance(content, dict) else content:
            if self._left < 0:
                break
            parts.append(self.node(one))
        return parts
