"""Copies of a module's persistent buffers.

BatchNorm statistics change in the forward pass, so that during a step the live buffers are ahead of the
boundary that a gasp saves; parameters are not. Hence buffers are copied at each boundary, parameters never.
"""

from __future__ import annotations

import itertools
import json
import logging
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lastgasp.errors import NotSaveable
from lastgasp.pytorch.compiled import compiled

log = logging.getLogger("lastgasp")

# Buffers up to this many bytes are copied at every boundary. The fused batch norm changes its statistics without
# counting it in `_version` (seen with torch 2.13), so that only large buffers (masks, tables) may rely on it.
_ALWAYS = 1 << 16
_ALWAYS_ON_DEVICE = 1 << 24
"""The same on an accelerator, where a copy costs microseconds and nobody waits for it."""
_ALIGNED = 16
_SAMPLED = 512
"""Bytes of a large buffer that are compared at each boundary."""

_Where = tuple[dict[str, Tensor | None], str]


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, _Where]]:
    """Each persistent buffer of `module`: its key in `state_dict` -> the dictionary and name that hold it."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, value in child._buffers.items():
            if value is None or is_lazy(value):  # it has no shape before the first forward pass
                continue
            if name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, (child._buffers, name)


class Resized(Exception):
    """A buffer has another shape by now, and is still the same tensor: observers of quantization resize theirs."""


class BufferRecorder:
    """Copies the persistent buffers of a module into slots; large ones only when they changed since.

    Buffers on an accelerator are copied to a shadow on the device (a copy to the host would wait for the
    device at every step); they can be read in this process only.

    Args:
        module: whose buffers; None records none.
        host: also those in host memory; where another rank's count, a survivor still needs its own shadows.

    Attributes:
        away: names of those that only this process can read.
    """

    def __init__(self, module: nn.Module | None, host: bool = True) -> None:
        self._module, self._host = module, host
        self._slots: list[_BufferSlot] = []
        self.refresh()

    def refresh(self) -> None:
        """Lay the buffers out anew, after one changed its shape, type or device."""
        found = dict(persistent_buffers(self._module)) if self._module is not None else {}
        self._lazy = [one for one in self._module.buffers() if is_lazy(one)] if self._module is not None else []
        if not self._host:
            found = {name: at for name, at in found.items() if not _in_host_memory(at[0][at[1]])}
        self._where = list(found.values())
        tensors = self._live()
        self.names = list(found)
        self.table: list[list[Any]] = []
        self.size = 0
        for name, tensor in zip(found, tensors, strict=True):
            if _in_host_memory(tensor):
                self.table.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.size])
                self.size += -(-_nbytes(tensor) // _ALIGNED) * _ALIGNED
        self.away = [name for name, t in zip(found, tensors, strict=True) if not _in_host_memory(t)]
        self._objects = tensors
        self._shape = [(t.shape, t.dtype, t.device, t.layout) for t in tensors]
        self._slots = []

    def _live(self) -> list[Tensor]:
        return [holder.get(name) for holder, name in self._where]  # type: ignore[misc]

    @property
    def changed_layout(self) -> bool:
        """Whether a buffer no longer fits the layout."""
        if self._lazy and not all(map(is_lazy, self._lazy)):
            return True
        fast = self._slots[0].fast if self._slots else None
        if fast is not None and fast.same():
            return False
        live = self._live()
        if all(map(operator.is_, live, self._objects)):  # a tensor object hardly ever changes its shape
            return False
        self._objects = live
        now = [None if t is None else (t.shape, t.dtype, t.device, t.layout) for t in live]
        changed = now != self._shape
        if not changed:
            for slot in self._slots:
                slot.follow()
        return changed

    def bind(self, views: list[memoryview]) -> None:
        """Give one piece of memory per slot, of at least `size` bytes, aligned to 16."""
        offsets = {row[0]: row[3] for row in self.table}
        names = dict(zip(self.names, self._where, strict=True))
        self._slots = [_BufferSlot(names, offsets, view) for view in views]

    def capture(self, slot: int, step: int) -> None:
        """Copy the buffers to `slot`. `changed_layout` was looked at before.

        Raises:
            Resized: what the slot holds is not complete; `refresh` first.
        """
        if self._where:
            self._slots[slot].copy(step, self._slots)

    def differ(self, one: int, other: int) -> bool:
        """Whether the copies in two slots differ, as far as the host can tell without waiting for a device."""
        return bool(self._where) and self._slots[one].differs(self._slots[other])

    def on_device(self, step: int) -> dict[str, Tensor]:
        """The newest copies of `step` that only this process has (on an accelerator, sparse): key -> tensor.

        Raises:
            NotSaveable: there was no memory for one, and it has changed.
        """
        slots = [s for s in self._slots if s.step == step]
        if not slots:
            return {}
        newest = max(slots, key=lambda s: s.order)
        away = set(self.away)
        return {name: newest.value(i) for i, name in enumerate(self.names) if name in away}


_order = itertools.count(1).__next__  # not of a class: a change of one makes Python look its attributes up anew


class _BufferSlot:
    def __init__(self, where: dict[str, _Where], offsets: dict[str, int], view: memoryview) -> None:
        self._names, self._where, self._view = list(where), list(where.values()), view
        live = self._live()
        self.targets: list[Any] = [
            _view(view, offsets[name], t.dtype, t.shape)
            if name in offsets
            else t.detach().clone() if _is_strided(t) and _nbytes(t) <= _always(t) else None
            for name, t in zip(where, live, strict=True)
        ]
        self._away = {i for i, target in enumerate(self.targets) if target is None}
        self._no_room = set[int]()
        self._offsets = [offsets.get(name, 0) for name in where]
        strided = [i for i, t in enumerate(live) if _is_strided(t)]
        self._small = [i for i in strided if _nbytes(live[i]) <= _always(live[i])]
        self._large = [i for i in strided if _nbytes(live[i]) > _always(live[i])]
        self._sparse = [i for i in range(len(live)) if i not in set(strided)]
        self._seen = [Seen() for _ in live]
        sizes = {name: _nbytes(t) for name, t in zip(where, live, strict=True)}
        self._runs = _runs(sorted((offsets[n], size) for n, size in sizes.items() if size <= _ALWAYS and n in offsets))
        self.step = self.order = -1
        self.follow()

    def _live(self) -> list[Tensor]:
        return [holder.get(name) for holder, name in self._where]  # type: ignore[misc]

    def follow(self) -> None:
        """The buffers are other tensors than before, or have other memory."""
        live, copies = self._live(), compiled()
        plain = {i for i in self._small if copies is not None and _plain(live[i], self.targets[i])}
        rows = tuple(
            (*self._where[i], t, t.numel(), _nbytes(t) if i in plain else 0, self._offsets[i])
            for i, t in enumerate(live)
        )
        self.fast: Any = copies.Buffers(self._view, rows) if copies is not None else None
        self._rest = [i for i in self._small if i not in plain]
        self._rest_targets = [self.targets[i] for i in self._rest]

    def copy(self, step: int, slots: list[_BufferSlot]) -> None:
        """Copy them as they stand; `slots`: all of them, which this one must not hold (a cycle of views)."""
        if self.fast is not None and not self.fast.copy():
            self._by_torch(self._small, [self.targets[i] for i in self._small])
            self.follow()
        elif self._rest:
            self._by_torch(self._rest, self._rest_targets)
        if self._large or self._sparse:
            self._copy_if_changed(slots)
        self.step, self.order = step, _order()

    def differs(self, other: _BufferSlot) -> bool:
        """Whether `other`, a slot of the same buffers, holds something else; those on an accelerator are left out."""
        if any(self._seen[i].differs(other._seen[i]) for i in (*self._large, *self._sparse)):
            return True
        return any(bytes(self._view[a:b]) != bytes(other._view[a:b]) for a, b in self._runs)

    def _by_torch(self, which: list[int], targets: list[Tensor]) -> None:
        where = self._where
        # detach: cheaper than no_grad, and a buffer may carry a graph
        live = [where[i][0][where[i][1]].detach() for i in which]  # type: ignore[union-attr]
        if any(a.shape != b.shape for a, b in zip(live, targets, strict=True)):  # it would be spread, or refused
            raise Resized
        torch._foreach_copy_(targets, live)

    def _copy_if_changed(self, slots: list[_BufferSlot]) -> None:
        live = self._live()
        for i in (*self._large, *self._sparse):
            if self._seen[i].changed(live[i]):
                if i in self._away:
                    self._copy_away(i, live[i], slots)
                elif self.targets[i].shape != live[i].shape:
                    raise Resized
                else:
                    self.targets[i].copy_(live[i].detach())


    def _copy_away(self, i: int, live: Tensor, slots: list[_BufferSlot]) -> None:
        """Slots that have seen the same value share a copy: quantized weights are buffers, as large as a model."""
        others = [slot for slot in slots if slot is not self]
        for slot in others:
            if slot.targets[i] is not None and not slot._seen[i].differs_from(live):
                self.targets[i] = slot.targets[i]
                return
        target = self.targets[i]
        shared = any(slot.targets[i] is target for slot in others)
        same = target is not None and not shared and (target.shape, target.layout) == (live.shape, torch.strided)
        if same:
            target.copy_(live.detach())
            return
        self.targets[i] = target = None
        if i in self._no_room or any(i in slot._no_room for slot in others):
            return
        try:
            self.targets[i] = live.detach().clone()
        except RuntimeError as error:  # no memory for it; torch.OutOfMemoryError is one
            self._no_room.add(i)
            log.warning("no copy of the buffer %s can be kept (%s): a fault in a step that changes it may cost a step",
                        self._names[i], str(error).splitlines()[0])  # fmt: skip

    def value(self, i: int) -> Tensor:
        """Of one that is not in host memory, as it was copied."""
        found: Tensor | None = self.targets[i]
        if found is not None:
            return found
        live = self._live()[i]
        if self._seen[i].differs_from(live):
            raise NotSaveable(f"the buffer {self._names[i]} has changed since, and there was no memory for a copy")
        return live.detach()


class Seen:
    """Whether a tensor, such as a large buffer, has changed since it was copied.

    It may be replaced by another tensor, which can even get the `id` of one before; get other memory (`.data = ...`);
    be changed in place, which `_version` counts; or by way of `.data`, as the codebooks of VQ-VAE are, which nothing
    counts: bytes out of all of it are compared as well, where they stand in host memory.
    """

    def __init__(self) -> None:
        self._tensor: Callable[[], Tensor | None] = _none
        self._version = self._address = 0
        self._bytes: Tensor | None = None
        self._sample: bytes | Tensor | None = None
        self._strided = True
        copies = compiled()
        self._compiled: Any = (copies.look, copies.unchanged) if copies is not None else None
        self._fast = False

    def changed(self, live: Tensor) -> bool:
        """Compare, and remember how it is now."""
        if not self.differs_from(live):
            return False
        self.remember(live)
        return True

    def remember(self, live: Tensor) -> None:
        """How it is now; nothing of one that has no memory yet."""
        if self._fast and self._tensor() is live:
            found = self._compiled[0](live, self._address, self._step, self._count)
            if found is not None:
                self._version, self._sample = found
                return
        self._remember_anew(live)

    def _remember_anew(self, live: Tensor) -> None:
        if self._tensor() is not live:
            if is_lazy(live):
                return
            self._strided, self._address = _is_strided(live), -1
        version, address = self._place(live)
        if self._address != address:
            self._tensor, self._bytes = weakref.ref(live), _some_bytes(live)
            if self._bytes is not None:
                self._step, self._count = self._bytes.stride(0), self._bytes.numel()
        self._version, self._address = version, address
        self._fast = self._compiled is not None and self._bytes is not None and address != 0
        if self._fast:
            self._sample = self._compiled[0](live, address, self._step, self._count)[1]
        else:
            self._sample = self._bytes.clone() if self._bytes is not None else None

    def differs_from(self, live: Tensor) -> bool:
        """Compare alone; also where it was never looked at."""
        if self._tensor() is not live:
            return True
        if self._fast:
            return not self._compiled[1](live, self._version, self._address, self._step, self._sample)
        if (self._version, self._address) != self._place(live):
            return True
        return self._bytes is not None and not _alike(self._bytes, self._sample)

    def differs(self, other: Seen) -> bool:
        """Whether they have seen different values; of two that have seen the same tensor without a change, no."""
        if self._tensor() is not other._tensor():
            return True
        if (self._version, self._address) != (other._version, other._address):
            return True
        one, two = self._sample, other._sample
        return one is not None and two is not None and not _alike(one, two)

    def _place(self, live: Tensor) -> tuple[int, int]:
        """What torch counts of its changes, and where it is in memory."""
        return live._version, live.data_ptr() if self._strided else 0


def _alike(one: bytes | Tensor | None, other: bytes | Tensor | None) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other


def _some_bytes(tensor: Tensor) -> Tensor | None:
    """A view of bytes out of all of a tensor, which keeps its memory alive; None where it takes more than a view."""
    plain = type(tensor) in (Tensor, nn.Parameter) and _is_strided(tensor) and tensor.is_contiguous()
    if not plain or tensor.device.type != "cpu":
        return None
    if tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return None
    # not by reshape: a single element may have any stride
    found = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return found[:: max(1, found.numel() // _SAMPLED) | 1]  # odd, so that it meets each byte of a number


def _none() -> None:
    """No tensor yet."""


def _runs(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Begin and end of pieces of memory, given as begin and size in rising order; neighbours are one piece."""
    found: list[tuple[int, int]] = []
    for begin, size in places:
        first = found.pop()[0] if found and begin - found[-1][1] < _ALIGNED else begin
        found.append((first, begin + size))
    return found


def _always(tensor: Tensor) -> int:
    return _ALWAYS if tensor.device.type == "cpu" else _ALWAYS_ON_DEVICE


def _in_host_memory(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu" and _is_strided(tensor))


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _plain(tensor: Tensor, target: Tensor) -> bool:
    """Whether its memory, byte for byte, is its value."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and (tensor.dtype, tensor.shape) == (target.dtype, target.shape)
        and tensor.numel() > 0
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _view(view: memoryview, at: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    count = shape.numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(view, dtype=dtype, count=count, offset=at).view(shape)


def encode_table(table: list[list[Any]]) -> bytes:
    """The layout as JSON, as `decode_buffers` reads it."""
    return json.dumps(table, separators=(",", ":")).encode()


def decode_buffers(table: bytes, data: bytes) -> dict[str, Tensor]:
    """Key in `state_dict` -> a tensor of its own memory."""
    memory = memoryview(bytearray(data))
    return {
        name: _view(memory, at, getattr(torch, dtype), torch.Size(shape)).clone()
        for name, dtype, shape, at in (json.loads(table) if table else [])
    }
