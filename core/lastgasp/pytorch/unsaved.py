"""What objects keep beside what checkpoints hold: numbers, tensors that are no buffers, buffers that do not persist.

A new process has those of the script. Where training has changed them a resumed run differs, and that is said.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lastgasp.pytorch.as_set import settings_of
from lastgasp.pytorch.extrastate import has_extra_state
from lastgasp.pytorch.held_modules import HeldModules
from lastgasp.pytorch.uservalues import Root, is_users
from lastgasp.pytorch.uservalues.memory import Known
from lastgasp.pytorch.zero import inside

_NAMED = 4
"""Values that are named."""
_BYTES = 16 << 20
"""Larger tensors are not looked at."""
Values = tuple[dict[str, bytes], dict[str, bytes]]
_LONG, _LIST, _PLAIN = 1 << 20, b"a list: ", frozenset((int, float, bool, str))
"""Longer lists are not looked at, but for their length."""
_CONTAINERS = (list, dict, set, collections.deque)


class Unsaved:
    """Those of one module and all below it, and of other objects, and how they were when this was made.

    Of containers the length counts, and modules in them that are not of the tree. Plain values count in objects of the
    user's own classes alone, and in modules where `get_extra_state` saves none.

    Args:
        module: its buffers count.
        roots: whose plain values count; those of the modules in `module` if it is None.
        saved: what checkpoints hold besides weights, for people.
        whose: whether the plain values of a class count.
    """

    def __init__(
        self, module: nn.Module, roots: Iterable[Root] | None = None, saved: str = "get_extra_state",
        whose: Callable[[type], bool] = is_users,
    ) -> None:  # fmt: skip
        self._module, self._roots, self._saved = module, None if roots is None else list(roots), saved
        self._whose = whose
        self._before, self._modules_before = dict(self._values()), self._held_modules()

    def since(self, earlier: Values | None, places: tuple[str, ...] = ("",)) -> Values:
        """Compare with what `earlier` has of the objects at these places, which have trained since.

        Returns what is compared with, for the next time.
        """
        for now, then in zip((self._before, self._modules_before), earlier or (), strict=False):
            now.update({name: value for name, value in then.items() if name.startswith(places)})
        return self._before, self._modules_before

    def note(self, held: Collection[str] = ()) -> str:
        """What to note on a checkpoint; empty where nothing has changed. Any thread may ask; never raises.

        Args:
            held: names of what it holds all the same.
        """
        try:
            values = [name for name, value in self._values() if self._before.get(name) not in (None, value)]
            changed = [name for name in dict.fromkeys((*values, *self.modules())) if name not in held]
        except Exception:  # the user's objects, which training may be changing at this moment
            return ""
        if not changed:
            return ""
        what = "modules" if self._roots is None else "objects"
        return (f"training has changed what {what} keep beside their state: {some(changed)}. No "
                "checkpoint holds it, so a process that begins anew has the script's. Persistent buffers are saved, "
                f"and so is what {self._saved} returns")  # fmt: skip

    def modules(self) -> list[str]:
        """Names of attributes with modules outside of the tree that training has changed. As `note`."""
        before = self._modules_before
        return [name for name, value in self._held_modules().items() if before.get(name) not in (None, value)]

    def buffers(self) -> list[str]:
        """Names of buffers that do not persist, and that training has changed. As `note`."""
        try:
            return [name for name, value in self._buffers() if self._before.get(name) not in (None, value)]
        except Exception:  # the user's objects, which training may be changing at this moment
            return []

    def settings(self) -> list[str]:
        """Names of settings of torch's own modules that training has changed (the share of dropout). As `note`."""
        try:
            return [name for name, value in self._settings() if self._before.get(name) not in (None, value)]
        except Exception:  # as above
            return []

    def _settings(self) -> Iterator[tuple[str, bytes]]:
        for place, one in self._module.named_modules():
            yield from _known(place, settings_of(one))

    def _buffers(self) -> Iterator[tuple[str, bytes]]:
        for place, one in self._module.named_modules():
            yield from _known(place, {name: one._buffers.get(name) for name in one._non_persistent_buffers_set})

    def _values(self) -> Iterator[tuple[str, bytes]]:
        yield from self._buffers()
        yield from self._settings()
        for place, held in self._users():
            yield from _known(place, held)

    def _held_modules(self) -> dict[str, bytes]:
        try:
            look = HeldModules(self._module).digest
            return {name: one for place, held in self._users() for name, one in _known(place, held, look)}
        except Exception:  # the user's objects, which training may be changing at this moment
            return {}

    def _users(self) -> Iterator[tuple[str, dict[str, Any]]]:
        known = Known([*self._module.parameters(), *self._module.buffers()])
        for root in users_parts(self._module) if self._roots is None else self._roots:
            if self._whose(type(root.value)):
                held = getattr(root.value, "__dict__", {})
                yield root.name, {n: value for n, value in held.items() if n not in root.skip and value not in known}


