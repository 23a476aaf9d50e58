"""Chooses who copies and compares at each boundary: C (`_copies.c`), or Python where there is none."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_, truth
from types import ModuleType
from typing import Any

from lastgasp.steps.writer import in_python

log = logging.getLogger("lastgasp")

LAYOUT, INTERFACE = 1, 3
"""Of a random state, and of the extension's functions, as `_copies.c` has them."""


def compiled() -> ModuleType | None:
    """The extension; None where it is switched off (`LASTGASP_PURE_PYTHON=1`), missing, or of another layout."""
    return None if in_python() else _load()


Values = Callable[[tuple[dict[str, Any], ...]], tuple[Any, ...]]


def values_of() -> Values:
    """Who takes all values of some dictionaries, one dictionary behind the other; ask once, call often."""
    copies = compiled()
    return copies.values if copies is not None else _values


def _values(dictionaries: tuple[dict[str, Any], ...]) -> tuple[Any, ...]:
    return tuple(chain(*map(dict.values, dictionaries)))


Check = tuple[Any, type, tuple[str, ...] | None, Any, int]
"""A value, its class, and either names and values of attributes with the number of all, or the content of a list or of
a dict; None in its place where it has to be looked at in each step."""
Changes = Callable[[list[Check]], list[int] | None]


def changes_of() -> Changes:
    """Who finds the numbers of checks that do not hold any more (None: all do); ask once, call often."""
    copies = compiled()
    return copies.changes if copies is not None else _changes


def _changes(checks: list[Check]) -> list[int] | None:
    return [i for i, check in enumerate(checks) if not holds(check)] or None


def holds(check: Check) -> bool:
    """Whether a value has what it had; False also where that cannot be told."""
    value, cls, names, expected, count = check
    now: object = type(value)
    if now is not cls or expected is None:
        return False
    if names is not None:
        try:
            own = value.__dict__
            return len(own) == count and all(map(is_, map(own.__getitem__, names), expected))
        except Exception:  # there is none of that name; or the user's object
            return False
    if len(value) != len(expected):
        return False
    if cls is dict:
        return all(map(is_, value, expected)) and all(map(is_, value.values(), expected.values()))
    return all(map(is_, value, expected))


Truths = Callable[[list[Any], str], bytes]


def truths_of() -> Truths:
    """Who says of some objects, a byte for each, whether an attribute is true; ask once, call often."""
    copies = compiled()
    return copies.truths if copies is not None else _truths


def _truths(objects: list[Any], name: str) -> bytes:
    return bytes(map(truth, map(attrgetter(name), objects)))


@functools.cache
def _load() -> ModuleType | None:
    try:
        module = importlib.import_module("._copies", __package__)
        built = module.LAYOUT, getattr(module, "INTERFACE", 1)
        if built != (LAYOUT, INTERFACE):
            raise ImportError(f"it was built for layout and interface {built}, this is {LAYOUT, INTERFACE}")
    except ImportError as error:
        # the marks' writer, which is built with it, says it to people
        log.debug("each step is captured by Python, which costs some 20 us more: no extension (%s)", error)
        return None
    return module
