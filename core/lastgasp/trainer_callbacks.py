"""What the environment adds to each `Trainer` of Lightning's: the entry points `*.callbacks_factory`.

Lightning calls them in every `Trainer()` of an environment that has lastgasp, also where nobody has asked for it. So
they stand outside of the plugin, which needs a Lightning that it knows.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from lastgasp.startup_refusal import tell_launcher


def of_lightning() -> list[Any]:
    """For `lightning.pytorch`: see `lastgasp_lightning.entry`."""
    return _from("lastgasp_lightning")


def of_pytorch_lightning() -> list[Any]:
    """For `pytorch_lightning`, whose classes are its own."""
    return _from("lastgasp_pytorch_lightning")


def _from(plugin: str) -> list[Any]:
    """The callbacks that are asked for.

    Raises:
        Exception: some are, and the plugin cannot be imported.
    """
    tell_launcher()
    if os.environ.get("LASTGASP", "0") in ("", "0") and not os.environ.get("LASTGASP_FAULT"):
        return []
    found: list[Any] = import_module(f"{plugin}.entry").callbacks()
    return found