class UnsavedData:
    """The same of what gives the data: data sets, samplers and collate functions of the user's classes.

    What has a `state_dict` counts as saved, and what is told its epoch (`set_epoch` of a sampler) is told again. The
    content of iterable data sets is not looked at: their loader is compared by what it gives.

    Attributes:
        new: nothing was looked at yet.
    """

    def __init__(self) -> None:
        self.new = True
        self._before: list[tuple[str, weakref.ref[Any], dict[str, bytes]]] = []

    def look_at(self, loaders: Iterable[object]) -> None:
        """Note how they are. Call it behind the first step of a training: its first pass has begun then."""
        self.new, self._before = False, []
        for one in {id(part): part for loader in loaders for part in _parts_of(loader, _DEEP)}.values():
            try:
                self._before.append((type(one).__name__, weakref.ref(one), dict(_plain(one))))
            except Exception:  # of the user's own kind
                continue

    def note(self) -> str:
        """What to note where a step is done again, or a process begins anew; empty where nothing has changed."""
        changed: list[str] = []
        try:
            for place, found, before in self._before:
                if (one := found()) is not None:
                    changed += [f"{place}.{name}" for name, now in _plain(one) if _differ(before.get(name), now)]
        except Exception:  # the user's objects, which training may be changing at this moment
            return ""
        return (
            f"training has changed what gives its data: {some(changed)}. No checkpoint holds that: a process that "
            "begins anew has the script's, and one that goes on may have the step twice that is done again"
        ) if changed else ""  # fmt: skip


class UnsavedOptimizers:
    """What optimizers hold that their `state_dict` lacks: another optimizer inside (SAM), numbers of the user's class.

    One with a `state_dict` of its own is trusted to save all, unless the model is sharded: nobody calls it there.

    Args:
        containers: those that hold others, which are saved instead of them.
    """

    def __init__(
        self, optimizers: Iterable[Any], containers: Iterable[Any] = (), *, sharded: bool = False
    ) -> None:
        own, outer, optimizers = torch.optim.Optimizer.state_dict, list(containers), list(optimizers)
        self._all = [one for one in optimizers if hasattr(one, "param_groups")]
        self._optimizers = [one for one in optimizers if sharded or type(one).state_dict is own] + outer
        self._not_asked = sharded or bool(outer)
        self._before = dict(self._values())

    def note(self) -> str:
        """As of `Unsaved`; it is lost wherever optimizers are made anew."""
        try:
            changed = [name for name, value in self._values() if self._before.get(name) != value]
        except Exception:  # a state that training is changing at this moment
            return ""
        lacks, remedy = (
            ("checkpoints lack, whatever their state_dict has", "Keep it in the parameter groups of those that are "
             "saved") if self._not_asked else
            ("their state_dict lacks", "Give the optimizer a state_dict and a load_state_dict that have it")
        )  # fmt: skip
        what = f"optimizers hold what {lacks}: {some(changed)}. A resumed run begins without it. {remedy}"
        return what if changed else ""

    def _values(self) -> Iterator[tuple[str, bytes]]:
        for one in self._all:
            for number, group in enumerate(one.param_groups):
                yield from _known(f"{type(one).__name__}.param_groups[{number}]", _by_tensor(group))
            if type(one).state_dict is torch.optim.Optimizer.state_dict:
                yield from _known(type(one).__name__, _tensors_in(one))
        for one in self._optimizers:
            own = {n: v for n, v in vars(one).items() if n not in _OPTIMIZER and n[0] != "_" and is_users(type(one))}
            changes = Counter[str]()
            for name, inner in _optimizers_in(one):
                if inner is not inside(one) and inner.state is not one.state:
                    changes[name] += _changes_of(inner)
            yield from _known(type(one).__name__, own | dict(changes))


