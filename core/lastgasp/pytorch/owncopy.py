"""Copies of what `state_dict` of a scheduler returns, and what is filled into a dict of the user's."""

from __future__ import annotations

import copy
import threading
from collections import deque
from itertools import zip_longest
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

_PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None)))
_ELSEWHERE = (nn.Module, Optimizer)


def own_copy(value: Any) -> Any:
    """A copy of containers, tensors and arrays, however nested, and of schedulers; any other object as it is.

    Not `copy.deepcopy`: schedulers that hold another one have a way to the optimizer, and with it to all parameters.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return _own_parts(value.copy())
    if kind is list or kind is tuple:
        return value[:] if _PLAIN.issuperset(map(type, value)) else kind(map(own_copy, value))
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, set | bytearray | np.ndarray):
        return copy.copy(value)
    if isinstance(value, dict | list | deque):
        found = copy.copy(value)
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found[key] = own_copy(value[key])
        return found
    return _without_optimizer(value) if isinstance(value, LRScheduler) else value


class _Copying(threading.local):
    """Copies by the id of what they are of: schedulers may hold each other."""

    def __init__(self) -> None:
        self.made = dict[int, Any]()


_copying = _Copying()


def _without_optimizer(scheduler: Any) -> Any:
    """Of one that another one holds: a file would have all parameters with it (`inner_schedules`)."""
    own, made = vars(scheduler), _copying.made
    if id(scheduler) in made:
        return made[id(scheduler)]
    outermost = not made
    try:
        found = made[id(scheduler)] = object.__new__(type(scheduler))
        state = own.copy() if "optimizer" not in own else own_copy(scheduler.state_dict())
        vars(found).update(_own_parts(_without_models(state)))
        return found
    except Exception:  # of the user's own kind
        return scheduler
    finally:
        if outermost:
            made.clear()


def schedule_of(scheduler: Any) -> dict[str, Any]:
    """A copy of what its `state_dict` returns; without a model that it holds, which has its own place."""
    own = getattr(scheduler, "__dict__", {})
    if getattr(type(scheduler), "state_dict", None) is not LRScheduler.state_dict or "state_dict" in own:
        found: dict[str, Any] = own_copy(scheduler.state_dict())
        return found
    there = own.copy()
    there.pop("optimizer", None)
    return _own_parts(_without_models(there))


def _without_models(there: dict[str, Any]) -> dict[str, Any]:
    for name in [name for name, one in there.items() if type(one) not in _PLAIN and isinstance(one, _ELSEWHERE)]:
        del there[name]
    return there


def _own_parts(copied: dict[Any, Any]) -> dict[Any, Any]:
    for key, item in copied.items():
        if type(item) not in _PLAIN:
            copied[key] = own_copy(item)
    return copied


def fill_in(item: dict[Any, Any], stored: dict[Any, Any]) -> None:
    """Have a dict be as it was stored. Each tensor comes to the device of the one that was in its place."""
    placed = {key: _placed(value, item.get(key)) for key, value in stored.items()}
    item.clear()
    item.update(placed)


def _placed(stored: Any, before: Any) -> Any:
    if isinstance(stored, Tensor):
        return stored.to(before.device) if isinstance(before, Tensor) else stored
    if isinstance(stored, dict) and isinstance(before, dict):
        for key in stored:
            stored[key] = _placed(stored[key], before.get(key))
    elif type(stored) is type(before) and isinstance(stored, list | tuple):
        row = [_placed(*pair) for pair in zip_longest(stored, before[: len(stored)])]
        if isinstance(stored, list):
            stored[:] = row
        elif type(stored) is tuple:
            return tuple(row)
    return stored
