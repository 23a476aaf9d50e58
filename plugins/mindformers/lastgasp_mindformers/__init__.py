"""Resilience for MindFormers and MindSpore: `lastgasp: {enable: True}` in the YAML, or `LastGasp("ckpts")` by hand."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from lastgasp.adapter import MissingExtra

if importlib.util.find_spec("mindspore") is None:
    raise MissingExtra("mindspore", "mindformers")

from lastgasp_mindformers.installation import install, place, uninstall

if TYPE_CHECKING:
    from lastgasp_mindformers.callback import LastGasp

__all__ = ["LastGasp", "install", "uninstall"]


def __getattr__(name: str) -> Any:
    """`LastGasp`, which needs MindSpore imported, only when it is asked for.

    The hooks are placed here: of `model.train(..., callbacks=[LastGasp("ckpts")])` Python looks `model.train` up first.
    """
    if name == "LastGasp":
        from lastgasp_mindformers.callback import LastGasp

        place()
        return LastGasp
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
