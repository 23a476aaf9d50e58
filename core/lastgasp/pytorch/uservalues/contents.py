"""What is recorded of one value, how it is compared, and how it is put back into the same object."""

from __future__ import annotations

import collections
import pickle
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from lastgasp.pytorch.uservalues import kinds
from lastgasp.pytorch.uservalues.kinds import attributes, put_attributes

NOTHING: frozenset[str] = frozenset()
PARTS = (kinds.OBJECT, kinds.MODULE, kinds.DICT, kinds.LIST)
"""Kinds whose parts have places."""
MODULES_OWN = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules", "training"}


class Row(NamedTuple):
    """One value at a boundary."""

    value: Any
    kind: str
    content: Any
    label: str


@dataclass
class Big:
    """A tensor or an array that is too large to be copied in each step, and is expected not to change.

    Attributes:
        version: torch's count of changes; -1 where there is none.
        digest: of what is in it, once it was there in two steps; empty where it is on a device, or too large.
    """

    found: Callable[[], Any]
    label: str
    nbytes: int
    version: int
    digest: bytes | None = None

    def changed(self) -> str:
        """Why it cannot be what it was at the boundary; empty if it is."""
        value, what = self.found(), f"{self.label} ({self.nbytes / 1e6:.3g} MB, too large to be copied in each step)"
        if value is None:
            return f"{what} was replaced by another one in the step"
        if version_of(value) != self.version:
            return f"{what} has changed"
        if self.digest is None:
            return "" if isinstance(value, Tensor) else f"{what} may have changed"
        return f"{what} has changed" if self.digest and digest_of(value) != self.digest else ""


@dataclass
class Long:
    """A long list or dict, which is expected to change at its end alone.

    Attributes:
        items: what was in it at the boundary, a list or dict of its own.
        rows: of what can change in its items, from when each was new.
        verified: it was compared with all that is known since the boundary.
        copied: bytes of tensors in `rows`.
    """

    value: Any
    label: str
    items: Any
    rows: list[Row] = field(default_factory=list)
    verified: bool = False
    copied: int = 0

    def grown(self) -> list[Any] | None:
        """What has come to its end since the last boundary; None if it has changed in another way."""
        now, known = len(self.value), len(self.items)
        if now < known or not known:
            return None
        if isinstance(self.items, list):
            if self.value[known - 1] is not self.items[-1] or self.value[0] is not self.items[0]:
                return None
            new: list[Any] = self.value[known:]
            self.items += new
            return new
        tail = list(islice(reversed(self.value.items()), now - known + 1))
        key, value = tail.pop()
        last = next(reversed(self.items))
        if key is not last or value is not self.items[last]:
            return None
        self.items.update(reversed(tail))
        return [value for _, value in reversed(tail)]

    def moves(self) -> bool:
        """Whether its items change in place, as far as the first and the last one tell."""
        return any(
            version_of(row.value) != row.content[0] if row.kind == kinds.TENSOR else not same(row)
            for row in {id(row): row for row in (*self.rows[:1], *self.rows[-1:])}.values()
        )

    def changed(self) -> str:
        """Why its items cannot be known; empty if they are."""
        live, known = self.value, len(self.items)
        if isinstance(self.items, list):
            good = len(live) >= known and all(map(is_, live, self.items))
        else:
            first = list(islice(live.items(), known))
            good = len(first) == known and all(
                a is b and v is w for (a, v), (b, w) in zip(first, self.items.items(), strict=True)
            )
        if good and all(map(same, self.rows)):
            return ""
        return f"{self.label}, a {type(live).__name__} of {known} entries, was changed other than at its end"


def entries_of(kind: str, content: Any) -> Iterable[Any]:
    """The values in it."""
    if kind in (kinds.OBJECT, kinds.MODULE, kinds.DICT):
        return content.values() if isinstance(content, dict) else ()
    return content if kind in (kinds.LIST, kinds.SET, kinds.DEQUE, kinds.TUPLE) else ()


def places_in(kind: str, content: Any) -> Iterable[tuple[Any, Any]]:
    """The values in it that have a place, and where."""
    if isinstance(content, dict):
        return content.items()
    return enumerate(content) if kind is kinds.LIST else ()


def content_of(value: Any, kind: str, skip: frozenset[str] = NOTHING) -> Any:
    """What is recorded: references to what is in it, or a copy where it has none; without attributes of `skip`."""
    if kind in _WITH_NAMES:
        return attributes(value, skip or MODULES_OWN if kind is kinds.MODULE else skip)
    return _TAKE[kind](value)


def put(row: Row, value: Any, content: Any, skip: frozenset[str], remove: bool) -> None:
    """Have `value`, which is of the row's kind, this content; remove: attributes that it has besides are removed."""
    if row.kind in _WITH_NAMES:
        put_attributes(value, content, skip or MODULES_OWN if row.kind is kinds.MODULE else skip, remove)
    else:
        _PUT[row.kind](value, content)


