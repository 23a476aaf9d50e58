"""Copies of what `state_dict` of a scheduler returns, which are the live lists and dicts of the scheduler mostly."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import numpy as np
from torch import Tensor

_PLAIN = frozenset((int, float, bool, str, bytes, complex, type(None)))


def own_copy(value: Any) -> Any:
    """A copy of containers, tensors and arrays, however nested; any other object as it is.

    Not `copy.deepcopy`: schedulers that hold another one have a way to the optimizer, and with it to all parameters.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is dict:
        return {key: own_copy(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(map(own_copy, value))
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, set | bytearray | np.ndarray):
        return copy.copy(value)
    if isinstance(value, dict | list | deque):
        found = copy.copy(value)
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found[key] = own_copy(value[key])
        return found
    return value
