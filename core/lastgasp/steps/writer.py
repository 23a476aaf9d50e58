"""Selects the writer of the ring: the compiled extension, or Python without it."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import Protocol

from lastgasp.config import env_flag
from lastgasp.errors import ConfigError

from . import format as layout
from . import pyring

log = logging.getLogger("lastgasp")

SWITCH = "LASTGASP_PURE_PYTHON"
"""Set to 1 it takes the Python writer even where the extension is there."""

INTERFACE = 2
"""Of the extension's functions, as `_ring.c` has it."""


class Ring(Protocol):
    """What both modules call `Ring`: the memory that their marks write to."""

    def detach(self) -> None:
        """Release the memory; the marks are off for good."""

    @property
    def mask(self) -> int:
        """What is on; 0 once detached."""

    def take_id(self) -> int:
        """The next range's id, for a row that no mark makes."""


def choose() -> ModuleType:
    """The module with `Ring` and `Mark`: `_ring`, or `pyring`, which is about ten times slower (logged once)."""
    return pyring if in_python() else _compiled() or pyring


def in_python() -> bool:
    """What `LASTGASP_PURE_PYTHON` says. A value that is no switch's counts as no; `lastgasp doctor` names it."""
    try:
        return env_flag(SWITCH)
    except ConfigError:
        return False


@functools.cache
def _compiled() -> ModuleType | None:
    try:
        module = importlib.import_module("._ring", __package__)
        built = module.LAYOUT, getattr(module, "INTERFACE", 1)
        if built != (layout.VERSION, INTERFACE):
            raise ImportError(f"it was built for ring and interface {built}, this is {layout.VERSION, INTERFACE}")
    except ImportError as error:
        log.info(
            "step marks are written by Python, at about 1 us each instead of 0.1: the extension is not there "
            "(%s). Install lastgasp where there is a C compiler to get it.",
            error,
        )
        return None
    return module


def forget_thread() -> None:
    """In a forked child: the only thread has another id than it had."""
    pyring.forget_thread()
    # Never load it here: another thread of the parent may have held the loader's lock.
    compiled = _compiled() if _compiled.cache_info().currsize else None
    if compiled is not None:
        compiled.forget_thread()