def _by_tensor(group: Mapping[str, Any]) -> dict[str, Any]:
    """What has parameters for keys (GrokAdamW's state): once it is loaded, they are copies that nobody looks for."""
    return {n: v for n, v in group.items() if isinstance(v, dict) and any(isinstance(key, Tensor) for key in v)}


def _tensors_in(optimizer: Any) -> dict[str, int]:
    """How often those were changed that it has in dicts of its own (AdaLomo)."""
    dicts = {n: v for n, v in vars(optimizer).items() if n not in _OPTIMIZER and type(v) is dict}
    found = {n: [one for one in v.values() if isinstance(one, Tensor)] for n, v in dicts.items()}
    return {n: len(tensors) + sum(one._version for one in tensors) for n, tensors in found.items() if tensors}


def _optimizers_in(owner: object) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Also one for each parameter: of those that update within the backward pass (layerwise GaLore)."""
    for name, value in vars(owner).items():
        held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        yield from ((name, one) for one in held if isinstance(one, torch.optim.Optimizer))


class LeftGradients:
    """Gradients that go on from step to step: of parameters that no optimizer has, where nothing clears them."""

    def __init__(self, module: nn.Module, optimizers: Iterable[Any]) -> None:
        groups = [group for one in optimizers for group in one.param_groups]
        trained = {id(parameter) for group in groups for parameter in group["params"]}
        self._outside = {name: one for name, one in module.named_parameters() if id(one) not in trained}
        self._seen: dict[str, weakref.ref[Tensor]] = {}
        self._left: list[str] = []

    def step_over(self) -> None:
        """A step is complete: its gradients may still be there, those of the step before may not."""
        grads = {name: one.grad for name, one in self._outside.items() if one.grad is not None}
        self._left = [name for name, grad in grads.items() if name in self._seen and self._seen[name]() is grad]
        self._seen = {name: weakref.ref(grad) for name, grad in grads.items()}

    def note(self) -> str:
        """As of `Unsaved`."""
        return (
            "gradients of parameters that are in no optimizer are in no checkpoint, and stay from step to step: "
            f"{some(self._left)}. Unless they are set to zero in between, a resumed run begins without them, and "
            "differs where they count (clip_grad_norm_). Freeze these parameters, or call model.zero_grad()"
        ) if self._left else ""  # fmt: skip


def note_on_hooks(models: Iterable[Any]) -> str:
    """What to note where DDP averages gradients by hooks with a state of their own; empty where none has one.

    Args:
        models: DDP wrappers, and what is none.
    """
    hooks = [hook for model in models for hook in getattr(model, "_comm_hooks", ())]
    states = {type(state).__name__ for _, state in hooks if not isinstance(state, dist.ProcessGroup | None)}
    return (
        f"the state of DDP's communication hook ({', '.join(sorted(states))}) is in no checkpoint: a resumed run "
        "begins with a new one, without what it has gathered (errors that are fed back, steps that were counted)"
    ) if states else ""  # fmt: skip


_OPTIMIZER = ("defaults", "state", "param_groups")


def _changes_of(optimizer: torch.optim.Optimizer) -> int:
    held = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    states = [value for state in held for value in state.values()]
    return len(states) + sum(value._version for value in states if isinstance(value, Tensor))


def some(names: list[str]) -> str:
    """The first ones, for a note."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