def same(row: Row) -> bool:
    """Whether the value of a row is as it was recorded."""
    if row.kind == kinds.TENSOR:
        version, copy = row.content
        return version_of(row.value) == version and (copy is None or bytes_of(row.value) == bytes_of(copy))
    now = content_of(row.value, row.kind)
    if isinstance(now, dict):
        pairs = zip(now.items(), row.content.items(), strict=False)
        return len(now) == len(row.content) and all(a is b and v is w for (a, v), (b, w) in pairs)
    if isinstance(now, list | tuple) and row.kind != kinds.RANDOM:
        return len(now) == len(row.content) and all(map(is_, now, row.content))
    if isinstance(now, set):
        return bool(now == row.content)
    return pickle.dumps(now) == pickle.dumps(row.content)


def version_of(value: Any) -> int:
    """How often a tensor was changed in place, as torch counts."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else -1


def bytes_of(value: Tensor) -> bytes:
    """Of a tensor's elements."""
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()


def digest_of(value: Any) -> bytes:
    """Of the elements of a tensor or an array in host memory."""
    if isinstance(value, Tensor):
        value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_128_digest(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def in_host_memory(value: Any) -> bool:
    """Not on a device, where looking at it may wait for what never ends."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def weakly(value: Any) -> Callable[[], Any]:
    """Does not keep it alive."""
    return weakref.ref(value)


def can_be_copied(value: Any) -> bool:
    """A dense tensor, or an array of numbers."""
    if isinstance(value, Tensor):
        return value.layout is torch.strided and not value.is_meta and not value.is_quantized
    return not value.dtype.hasobject


def _dict(value: Any) -> dict[Any, Any]:
    return (
        dict(collections.OrderedDict.items(value)) if isinstance(value, collections.OrderedDict) else dict.copy(value)
    )


def _put_list(value: Any, content: list[Any]) -> None:
    if len(value) != len(content) or not all(map(is_, value, content)):
        list.__setitem__(value, slice(None), content)


def _put_dict(value: Any, content: dict[Any, Any]) -> None:
    now = _dict(value)
    if len(now) == len(content) and all(map(is_, now, content)) and all(map(is_, now.values(), content.values())):
        return
    owner: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
    owner.clear(value)
    for key, v in content.items():
        owner.__setitem__(value, key, v)


def _put_set(value: Any, content: set[Any]) -> None:
    set.clear(value)
    set.update(value, content)


def _put_deque(value: Any, content: Collection[Any]) -> None:
    collections.deque.clear(value)
    collections.deque.extend(value, content)


def _put_bytes(value: Any, content: bytes) -> None:
    if value != content:
        value[:] = content


def _tensor(value: Tensor) -> tuple[int, Tensor]:
    return version_of(value), value.detach().clone()


def _put_tensor(value: Tensor, content: tuple[int, Tensor]) -> None:
    copy = content[1]
    if value.shape == copy.shape and value.dtype == copy.dtype and value.device == copy.device:
        if not in_host_memory(value) or bytes_of(value) != bytes_of(copy):
            with torch.inference_mode(value.is_inference()), torch.no_grad():
                value.detach().copy_(copy)
    else:
        value.data = copy.clone()


def _put_ndarray(value: np.ndarray[Any, Any], content: np.ndarray[Any, Any]) -> None:
    if value.flags.writeable:
        if value.shape != content.shape:
            value.resize(content.shape, refcheck=False)
        np.copyto(value, content)


def _numpy_random(value: Any) -> Any:
    found = value if isinstance(value, np.random.BitGenerator) else getattr(value, "bit_generator", None)
    return value.get_state(legacy=False) if found is None else found.state


def _put_numpy_random(value: Any, content: Any) -> None:
    if isinstance(value, np.random.RandomState):
        value.set_state(content)
    else:
        found = value if isinstance(value, np.random.BitGenerator) else value.bit_generator
        found.state = content


_WITH_NAMES = (kinds.OBJECT, kinds.MODULE)
_TAKE: dict[str, Callable[[Any], Any]] = {
    kinds.LIST: lambda v: list.copy(v), kinds.DICT: _dict,
    kinds.SET: lambda v: set.copy(v), kinds.DEQUE: list, kinds.TUPLE: tuple, kinds.BYTES: bytes,
    kinds.ARRAY: lambda v: v[:], kinds.TENSOR: _tensor, kinds.NDARRAY: lambda v: v.copy(),
    kinds.GENERATOR: lambda v: v.get_state(), kinds.RANDOM: lambda v: v.getstate(), kinds.NUMPY_RANDOM: _numpy_random,
}  # fmt: skip
_PUT: dict[str, Callable[[Any, Any], object]] = {
    kinds.LIST: _put_list, kinds.DICT: _put_dict, kinds.SET: _put_set, kinds.DEQUE: _put_deque,
    kinds.TUPLE: lambda value, content: None, kinds.BYTES: _put_bytes, kinds.ARRAY: _put_bytes,
    kinds.TENSOR: _put_tensor, kinds.NDARRAY: _put_ndarray, kinds.GENERATOR: lambda v, state: v.set_state(state),
    kinds.RANDOM: lambda v, state: v.setstate(state), kinds.NUMPY_RANDOM: _put_numpy_random,
}  # fmt: skip
