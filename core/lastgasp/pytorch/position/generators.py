"""Random generators that the user's own objects hold: a data set's, a collate function's, a sampler's.

They are no part of the random state of the process. What is drawn from them goes on from batch to batch, so that a
resumed run that began with fresh ones would train on other data.
"""

from __future__ import annotations

import functools
import pickle
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch

from lastgasp.pytorch import rng

OWN = (
    "the data set, its collate function or its sampler hold other random generators than when the checkpoint was "
    "saved: those begin anew"
)
_DEEP, _WIDE, _MANY = 8, 64, 4_000
"""How far from its loader a generator is looked for, in how long lists, among how many objects."""
_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), torch.Tensor, np.ndarray, np.generic, type,
           types.ModuleType)  # fmt: skip
_MAKERS = ("__getitem__", "__getitems__", "__iter__", "__call__")
"""Methods that make a sample or a batch."""
_NEW: dict[str, Callable[[], Any]] = {
    "Random": random.Random,
    "RandomState": np.random.RandomState,
    "Generator/cpu": torch.Generator,
    "Generator/PCG64": np.random.default_rng,
}


class OwnGenerators:
    """Those that are found from some objects; the generators of the process itself are none.

    Looked at are attributes, short lists and dicts, and what functions close over or name in their modules. One that
    is made for the first batch is found behind it.

    Args:
        roots: a data set, a collate function, a sampler, ...
        used: generators that stand where they should in this run, by id; shared by all of it.

    Attributes:
        lost: one that was saved is not there any more.
    """

    def __init__(self, roots: list[Any], used: dict[int, Any]) -> None:
        self._roots, self._used, self.lost = roots, used, False
        self.look()

    def look(self) -> None:
        """Find them: at the beginning of a pass, and once more when it has given a batch."""
        self._found, self._looks = self._generators(), 2

    def __bool__(self) -> bool:
        if self._looks and not self._found:
            self._found, self._looks = self._generators(), self._looks - 1
        return bool(self._found)

    def states(self) -> bytes:
        """Where they stand; empty where there are none."""
        if not self:
            return b""
        self._used.update({id(one): one for one in self._found.values()})
        return msgspec.msgpack.encode([(where, _kind(one), _state(one)) for where, one in self._found.items()])

    def restore(self, states: bytes, unused: bool = False) -> None:
        """Put back what `states` returned.

        Args:
            unused: leave those alone that this run has used.
        """
        if not states or not self._roots:  # an adapter of a loader has states of another form
            return
        try:
            rows = msgspec.msgpack.decode(states, type=list[tuple[str, str, bytes]])
        except msgspec.DecodeError:  # an adapter's: the loader was of another shape then (had no workers, or no `map`)
            self.lost = bool(self)
            return
        objects = _objects(self._roots)
        for where, kind, state in rows:
            one = objects.get(where) or _made(objects, where, kind)
            if one is None or not _is_generator(one) or _kind(one) != kind:
                self.lost = True
            elif not unused or id(one) not in self._used:
                _set(one, state)
                self._used[id(one)] = one

    def _generators(self) -> dict[str, Any]:
        return {where: one for where, one in _objects(self._roots).items() if _is_generator(one)}


def places_of(states: bytes) -> list[str]:
    """The ways to the generators whose states `OwnGenerators.states` has returned."""
    return [row[0] for row in msgspec.msgpack.decode(states, type=list[tuple[str, str, bytes]])] if states else []


def _made(objects: dict[str, Any], where: str, kind: str) -> Any:
    """A generator that an object will make for its first batch, and has not made yet."""
    above, _, name = where.rpartition("/")
    holder = objects.get(above)
    if kind not in _NEW or getattr(holder, "__dict__", {}).get(name, holder) is not None:
        return None
    setattr(holder, name, made := _NEW[kind]())
    return made


def _objects(roots: list[Any]) -> dict[str, Any]:
    """What is found from `roots`, each once, by the way to it; the same in each process of one program."""
    found: dict[str, Any] = {}
    numpys: Any = np.random.mtrand
    seen = {id(one) for one in (getattr(random, "_inst", None), numpys._rand, torch.default_generator)}
    level = [(str(number), root) for number, root in enumerate(roots)]
    kept = []  # so that no id is used again
    for _ in range(_DEEP):
        deeper: list[tuple[str, Any]] = []
        for where, one in level:
            if id(one) in seen or len(found) > _MANY:
                continue
            seen.add(id(one))
            kept.append(one)
            try:
                if isinstance(one, _LEAVES):
                    continue
                deeper += [] if _is_generator(one) else [(f"{where}/{name}", part) for name, part in _parts(one)]
                found[where] = one
            except Exception:  # a user's object may raise whatever it is asked, such as a handle that is closed
                continue
        level = deeper
    return found


def _is_generator(one: Any) -> bool:
    if isinstance(one, random.Random):
        return type(one).getstate is random.Random.getstate  # SystemRandom has no state
    return isinstance(one, np.random.Generator | np.random.RandomState | torch.Generator)


def _parts(one: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(one, dict):
        yield from ((str(key), value) for key, value in one.items()) if len(one) <= _WIDE else ()
    elif isinstance(one, list | tuple):
        yield from ((str(number), value) for number, value in enumerate(one)) if len(one) <= _WIDE else ()
    elif isinstance(one, types.MethodType):
        yield from (("self", one.__self__), ("function", one.__func__))
    elif isinstance(one, types.FunctionType):
        yield from _named(one)
    else:
        yield from vars(one).items() if hasattr(one, "__dict__") else ()
        if isinstance(one, functools.partial):
            yield from (("func", one.func), ("args", one.args), ("keywords", one.keywords))
        for kind in type(one).__mro__:
            yield from ((name, vars(kind)[name]) for name in _MAKERS if name in vars(kind))


def _named(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Objects that a function closes over, and generators that it names in its module."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has none yet
            continue
    for name in function.__code__.co_names:
        if _is_generator(found := function.__globals__.get(name)):
            yield f"global {name}", found


def _kind(one: Any) -> str:
    name = type(one).__name__
    if isinstance(one, torch.Generator):
        return f"{name}/{one.device.type}"
    return f"{name}/{type(one.bit_generator).__name__}" if isinstance(one, np.random.Generator) else name


def _state(one: Any) -> bytes:
    if isinstance(one, torch.Generator):
        return bytes(one.get_state().numpy())
    if isinstance(one, np.random.Generator):
        return pickle.dumps(one.bit_generator.state)
    return pickle.dumps(one.getstate() if isinstance(one, random.Random) else one.get_state(legacy=False))


def _set(one: Any, state: bytes) -> None:
    if isinstance(one, torch.Generator):
        one.set_state(rng.as_tensor(state))
    elif isinstance(one, np.random.Generator):
        one.bit_generator.state = pickle.loads(state)
    elif isinstance(one, random.Random):
        one.setstate(pickle.loads(state))
    else:
        one.set_state(pickle.loads(state))
