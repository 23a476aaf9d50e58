"""What of the model no update makes, and a forward pass may change.

Buffers, parameters outside of the optimizer (momentum encoders, averages of weights), extra state of modules: at a
fault they are ahead of the last step where the forward pass has changed them. What changes is copied at the end of each
step, always to the same memory; the rest is compared with its digest when it is saved. What was seen to change once
counts as changing from then on.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from torch import Tensor, TypedStorage, UntypedStorage, nn

from lastgasp.adapter import cause_of
from lastgasp.adapter.torch import digest, extrastate

log = logging.getLogger("lastgasp")

FIRST = 3
"""Steps behind which all is compared with what it was; later behind each one whose number is a power of two."""
ALWAYS = 1 << 16
"""Bytes up to which a buffer is copied at each step, changed or not: the fused batch norm counts no change."""


@dataclass(frozen=True)
class Kept:
    """What was copied at the end of a step; valid until the end of the next.

    Args:
        tensors: where each lies, and its copy.
        extra: of each part of the model, the extra state of its modules by their key in the state.
        missing: what people must know of a checkpoint that is made of it; empty for nothing.
        own: by name the buffers of which each data parallel rank may have its own.
    """

    tensors: Sequence[tuple[dict[str, Any], str, Tensor]] = ()
    extra: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    missing: str = ""
    own: Mapping[str, _Place] = field(default_factory=dict)

    def by_id(self) -> dict[int, Tensor]:
        """The copies by the `id` of what is in their place now."""
        return {id(where.get(name)): copy for where, name, copy in self.tensors}


class Beside:
    """That of one model. The training thread calls `take`; the rest is for the engine's threads, while that one waits.

    Args:
        chunks: Megatron's parts of the model; optimizers: those that have parameters on this rank.
        note: reports what people must know (`Session.note`).
    """

    def __init__(
        self, chunks: Sequence[Any], optimizers: Sequence[Any], note: Callable[[str], None] = lambda text: None
    ) -> None:
        updated, models = ids_of(optimizers), [one for one in chunks if isinstance(one, nn.Module)]
        self._places = [place for chunk in models for place in _places(chunk, updated)]
        places = {(id(one.where), one.name): one for one in self._places}
        self._own = {label: places[id(where), name] for label, where, name in own_buffers(models)}
        self._extra = _Extra(models)
        self._note, self._turn, self._told = note, 0, False

    def take(self, step: int) -> Kept:
        """The end of a step, or the beginning: copy what changes. Never raises."""
        look = self._turn <= FIRST or self._turn & (self._turn - 1) == 0
        self._turn += 1
        for place in self._places:
            place.step_over(look)
        refused = [place for place in self._places if place.refused]
        if refused and not self._told:
            self._told = True
            self._note(f"{some([place.label for place in refused])} changes within a step and cannot be copied "
                       f"({refused[0].refused}): a fault behind such a change has nothing saved")  # fmt: skip
        extra, missing = self._extra.step_over(step, look)
        copies = [(one.where, one.name, one.copy) for one in self._places if one.copy is not None]
        return Kept(copies, extra, missing, self._own)

    def changed(self) -> str:
        """Tensors that have changed since the end of the step and had seemed not to change; empty if none has."""
        return some([place.label for place in self._places if place.copy is None and place.differs()])

    def extra_changed(self) -> str:
        """Extra state of which the same is so. Its bytes may differ where nothing has changed (`_content`)."""
        return some(self._extra.changed())


class _Place:
    """One buffer or parameter, where its module keeps it."""

    def __init__(self, label: str, where: dict[str, Any], name: str, always: int) -> None:
        self.label, self.where, self.name, self._always = label, where, name, always
        self.copy: Tensor | None = None
        self.refused = ""
        self._digest: bytes | None = None
        self._at: tuple[Any, ...] = ()
        self._moves = False

    def step_over(self, look: bool) -> None:
        live = self.where.get(self.name)
        if live is None:
            self.copy = None
            return
        at = _at(live)
        if live.numel() * live.element_size() <= self._always:
            self._moves = True
        elif look and not self._moves:
            found = _digest_of(live)
            # What it has no digest of is copied always.
            self._moves, self._digest = found is None or (bool(self._at) and found != self._digest), found
        elif at != self._at:
            self._moves = True  # for good: what changes seldom would be lost at a fault behind such a change
        self._at = at
        if self._moves:
            self._copy(live.detach())
        else:
            self.copy, self.refused = None, ""

    def _room(self, live: Tensor) -> Tensor:
        return live.clone()

    def differs(self) -> bool:
        """From how it was when its digest was taken."""
        live = self.where.get(self.name)
        return live is not None and (bool(self.refused) or _digest_of(live) != self._digest)

    def value(self, check: bool) -> Tensor | None:
        """Its value at the end of the step; None where it has none, or `check` finds that this has no copy."""
        if self.copy is not None or self.refused:
            return self.copy
        live: Tensor | None = self.where.get(self.name)
        return None if live is None or (check and self.differs()) else live.detach()

    def _copy(self, live: Tensor) -> None:
        try:
            kept = self.copy
            if kept is not None and (kept.shape, kept.dtype, kept.device) == (live.shape, live.dtype, live.device):
                kept.copy_(live)
            else:
                self.copy = None  # freed first
                self.copy = self._room(live)
            self.refused = ""
        except RuntimeError as error:  # no memory for it
            self.copy, self.refused = None, cause_of(error)


class _Extra:
    """State of modules beside parameters and buffers (`get_extra_state`)."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._all = {
            (number, f"{name}.{_KEY}".removeprefix(".")): module
            for number, chunk in enumerate(chunks)
            for name, module in _innermost(chunk).named_modules(remove_duplicate=False)
            if extrastate.has_extra_state(module)
        }
        self._digests: dict[tuple[int, str], bytes] = {}
        self._moving: set[tuple[int, str]] = set()
        self._states = extrastate.ExtraStates({})
        self._failed = ""

    def step_over(self, step: int, look: bool) -> tuple[dict[int, dict[str, Any]], str]:
        """Copies of what changes by part and key, and what to say where there should be some and are none."""
        if not self._all or self._failed:
            return {}, self._failed
        try:
            if look:
                self._look()
            taken = self._states.step_over(step)
        except Exception as error:  # the user's own method, which a checkpoint calls as well
            self._failed = (f"the extra state of modules is that of the moment of the fault: get_extra_state failed at "
                            f"the end of a step ({cause_of(error)})")  # fmt: skip
            log.warning("%s", self._failed)
            return {}, self._failed
        found: dict[int, dict[str, Any]] = {}
        for (number, key), value in taken.items():
            found.setdefault(number, {})[key] = value
        return found, self._states.missing(taken)

    def _look(self) -> None:
        found = {key: _content(module) for key, module in self._all.items() if key not in self._moving}
        known, self._digests = self._digests, found
        if moving := {key for key, one in found.items() if one == b"" or known.get(key, one) != one}:
            self._moving |= moving
            self._states = extrastate.ExtraStates({key: self._all[key] for key in self._moving})

    def changed(self) -> list[str]:
        fixed = {key: one for key, one in self._digests.items() if key not in self._moving and not self._failed}
        return [key[1] for key, one in fixed.items() if _content(self._all[key]) != one]


