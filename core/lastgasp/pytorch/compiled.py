"""Chooses who copies the random state and buffers at each boundary: C (`_copies.c`), or Python where there is none."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from types import ModuleType

from lastgasp.steps.writer import SWITCH

log = logging.getLogger("lastgasp")

LAYOUT = 1
"""Of a random state and of the extension, as `_copies.c` has it."""


def compiled() -> ModuleType | None:
    """The extension; None where it is switched off (`LASTGASP_PURE_PYTHON=1`), missing, or of another layout."""
    return None if os.environ.get(SWITCH) == "1" else _load()


@functools.cache
def _load() -> ModuleType | None:
    try:
        module = importlib.import_module("._copies", __package__)
        if module.LAYOUT != LAYOUT:
            raise ImportError(f"it was built for layout {module.LAYOUT}, this is {LAYOUT}")
    except ImportError as error:
        # the marks' writer, which is built with it, says it to people
        log.debug("each step is captured by Python, which costs some 20 us more: no extension (%s)", error)
        return None
    return module
