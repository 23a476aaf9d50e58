"""Random objects of a user's, in which things are in more than one place, and what a training does to them."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

NAMES = "abcde"
LATER = "fg"


class Holder:
    """A user's object."""


@dataclass(eq=False)
class Record:
    """A user's data class."""

    n: int = 0
    seen: Any = field(default_factory=list)


class Kind(Enum):
    """What is written nowhere."""

    ONE = 1
    OTHER = 2


class Script:
    """What a process has. The same seed gives the same.

    Attributes:
        holders: of attributes. outside: what a script has in its module, and some attributes begin with.
        weight: restored elsewhere.
    """

    def __init__(self, seed: int, odd: bool = True) -> None:
        self.random, self.odd = random.Random(seed), odd
        zero, none, self.weight = torch.zeros(()), list[Any](), torch.zeros(2)
        self.outside: list[Any] = [zero, none, np.zeros(2), {"x": zero}]
        self.holders: list[Any] = [Holder(), Holder()]
        pool = [*self.outside]
        for holder in self.holders:
            for name in NAMES:
                setattr(holder, name, self.value(pool, 0))

    def value(self, pool: list[Any], deep: int) -> Any:
        """Something new, or something that is elsewhere, too."""
        draw = self.random
        if self.odd and draw.random() < 0.05:
            numbers = [one for one in pool if isinstance(one, Tensor | np.ndarray)]
            pool.append(_view(draw.choice([self.weight, self.weight, *numbers])))
            return pool[-1]
        if pool and draw.random() < 0.35:
            return draw.choice(pool)
        kinds = _LEAVES if deep > 2 or draw.random() < 0.4 else _CONTAINERS
        found = draw.choice(kinds)(self, lambda: self.value(pool, deep + 1))
        if not isinstance(found, int | float | tuple):
            pool.append(found)
        return found

    def hook(self, seed: int) -> None:
        """Sets things before the first step."""
        self.random = random.Random(seed)
        pool = _all(vars(one) for one in self.holders)
        for name in LATER:
            setattr(self.random.choice(self.holders), name, self.value(pool, 1))

    def train(self, seed: int) -> None:
        """Changes things in place, and puts others where they were."""
        self.random = draw = random.Random(seed)
        for _ in range(draw.randrange(1, 9)):
            pool = _all(vars(one) for one in self.holders)
            self.weight += self.odd  # in place
            if draw.random() < 0.4 or not pool:
                setattr(draw.choice(self.holders), draw.choice(NAMES), self.value(pool, draw.randrange(3)))
            else:
                _change(draw.choice(pool), draw, lambda pool=pool: self.value(pool, 1))  # type: ignore[misc]


def _view(value: Any) -> Any:
    value = value.detach() if isinstance(value, Tensor) else value
    return value[-1:] if value.ndim else value


def _default() -> float:
    return 0.0


_LEAVES: list[Callable[..., Any]] = [
    lambda s, new: s.random.randrange(3),
    lambda s, new: 0.5,
    lambda s, new: torch.zeros(()),
    lambda s, new: torch.full((2,), float(s.random.randrange(2)), requires_grad=s.random.random() < 0.3),
    lambda s, new: np.full(2, s.random.randrange(2)),
    lambda s, new: iter(()) if s.odd and s.random.random() < 0.03 else 1,
    lambda s, new: s.random.choice([*Kind]) if s.odd and s.random.random() < 0.1 else 2,
]
_CONTAINERS: list[Callable[..., Any]] = [
    lambda s, new: [new() for _ in range(s.random.randrange(4))],
    lambda s, new: [new()] * 3,
    lambda s, new: {key: new() for key in ("x", "y", 3)[: s.random.randrange(4)]},
    lambda s, new: dict.fromkeys(("loss", "norm"), new()),
    lambda s, new: (new(), new()),
    lambda s, new: deque([new()], maxlen=s.random.choice([None, 2])),
    lambda s, new: OrderedDict(x=new()),
    lambda s, new: defaultdict(s.random.choice([list, None]), x=new()),
    lambda s, new: defaultdict(_default, x=new()) if s.random.random() < 0.2 else {1, 2},
    lambda s, new: {(1, "a"), (2, "b"), ("c",)},
    lambda s, new: Record(s.random.randrange(2), new()) if s.random.random() < 0.4 else [],
]


def _change(one: Any, draw: random.Random, new: Callable[[], Any]) -> None:
    if isinstance(one, Tensor):
        with torch.no_grad():
            one.add_(1)
    elif isinstance(one, np.ndarray):
        one += 1
    elif isinstance(one, Record):
        one.n, one.seen = one.n + 1, new() if draw.random() < 0.5 else one.seen
    elif isinstance(one, dict):
        one[draw.choice(["x", "y", "loss"])] = new()
    elif isinstance(one, list) and one and draw.random() < 0.5:
        one[draw.randrange(len(one))] = new()
    elif isinstance(one, list | deque):
        one.append(new())
    elif isinstance(one, set):
        one.add(draw.randrange(9))


def _all(values: Iterable[dict[str, Any]]) -> list[Any]:
    """Everything in them that may change, once."""
    found, seen, stack = list[Any](), set[int](), [part for one in values for part in one.values()]
    while stack:
        one = stack.pop()
        if id(one) in seen or not isinstance(one, _CHANGE | tuple):
            continue
        seen.add(id(one))
        if not isinstance(one, tuple):
            found.append(one)
        if isinstance(one, Record):
            stack.append(one.seen)
        elif isinstance(one, list | tuple | deque | dict):
            stack += one.values() if isinstance(one, dict) else one
    return found


_CHANGE: Any = Tensor | np.ndarray | dict | list | deque | set | Record


def form_of(*values: Any) -> Any:
    """What is in values, and which of it is one thing: two are equal if nobody can tell them apart."""
    numbers: dict[int, int] = {}
    seen: list[tuple[Any, list[Any]]] = []

    def look(one: Any) -> Any:
        if isinstance(one, tuple):
            return ("tuple", [look(part) for part in one])
        if not isinstance(one, _CHANGE | Holder):
            return (type(one).__name__, one if isinstance(one, int | float | str | Enum) else "")
        if id(one) in numbers:
            return numbers[id(one)]
        numbers[id(one)] = len(numbers)
        kind = type(one).__name__
        if isinstance(one, Tensor | np.ndarray):
            seen.append((one, [kind, str(one.dtype), getattr(one, "requires_grad", None), one.tolist()]))
            return seen[-1][1]
        if isinstance(one, Record | Holder):
            return (kind, [(name, look(part)) for name, part in sorted(vars(one).items())])
        if isinstance(one, dict):
            return (kind, getattr(one, "default_factory", None), [(key, look(part)) for key, part in one.items()])
        if isinstance(one, set):
            return (kind, sorted(map(repr, one)))
        return (kind, getattr(one, "maxlen", None), [look(part) for part in one])

    found = [look(value) for value in values]
    for i, (one, form) in enumerate(seen):
        start = _start(one)
        parts = [(j, start - _start(other)) for j, (other, _) in enumerate(seen[:i])
                 if max(start, _start(other)) < min(start + one.nbytes, _start(other) + other.nbytes)]  # fmt: skip
        form.append(parts)
    return found


def _start(value: Any) -> int:
    return int(value.data_ptr() if isinstance(value, Tensor) else value.ctypes.data)
