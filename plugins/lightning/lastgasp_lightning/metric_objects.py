"""What torchmetrics objects of the module have accumulated, as bytes of each rank (given back by `metrics_again`).

No checkpoint of Lightning's has it, so that a metric of an epoch would begin anew in its middle. Each rank has its
own: they are put together over the ranks where the metric is computed. With them go the entries of `self.log` that
hold such objects, by which Lightning logs them when the epoch ends.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import struct
import weakref
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lastgasp_lightning.metrics import PerStep, meta_of

log = logging.getLogger("lastgasp")

LIMIT = 1 << 20
"""Bytes of one rank's that are kept at each step; metrics that do not fit are left out, and named."""
OF_ALL = 64 << 20
"""The same of all ranks, whose auxiliary states go to a saver in one message."""

_PER_ITEM = 64
"""Bytes that an item of a list counts for besides: all are looked at in each step."""
LENGTH = struct.Struct("<I")
_LOOKED_INTO = 64
_PLAIN = (bool, int, float, str, type(None))
_IN_NUMPY = {getattr(torch, name): name for name in ("float32", "int64", "float64", "int32", "bool", "uint8")}


class _Bare(Metric):
    """What each metric has."""

    def update(self) -> None:
        """Nothing."""

    def compute(self) -> None:
        """Nothing."""


_BASE = frozenset(vars(_Bare()))