_DEEP = 5
_DATA = ("dataset", "datasets", "sampler", "batch_sampler", "_sampler", "collate_fn", "transform", "transforms")
"""Attributes in which loaders, data sets and samplers keep one another."""


def _parts_of(owner: object, deep: int) -> Iterator[object]:
    held = getattr(owner, "__dict__", {})
    for name in _DATA:
        found = held.get(name)
        for one in found if isinstance(found, list | tuple) else [found]:
            if one is None or not deep:
                continue
            if is_users(type(one)) and not isinstance(one, IterableDataset) and not hasattr(one, "state_dict"):
                yield one
            yield from _parts_of(one, deep - 1)


def _plain(one: Any) -> Iterator[tuple[str, bytes]]:
    if hasattr(one, "set_epoch") and not hasattr(one, "__getitem__"):
        return
    held = {n: value for n, value in getattr(one, "__dict__", {}).items() if not isinstance(value, dict)}  # caches
    # What samplers draw is compared by the first batch, and who is told its epoch shuffles by it once more.
    data = hasattr(one, "__getitem__") and not hasattr(one, "set_epoch")
    yield from _known("", held, _entries if data else None)


def _entries(value: Any) -> bytes | None:
    """As `_digest`; of lists each entry: numbers and strings by their value, all others by where they are."""
    if not isinstance(value, list | tuple) or not len(value) <= _LONG:
        return _digest(value)
    return _LIST + array("q", [hash(x) if type(x) in _PLAIN else id(x) for x in value]).tobytes() + bytes(
        [all(type(x) in _PLAIN for x in value)]
    )


def _differ(before: bytes | None, now: bytes) -> bool:
    """Whether that is a change. Objects in a list may be made anew (a cache); in another order they count."""
    if before in (None, now):
        return False
    if before.startswith(_LIST) and now.startswith(_LIST) and len(before) == len(now) and 0 in (before[-1], now[-1]):
        return sorted(_keys(before)) == sorted(_keys(now))
    return True


def _keys(entries: bytes) -> array[int]:
    keys = array("q")
    keys.frombytes(entries[len(_LIST) : -1])
    return keys


def users_parts(module: nn.Module) -> list[Root]:
    """Modules of the user's classes in it that save none of their plain values."""
    found = [(name, one) for name, one in module.named_modules() if is_users(type(one))]
    return [Root(name, one, _of_torch()) for name, one in found if not has_extra_state(one)]


def _known(
    place: str, held: dict[str, Any], digest: Callable[[Any], bytes | None] | None = None
) -> Iterator[tuple[str, bytes]]:
    for name, value in held.items():
        try:
            found = (digest or _digest)(value)
        except Exception:  # of a tensor of the user's own kind
            continue
        if found is not None:
            yield f"{place}.{name}" if place else name, found


@functools.cache
def _of_torch() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


def _digest(value: Any) -> bytes | None:
    """None where it is not looked at."""
    if isinstance(value, bool | int | float):
        return repr(value).encode()
    if isinstance(value, _CONTAINERS):
        return b"%d" % len(value)
    if isinstance(value, Tensor):
        plain = value.device.type == "cpu" and value.layout is torch.strided and not value.is_quantized
        if not plain or value.numel() * value.element_size() > _BYTES:
            return None
        value = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(value, np.ndarray) and value.nbytes <= _BYTES and not value.dtype.hasobject:
        return hashlib.blake2b(value.tobytes(), digest_size=16).digest()
    return None
