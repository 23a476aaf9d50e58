"""What an optimizer and a model hold besides tensors: step counters, learning rates, extra state of modules."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from lastgasp.pytorch.sharded.table import Path

Groups = Sequence[Sequence[Mapping[str, Any]]]
"""The values of each optimizer's parameter groups, without `params`."""

Objects = Sequence[tuple[Path, Any]]
"""Values that are no tensors, each with its place in the state dictionary."""

_PLAIN = (int, float, bool, str, type(None))
_PICKLED = 1


@dataclass(frozen=True)
class Values:
    """The values of a step.

    Attributes:
        objects: each value with its place in the state dictionary.
        groups: of all optimizers; None if they were not given.
    """

    objects: Objects = ()
    groups: Groups | None = None


def encode(objects: Objects, groups: Groups | None) -> bytes:
    """As `decode` reads it; empty if there is nothing. Numbers and texts need no pickle."""
    if not objects and groups is None:
        return b""
    return msgspec.msgpack.encode([[(path, _packed(value)) for path, value in objects], _packed(groups)])


def decode(data: bytes) -> Values:
    """The values of a step. They were made by this very job, and their digest was checked: they may hold pickles."""
    if not data:
        return Values()
    objects, groups = msgspec.msgpack.decode(data)
    return Values([(tuple(path), _unpacked(value)) for path, value in objects], _unpacked(groups))


def _packed(value: Any) -> Any:
    if type(value) in _PLAIN and not (type(value) is int and not -(1 << 63) <= value < 1 << 64):
        return value
    return msgspec.msgpack.Ext(_PICKLED, pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def _unpacked(value: Any) -> Any:
    return pickle.loads(value.data) if isinstance(value, msgspec.msgpack.Ext) else value
