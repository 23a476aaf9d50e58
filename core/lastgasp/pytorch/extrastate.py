"""State that modules keep beside parameters and buffers (`get_extra_state`), captured at the end of each step.

It may change in the middle of a step (a counter in `forward`), so its value at a fault belongs to no step. Where
capturing it takes too long (layers for FP8 copy theirs from the device, one by one), it is captured every N-th step.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from lastgasp import _clock

log = logging.getLogger("lastgasp")

T = TypeVar("T")

BUDGET = 0.01
"""The part of a step's time that captures may take."""
FREE = 1e-3
"""Seconds: a capture that takes no longer is made at each step."""
MEASURED = 8
"""Captures between two choices of N."""


class EveryNth:
    """Does something at the end of every N-th step, so that it takes `BUDGET` of the time at most.

    Attributes:
        every: N.
        cost: seconds that it takes; 0 while that is not known.
    """

    def __init__(self) -> None:
        self.every, self.cost = 1, 0.0
        self._since, self._ended, self._step, self._turn = 0, math.nan, -1, True
        self._costs, self._steps = list[float](), list[float]()

    def step_over(self, step: int, act: Callable[[], T]) -> T | None:
        """A step has ended. Returns what `act` does, None where it is not its turn; once more for the same step."""
        if step == self._step:
            return act() if self._turn else None
        began, self._step = _clock.monotonic(), step
        if not math.isnan(self._ended):
            self._steps = [*self._steps[1 - MEASURED :], began - self._ended]
        self._since, found = self._since + 1, None
        self._turn = self._since >= self.every
        if self._turn:
            self._since, found = 0, act()
            self._costs.append(_clock.monotonic() - began)
            if len(self._costs) == MEASURED:
                self._choose()
        self._ended = _clock.monotonic()
        return found

    def _choose(self) -> None:
        self.cost, step = median(self._costs), median(self._steps)
        self._costs = []
        self.every = 1 if self.cost <= FREE else math.ceil(self.cost / (self.cost + step) / BUDGET - 1e-9)


class ExtraStates:
    """Those of modules, as they are found there now.

    Args:
        modules: a module, for it and all below it; or modules by key.
    """

    def __init__(self, modules: nn.Module | Mapping[Any, nn.Module]) -> None:
        self._modules: dict[Hashable, nn.Module] = {}
        if isinstance(modules, nn.Module):
            named = modules.named_modules(remove_duplicate=False)
            modules = {f"{name}.{_EXTRA_STATE_KEY_SUFFIX}".removeprefix("."): one for name, one in named}
        self._modules.update((key, one) for key, one in modules.items() if has_extra_state(one))
        self._turns = EveryNth()

    def take(self) -> dict[Any, Any]:
        """Copies of their current values, by key; of a whole module by key in `state_dict`."""
        return {key: copy.deepcopy(child.get_extra_state()) for key, child in self._modules.items()}

    def step_over(self, step: int) -> dict[Any, Any]:
        """At the end of each step: as `take`, or nothing where it is not this step's turn (`missing`)."""
        if not self._modules:
            return {}
        before, found = self._turns.every, self._turns.step_over(step, self.take) or {}
        if self._turns.every != before:
            log.info("get_extra_state of %d modules takes %.1f ms: it is called at the end of every %dth step, so that "
                     "it costs 1 %%", len(self._modules), self._turns.cost * 1e3, self._turns.every)  # fmt: skip
        return found

    def missing(self, taken: Mapping[Any, Any]) -> str:
        """What to note on a checkpoint that has only `taken` of the end of its step; empty where that is all."""
        if taken or not self._modules:
            return ""
        return (
            f"the extra state of {len(self._modules)} modules (get_extra_state) is that of the moment of the fault: "
            f"it takes {self._turns.cost * 1e3:.1f} ms to get, and is captured at the end of every "
            f"{self._turns.every}th step only. A resume will not be bit-equal where it changes within a step"
        )

    def restore(self, taken: Mapping[Any, Any]) -> None:
        """Give the modules what `take` has returned."""
        for key, value in taken.items():
            self._modules[key].set_extra_state(copy.deepcopy(value))


def has_extra_state(module: nn.Module) -> bool:
    """Whether it has state of that kind."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def put(states: dict[str, Any], taken: Mapping[str, Any], prefix: str = "") -> None:
    """Put what `ExtraStates.take` has returned into a `state_dict`, whose keys lack `prefix`."""
    states.update({key: value for name, value in taken.items() if (key := _behind(name, prefix)) in states})


def _behind(name: str, prefix: str) -> str:
    return name.removeprefix(prefix) if name.startswith(prefix) else ""