class Numbers(msgspec.Struct, array_like=True, frozen=True):
    """A tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Held(msgspec.Struct, array_like=True):
    """What one metric holds.

    Args:
        plain: attributes that are no states; lists: `Numbers` one behind the other; made: as `made_of` says.
    """

    count: int
    plain: dict[str, bool | int | float | str | None]
    tensors: dict[str, Numbers]
    lists: dict[str, bytes]
    made: str = ""


class Row(msgspec.Struct, array_like=True):
    """An entry of `self.log` that holds a metric."""

    key: str
    meta: dict[str, Any]
    reset: bool
    cache: Numbers | None


class Objects(msgspec.Struct, array_like=True):
    """Of one rank.

    Args:
        metrics: by name in the module; left: names of those that are left out.
        order: keys of all entries of `self.log`, in the order in which they are logged.
        groups: by a collection's name, which of its metrics share a state.
        behind: as `PerStep.behind`.
    """

    metrics: dict[str, Held]
    left: list[str]
    rows: list[Row]
    order: list[str]
    groups: dict[str, list[list[str]]]
    behind: bool = False


_decode, _encode = msgspec.msgpack.Decoder(Objects).decode, msgspec.msgpack.Encoder().encode


class OwnObjects(PerStep):
    """This rank's metrics, as bytes for its auxiliary state. Those on an accelerator are left out, as in its base."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._module: nn.Module = trainer.lightning_module
        self._limit = min(LIMIT, OF_ALL // trainer.world_size)
        self._seen: tuple[list[Any], list[int]] = [], []
        self._growing: dict[tuple[str, str], _Growing] = {}
        self._left: list[str] = []
        self._metrics: dict[str, _One] = {}
        self._links: list[tuple[dict[str, Any], str, nn.Module | None]] = [({}, "", self._module)]
        self.encode()  # what attributes are as training begins

    def known(self) -> dict[str, Any]:
        """For the record of a checkpoint: whether the module has metrics (all ranks' has), and which are not kept."""
        return {"objects": bool(self._metrics), "unsaved": self.unsaved()}

    def encode(self) -> bytes:
        """What they hold now; the same object as before if nothing has changed."""
        try:
            if self._links and not all(holder.get(key) is one for holder, key, one in self._links):
                self._arrange()
            if not self._metrics:
                return b""
            objects, numbers = seen = self._look()
            if numbers != self._seen[1] or not all(map(operator.is_, objects, self._seen[0])):
                self._seen, self._encoded = seen, _encode(self._now())
        except Exception:  # a metric of the user's has something that no metric of torchmetrics has
            log.debug("metrics cannot be kept", exc_info=True)
            self._left, self._encoded = [*self._metrics], b""
        return self._encoded

    def behind(self, found: bytes) -> bytes:
        """As in the base."""
        return _encode(msgspec.structs.replace(_decode(found), behind=True))

    def unsaved(self) -> list[str]:
        """Names of metrics (and of their attributes) that hold what is not kept; not of those that a validation logs.

        Of those that the module has had since training began, as of the newest step.
        """
        results = self._epoch.val_loop._results.values()
        validated = {id(one.value) for one in results if not one.is_tensor}
        found = {*self._left, *(name for one in self._metrics.values() for name in one.changed_others())}
        for name, metric in metrics_of(self._module):
            known = self._metrics.get(name)
            if known is None or known.metric is not metric:
                persistent = all(metric._persistent.values())
                found |= {name} if metric._update_count and not persistent and id(metric) not in validated else set()
        return sorted(found)

    def _arrange(self) -> None:
        """The metrics of the module are others: hardly ever after the start."""
        self._links = [*_links(self._module)]
        self._metrics = {name: _One(name, metric) for name, metric in metrics_of(self._module)}
        self._collections = [(n, m) for n, m in self._module.named_modules() if isinstance(m, MetricCollection)]
        self._seen, self._encoded, self._growing = ([], []), b"", {}

    def _look(self) -> tuple[list[Any], list[int]]:
        objects: list[Any] = []
        numbers: list[int] = []
        for one in self._metrics.values():
            attributes = one.attributes
            numbers.append(attributes["_update_count"])
            objects += [attributes.get(name) for name in one.plain]
            for name in one.states:
                objects.append(state := attributes.get(name))
                if isinstance(state, Tensor):
                    numbers.append(-1 if state.is_inference() else state._version)
                elif isinstance(state, list):
                    numbers.append(len(state))
        for _, collection in self._collections:
            numbers.append(collection._groups_checked)
        for key, row in (self._epoch._results or {}).items():
            objects.append(key)
            if not row.is_tensor:
                objects += (row, row._forward_cache)
                numbers.append(row.has_reset)
        return objects, numbers

    def _now(self) -> Objects:
        room, found, self._left = self._limit, {}, []
        for name, one in self._metrics.items():
            held = self._held(one, room) if not one.attributes["_is_synced"] else None
            size = _size(held) if held is not None else 0
            if held is None or size > room:
                self._left += [name] if one.counts else []
            else:
                room -= size
                found[name] = held
        results = self._epoch._results or {}
        rows = [
            Row(key, meta_of(row.meta), row.has_reset, _numbers(row._forward_cache))
            for key, row in results.items()
            if not row.is_tensor and row.meta.sync.group is None
        ]
        groups = {name: [*one._groups.values()] for name, one in self._collections if one._groups_checked}
        return Objects(found, self._left, rows, [*results], groups)

    def _held(self, one: _One, room: int) -> Held | None:
        attributes = one.attributes
        plain = {name: value for name in one.plain if _is_plain(value := attributes.get(name))}
        held = Held(attributes["_update_count"], plain, {}, {}, one.made)
        for name in one.states if one.counts else one.own_tensors:
            state = attributes.get(name)
            if isinstance(state, Tensor) and state.nbytes > room:
                return None  # and is not copied in each step for nothing
            if (numbers := _numbers(state)) is not None:
                held.tensors[name] = numbers
            elif not isinstance(state, list):
                return None
            elif (data := self._growing.setdefault((one.name, name), _Growing()).encode(state)) is not None:
                held.lists[name] = data
            else:
                return None
        return held


class _One:
    """A metric: its states, and its attributes beside them.

    Attributes:
        states: names, those of `own_tensors` too: attributes that are tensors and no states (of MinMaxMetric).
    """

    def __init__(self, name: str, metric: Metric) -> None:
        self.name, self.metric, self.attributes = name, metric, vars(metric)
        known = _BASE | metric._defaults.keys()
        rest = {key: value for key, value in self.attributes.items() if key not in known}
        self.own_tensors = [key for key, value in rest.items() if isinstance(value, Tensor)]
        self.states = [*metric._defaults, *self.own_tensors]
        self.plain = [key for key, value in rest.items() if _is_plain(value)]
        self.made = made_of(metric)
        self._others = {key: _print(value) for key, value in rest.items() if key not in (*self.states, *self.plain)}
        self._keys = {*self.attributes}
        self._wraps = type(metric)._wrap_update is not Metric._wrap_update  # and does not count

    @property
    def counts(self) -> bool:
        """It may have accumulated something."""
        return self._wraps or bool(self.attributes["_update_count"])

    def changed_others(self) -> list[str]:
        """Names of attributes of other types that have changed, and of those that are new, since training began."""
        there = self.attributes.copy()  # a saver asks, on a thread of its own
        changed = [key for key, was in self._others.items() if _print(there.get(key)) != was]
        changed += [key for key in self.plain if not _is_plain(there.get(key))]
        return [f"{self.name}.{key}" for key in (*changed, *(there.keys() - self._keys))]


class _Growing:
    """A state that is a list: what was encoded before is not encoded again."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._data = bytearray()

    def encode(self, items: Any) -> bytes | None:
        """Parts of it, each with its length; None where it is large, or has something else than tensors on the host."""
        begun = len(self._items)
        if len(items) < begun or not all(map(operator.is_, self._items, items)):
            self._items, self._data, begun = [], bytearray(), 0
        if len(self._data) + begun * _PER_ITEM > LIMIT:
            return None
        if new := items[begun:]:
            if sum(one.nbytes for one in new if isinstance(one, Tensor)) > LIMIT:
                return None
            found = [_numbers(one) for one in new]
            if None in found:
                return None
            part = _encode(found)
            self._items += new
            self._data += LENGTH.pack(len(part)) + part
        return bytes(self._data)


def metrics_of(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    """By name."""
    return ((name, one) for name, one in module.named_modules() if isinstance(one, Metric))


def made_of(metric: Metric) -> str:
    """A digest of how it was made, as far as plain values and the forms of its states tell.

    Of when it is first asked for: as a fit begins, with what the script has given it.
    """
    key = id(metric)
    known = _made.get(key)
    if known is None or known[0]() is not metric:
        _made[key] = known = weakref.ref(metric, lambda _: _made.pop(key, None)), _digest(metric)
    return known[1]


_made: dict[int, tuple[weakref.ref[Metric], str]] = {}
"""By their ids: the hash of a metric changes with what it holds."""


def _digest(metric: Metric) -> str:
    attributes = vars(metric)
    buffers = [attributes["_buffers"][name] for name in sorted(attributes["_non_persistent_buffers_set"])]
    told = (
        type(metric).__qualname__,
        sorted((name, one) for name, one in attributes.items() if name not in _BASE and _is_plain(one)),
        sorted((name, _form(one)) for name, one in metric._defaults.items()),
        [(_form(one), one.detach().cpu().tolist()) for one in buffers if isinstance(one, Tensor)],  # thresholds
    )
    return hashlib.blake2b(repr(told).encode(), digest_size=8).hexdigest()


def _form(state: Any) -> str:
    return f"{state.dtype} {[*state.shape]}" if isinstance(state, Tensor) else type(state).__name__


def _links(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, nn.Module]]:
    """What leads to the metrics: where, by which name, and what stands there."""
    seen: set[int] = set()
    for name, _ in metrics_of(module):
        node = module
        for part in name.split("."):
            inner = node._modules[part]
            assert inner is not None
            if id(inner) not in seen:
                seen.add(id(inner))
                yield node._modules, part, inner
            node = inner


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN and not (type(value) is int and value.bit_length() > 63)


def _print(value: Any, depth: int = 4) -> Any:
    """By which a change of a value can be seen, as far as that is cheap, and waits for no accelerator."""
    if _is_plain(value):
        return value
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.shape, zlib.crc32(value.tobytes())
    if isinstance(value, list | dict | set | tuple | deque):
        if depth and len(value) <= _LOOKED_INTO:
            with suppress(Exception):  # of something of the user's in it, or another thread changes it
                parts = [*value.items()] if isinstance(value, dict) else [*value]
                return type(value), [_print(one, depth - 1) for one in parts]
        return id(value), len(value)
    return id(value)


def _numbers(value: Any) -> Numbers | None:
    """None: no tensor, or one that the host cannot read at once."""
    if type(value) is not Tensor or not value.is_cpu or value.layout is not torch.strided:
        return None
    if value.is_quantized or value.is_complex():
        return None
    dtype, value = value.dtype, value.detach()
    if (name := _IN_NUMPY.get(dtype)) is not None:
        return Numbers(name, tuple(value.shape), value.numpy().tobytes())
    return Numbers(str(dtype)[6:], tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())


def _size(held: Held) -> int:
    return sum(len(one.data) for one in held.tensors.values()) + sum(map(len, held.lists.values()))
