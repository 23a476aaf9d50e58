"""Values as bytes for another process, which may be of another script: no class is imported for them, or unpickled.

What the reader can make by itself is a number, a text, a built-in container, a tensor or an array. An object of any
other class, a random generator for one, only gets its content where the reader has one of this class in that place.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from lastgasp.pytorch.uservalues import kinds
from lastgasp.pytorch.uservalues.contents import NOTHING, Big, Row, bytes_of, can_be_copied, content_of, put

Contents = Callable[[Any, str], Any]
"""What is in a value of a kind, as of `content_of`; raises KeyError where it is not known."""

_INT, _COMPLEX, _SCALAR, _SAME = "int", "complex", "scalar", "same"
_MADE: dict[str, Callable[[], Any]] = {
    "builtins.list": list, "builtins.dict": dict, "builtins.set": set, "builtins.tuple": tuple,
    "builtins.frozenset": frozenset, "collections.OrderedDict": collections.OrderedDict,
    "collections.Counter": collections.Counter, "collections.deque": collections.deque,
    "collections.defaultdict": collections.defaultdict,
}  # fmt: skip
_FACTORIES = {f"builtins.{one.__name__}": one for one in (int, float, list, dict, set)}
_CONTAINERS = (kinds.LIST, kinds.DICT, kinds.SET, kinds.DEQUE, kinds.TUPLE)
_NUMBERS = (kinds.TENSOR, kinds.NDARRAY)
_NUMBERS_MADE = {"torch.Tensor", "numpy.ndarray"}
RANDOM = (kinds.GENERATOR, kinds.RANDOM, kinds.NUMPY_RANDOM)


class NotPortable(Exception):
    """It cannot be written, or there is nothing that could take it."""


def encode(
    value: Any, contents: Contents, known: Container[object] = (), limit: int = 4 << 20
) -> tuple[bytes, list[Any]]:
    """The bytes of a value, the same in every process, and the objects in it, but for numbers and texts.

    Args:
        contents: gives what is in it.
        known: what is restored elsewhere; a value that refers to it is not written.
        limit: greatest number of bytes.

    Raises:
        NotPortable: something in it is of another kind, or it is too large.
        KeyError: of `contents`.
    """
    writer = _Writer(contents, known, limit)
    node = writer.node(value)
    data = msgspec.msgpack.encode(node)
    if len(data) > limit:
        raise NotPortable("it is too large")
    return data, writer.objects


def can_be_made(value: Any) -> bool:
    """Whether the reader can make one of its kind, where it is given none."""
    cls = type(value)
    if f"{cls.__module__}.{cls.__qualname__}" not in _MADE.keys() | _NUMBERS_MADE:
        return False
    return cls is not collections.defaultdict or _extra(value) in (None, *_FACTORIES)


def decode(
    data: bytes, device: torch.device, here: Mapping[int, Any]
) -> tuple[Any, Callable[[], None], list[Any]]:
    """The value, what puts the contents into it, and its objects. Nothing has changed before that is called.

    Args:
        device: of tensors that were on one.
        here: by the number of an object, as in the list that `encode` returned: what is filled instead of made, so that
            whoever holds it has the values, too. No two are the same. Of a tuple it is the class that is taken.

    Raises:
        NotPortable: there is nothing that could take it.
        ValueError: not the bytes of a value.
    """
    reader = _Reader(device, here)
    found = reader.build(msgspec.msgpack.decode(data))

    def fill() -> None:
        for row, content in reader.puts:
            put(row, row.value, content, NOTHING, remove=True)

    return found, fill, reader.done


class _Writer:
    def __init__(self, contents: Contents, known: Container[object], limit: int) -> None:
        self._contents, self._known, self._left = contents, known, limit
        self._places: dict[int, int] = {}
        self.objects: list[Any] = []

    def node(self, value: Any) -> Any:
        value = value.found() if isinstance(value, Big) else value
        kind, cls = kinds.kind_of(type(value)), type(value)
        if kind is kinds.PLAIN:
            return self._plain(value)
        if id(value) in self._places:
            return [_SAME, self._places[id(value)]]
        if value in self._known:
            raise NotPortable("it refers to what is restored elsewhere")
        self._places[id(value)] = len(self._places)
        self.objects.append(value)
        name = f"{cls.__module__}.{cls.__qualname__}"
        if kind in _NUMBERS:
            return [kind, name, *self._numbers(value, kind)]
        if kind in RANDOM:
            return [kind, name, encode(self._contents(value, kind), content_of)[0]]
        if kind not in _CONTAINERS and kind is not kinds.OBJECT:
            raise NotPortable(f"it has a {cls.__name__}")
        return [kind, name, self._parts(kind, value), _extra(value)]

    def _parts(self, kind: str, value: Any) -> list[Any]:
        if kind is not kinds.OBJECT:
            self._take(8 * len(value))  # before it is copied
            if getattr(value, "__dict__", {}).keys() - {"__orig_class__"}:  # which `Counter[str]()` has
                raise NotPortable(f"it has a {type(value).__name__} with attributes")
        content = self._contents(value, kind)
        if isinstance(content, dict):
            return [[self.node(key), self.node(one)] for key, one in content.items()]
        if kind is kinds.SET or isinstance(value, frozenset):
            content = self._sorted(content)
        return [self.node(one) for one in content]

    def _sorted(self, content: Iterable[Any]) -> list[Any]:
        """Members of a set in an order that is the same in every process; in it they are numbered, and read."""
        keyed = [(encode(one, self._contents, self._known, self._left)[0], one) for one in content]
        keyed.sort(key=lambda pair: pair[0])
        return [one for _, one in keyed]

    def _plain(self, value: Any) -> Any:
        if value is None or type(value) in (bool, float, str, bytes):
            self._take(len(value) if isinstance(value, str | bytes) else 1)
            return value
        if type(value) is int:
            self._take(1)
            return value if -(1 << 63) <= value < 1 << 63 else [_INT, hex(value)]
        if type(value) is complex:
            return [_COMPLEX, value.real, value.imag]
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return [_SCALAR, value.dtype.str, value.tobytes()]
        raise NotPortable(f"it has a {type(value).__name__}")

    def _numbers(self, value: Any, kind: str) -> list[Any]:
        if type(value) is np.memmap or not can_be_copied(value) or (
            isinstance(value, np.ndarray) and value.dtype.kind not in "biufc"
        ):  # fmt: skip
            raise NotPortable(f"it has a {type(value).__name__} of another kind")
        self._take(value.nbytes)
        content = self._contents(value, kind)
        if isinstance(value, np.ndarray):
            return [value.dtype.str, list(value.shape), content.tobytes()]
        copy = content[1] if content[1] is not None else value  # one of a long container, which has not changed
        data = bytes_of(copy.detach().resolve_conj().resolve_neg())
        return [str(value.dtype).removeprefix("torch."), list(value.shape), data, value.device.type, _trained(value)]

    def _take(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise NotPortable("it is too large")


def _extra(value: Any) -> Any:
    """What a new one is made with, where it needs something."""
    if type(value) is collections.deque:
        return value.maxlen
    factory = value.default_factory if type(value) is collections.defaultdict else None
    if factory is None:
        return None
    return f"{factory.__module__}.{factory.__qualname__}" if isinstance(factory, type) else "a function"


_UNDONE = object()


class _Reader:
    def __init__(self, device: torch.device, here: Mapping[int, Any]) -> None:
        self._device, self._here = device, here
        self.done: list[Any] = []
        self.puts: list[tuple[Row, Any]] = []

    def build(self, node: Any) -> Any:
        if not isinstance(node, list):
            return node
        kind, *rest = node
        if kind == _SAME:
            if self.done[rest[0]] is _UNDONE:
                raise NotPortable("a tuple that is in itself")
            return self.done[rest[0]]
        if kind == _INT:
            return int(rest[0], 16)
        if kind == _COMPLEX:
            return complex(*rest)
        if kind == _SCALAR:
            return np.frombuffer(rest[1], np.dtype(rest[0]))[0]
        name, content, *more = rest
        place = len(self.done)
        self.done.append(_UNDONE)
        there = self._here.get(place)
        if there is not None and f"{type(there).__module__}.{type(there).__qualname__}" != name:
            raise NotPortable(f"there is a {type(there).__name__} instead of a {name}")
        if kind in _NUMBERS:
            self.done[place] = found = self._numbers(kind, name, there, content, *more)
        elif kind == kinds.TUPLE:
            self.done[place] = found = self._tuple(name, there, content)
        elif kind in RANDOM:
            self.done[place] = found = _needed(there, name)
            state, fill, _ = decode(content, self._device, {})
            fill()
            self._put(found, kind, state)
        else:
            if there is not None and _extra(there) != more[0]:
                raise NotPortable(f"there is a {name} of another kind")
            self.done[place] = found = there if there is not None else _new(name, more[0])
            self._put(found, kind, self._parts(kind, content))
        return found

    def _put(self, value: Any, kind: str, content: Any) -> None:
        self.puts.append((Row(value, kind, None, ""), content))

    def _parts(self, kind: str, content: list[Any]) -> Any:
        if kind in (kinds.OBJECT, kinds.DICT):
            pairs = [(self.build(key), self.build(one)) for key, one in content]
            return dict(pairs)
        parts = [self.build(one) for one in content]
        return set(parts) if kind == kinds.SET else parts

    def _tuple(self, name: str, there: Any, content: list[Any]) -> Any:
        parts = [self.build(one) for one in content]
        cls: Any = type(there) if there is not None else _MADE.get(name)
        if cls is None:
            raise NotPortable(f"a {name} is not made from a file")
        return cls(*parts) if hasattr(cls, "_fields") else cls(parts)

    def _numbers(
        self, kind: str, name: str, there: Any, dtype: str, shape: list[int], data: bytes, device: str = "cpu",
        trained: bool = False,
    ) -> Any:  # fmt: skip
        if there is None and name not in _NUMBERS_MADE:
            raise NotPortable(f"there is no {name} that could take it")
        if kind == kinds.NDARRAY:
            array = np.frombuffer(data, np.dtype(dtype)).reshape(shape).copy()
            if there is None:
                return array
            if (there.shape, there.dtype) != (array.shape, array.dtype) or not (
                there.flags.writeable or there.tobytes() == data
            ):
                raise NotPortable("there is an array of another form")
            self._put(there, kind, array)
            return there
        tensor = _tensor(dtype, shape, data)
        if there is None:
            return (tensor if device == "cpu" else tensor.to(self._device)).requires_grad_(trained)
        form = (there.dtype, there.device.type, _trained(there))
        if form != (tensor.dtype, device, trained) or not can_be_copied(there):
            raise NotPortable("there is a tensor of another form")
        self._put(there, kind, (0, tensor.to(there.device)))
        return there


def _trained(value: Tensor) -> bool:
    """A tensor that asks for gradients itself; what was computed from others goes on without them."""
    return value.requires_grad and value.is_leaf


def _needed(there: Any, name: str) -> Any:
    if there is None:
        raise NotPortable(f"there is no {name} that could take it")
    return there


def _new(name: str, extra: Any) -> Any:
    if name not in _MADE:
        raise NotPortable(f"there is no {name} that could take it")
    if name == "collections.deque":
        return collections.deque(maxlen=extra)
    if name == "collections.defaultdict":
        if extra is not None and extra not in _FACTORIES:
            raise NotPortable(f"a defaultdict of {extra}")
        return collections.defaultdict(None if extra is None else _FACTORIES[extra])
    return _MADE[name]()


def _tensor(dtype: str, shape: list[int], data: bytes) -> Tensor:
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or len(data) != math.prod(shape) * kind.itemsize:
        raise ValueError("not the bytes of a tensor")
    found = torch.empty(shape, dtype=kind)
    if data:
        found.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return found
