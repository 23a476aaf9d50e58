"""Chooses who copies the random state and buffers at each boundary: C (`_copies.c`), or Python where there is none."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, truth
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