_KEY = "_extra_state"


def _content(module: nn.Module) -> bytes:
    """A digest of its extra state; empty where it has none.

    Of tensors their values count, not where they are. Bytes that a module has pickled itself (Transformer Engine's) may
    name an address all the same, and differ each time.
    """
    hidden = io.BytesIO()
    try:
        _ByContent(hidden).dump(module.get_extra_state())
    except Exception:  # the user's own methods
        return b""
    return xxhash.xxh3_128_digest(hidden.getbuffer())


class _ByContent(pickle.Pickler):
    """Pickles equal values to equal bytes: tensors as digests, and what is there twice two times."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.fast = True

    def persistent_id(self, value: Any) -> bytes | None:
        """What stands for a value; None for the value itself."""
        if isinstance(value, Tensor):
            return digest([value])
        if isinstance(value, io.BytesIO):
            return xxhash.xxh3_128_digest(value.getbuffer())
        if isinstance(value, UntypedStorage | TypedStorage):
            raise pickle.PicklingError("a storage is pickled with its address")
        return None


def ids_of(optimizers: Sequence[Any]) -> frozenset[int]:
    """Those of the model's parameters that Megatron's optimizers update, and of their own."""
    found = set[int]()
    for one in optimizers:
        for group in one.optimizer.param_groups:
            found |= {id(param) for param in group["params"]}
        for group in getattr(one, "float16_groups", []):
            found |= {id(param) for param in group}
        for buffer in getattr(one, "buffers", []):
            found |= {id(param) for param in buffer.param_index_map}
    return frozenset(found)


def _places(chunk: nn.Module, updated: frozenset[int]) -> Iterator[_Place]:
    for prefix, module in chunk.named_modules():
        for name in module._buffers:
            if name not in module._non_persistent_buffers_set:
                yield _Place(f"{prefix}.{name}", module._buffers, name, ALWAYS)
        for name, param in module._parameters.items():
            if param is not None and id(param) not in updated:
                yield _Place(f"{prefix}.{name}", module._parameters, name, 0)


def own_buffers(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Persistent buffers of which each data parallel rank may have its own: label, where it lies, and its name there.

    Megatron reduces what a router has counted before it changes the bias; SyncBatchNorm reduces its statistics.
    """
    for number, chunk in enumerate(chunks):
        for prefix, module in _innermost(chunk).named_modules():
            for name in module._buffers if not isinstance(module, nn.SyncBatchNorm) else ():
                if name not in module._non_persistent_buffers_set and name != "expert_bias":
                    label = f"{prefix}.{name}".removeprefix(".")
                    yield f"{label} of chunk {number}" if len(chunks) > 1 else label, module._buffers, name


def _innermost(chunk: nn.Module) -> nn.Module:
    """The model in Megatron's wrappers, whose names are those in a checkpoint."""
    while [*chunk._modules] == ["module"] and isinstance(inner := chunk._modules["module"], nn.Module):
        chunk = inner
    return chunk


def _at(live: Tensor) -> tuple[Any, ...]:
    """What torch counts of its changes, and where it is in memory."""
    try:
        return id(live), live._version, live.data_ptr()
    except RuntimeError:  # of a kind that has no memory of its own
        return id(live), 0, 0


def _digest_of(live: Tensor) -> bytes | None:
    try:
        return digest([live])
    except Exception:  # of a kind that torch cannot view as bytes
        return None


def some(labels: Sequence[str]) -> str:
    """A few of these names, without Megatron's wrappers."""
    named = [label.removeprefix("module.").removeprefix("module.") for label in labels]
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")
