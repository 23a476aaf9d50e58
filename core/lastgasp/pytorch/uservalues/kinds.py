"""Which values can be recorded and put back, by their types."""

from __future__ import annotations

import array
import collections
import datetime
import decimal
import enum
import fractions
import functools
import logging
import pathlib
import random
import re
import sys
import sysconfig
import threading
import types
import uuid
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

PLAIN, LEFT, UNKNOWN = "plain", "left", "unknown"
"""Nothing in it changes; it is somebody else's to restore; it may change, and how is not known."""
LIST, DICT, SET, DEQUE, TUPLE, BYTES, ARRAY = "list", "dict", "set", "deque", "tuple", "bytearray", "array"
TENSOR, NDARRAY, GENERATOR, RANDOM, NUMPY_RANDOM = "tensor", "ndarray", "generator", "random", "numpy random"
OBJECT, MODULE = "object", "module"

_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Event, threading.Condition)
_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type, types.EllipsisType, types.GenericAlias,
    types.UnionType, types.CodeType, enum.Enum, np.generic,
    pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal,
    fractions.Fraction, uuid.UUID, re.Pattern, torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip
_LEFT = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, functools.partial, weakref.ref,
    types.MappingProxyType, property, staticmethod, classmethod, logging.Logger, threading.Thread, DataLoader, Dataset,
    Sampler, *_LOCKS,
)  # fmt: skip
_BY_BASE = (
    (MODULE, (nn.Module,)), (LIST, (list,)), (DICT, (dict,)), (SET, (set,)), (DEQUE, (collections.deque,)),
    (TUPLE, (tuple, frozenset)), (BYTES, (bytearray,)), (ARRAY, (array.array,)), (GENERATOR, (torch.Generator,)),
    (RANDOM, (random.Random,)), (NUMPY_RANDOM, (np.random.Generator, np.random.RandomState, np.random.BitGenerator)),
)  # fmt: skip
_OURS = (
    "torch",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "torchmetrics",
    "transformers",
    "accelerate",
    "megatron",
    "mindspeed",
    "mindspeed_llm",
    "lastgasp",
    "lastgasp_lightning",
    "lastgasp_megatron",
    "lastgasp_pytorch_lightning",
    "lastgasp_transformers",
)
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def kind_of(cls: type) -> str:
    """Of the values of a class."""
    found = _kinds.get(cls)
    if found is None:
        found = _kinds[cls] = _kind_of(cls)
    return found


_kinds: dict[type, str] = {}
_slots: dict[type, tuple[str, ...]] = {}


def _kind_of(cls: type) -> str:
    if issubclass(cls, torch.Tensor):
        return TENSOR if cls in (torch.Tensor, nn.Parameter, nn.Buffer) else UNKNOWN
    if issubclass(cls, np.ndarray):
        return NDARRAY if cls in (np.ndarray, np.memmap) else UNKNOWN
    if issubclass(cls, _PLAIN) or cls.__module__ == "typing":
        return PLAIN
    if issubclass(cls, random.SystemRandom) or (issubclass(cls, _LEFT) and not issubclass(cls, nn.Module)):
        return LEFT
    for kind, bases in _BY_BASE:
        if issubclass(cls, bases):
            return kind
    if any(base.__module__.partition(".")[0] in _OURS for base in cls.__mro__):
        return LEFT
    return OBJECT if is_users(cls) or cls in (types.SimpleNamespace, _namespace()) else UNKNOWN


def is_users(cls: type) -> bool:
    """It stands in the user's own code: neither in an installed package, nor in Python's library."""
    return is_users_module(cls.__module__)


def is_users_module(name: str) -> bool:
    """The same of a module that was imported."""
    if name == "__main__":
        return True
    if name.partition(".")[0] in _OURS:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and not file.startswith(_INSTALLED) and "-packages/" not in file


def attributes(value: Any, skip: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Those of an object of the user's: of its `__dict__` and its slots, but for functions, modules, and `skip`."""
    own = getattr(value, "__dict__", None)
    found = {name: v for name, v in own.items() if name not in skip} if own else {}
    for name in slots_of(type(value)):
        try:
            found[name] = getattr(value, name)
        except AttributeError:
            continue
    for name in [name for name, v in found.items() if isinstance(v, _FUNCTIONS)]:
        del found[name]
    return found


def is_function(value: Any) -> bool:
    """Whether `attributes` leaves it out."""
    return isinstance(value, _FUNCTIONS)


_FUNCTIONS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, functools.partial,
)  # fmt: skip


def _slots_of(cls: type) -> tuple[str, ...]:
    if issubclass(cls, (dict, list, set, collections.deque)) or not is_users(cls):
        return ()
    found: list[str] = []
    for base in cls.__mro__:
        names: Iterable[str] | str = vars(base).get("__slots__", ())
        names = [names] if isinstance(names, str) else names
        for name in names:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def put_attributes(value: Any, wanted: Mapping[str, Any], skip: frozenset[str], remove: bool) -> None:
    """Have the object these attributes; remove: those that it has besides are removed."""
    now = attributes(value, skip)
    for name, v in wanted.items():
        if name not in now or now[name] is not v:
            _set(value, name, v)
    for name in now.keys() - wanted.keys() if remove else ():
        _delete(value, name)


def slots_of(cls: type) -> tuple[str, ...]:
    """Names of a class's slots."""
    found = _slots.get(cls)
    if found is None:
        found = _slots[cls] = _slots_of(cls)
    return found


def _set(value: Any, name: str, v: Any) -> None:
    own = getattr(value, "__dict__", None)
    if own is not None and name not in slots_of(type(value)):
        own[name] = v  # not by the object's own __setattr__, which may count
    else:
        object.__setattr__(value, name, v)


def _delete(value: Any, name: str) -> None:
    own = getattr(value, "__dict__", None)
    if own is not None and name in own:
        del own[name]
    else:
        object.__delattr__(value, name)


@functools.cache
def _namespace() -> type:
    from argparse import Namespace

    return Namespace
