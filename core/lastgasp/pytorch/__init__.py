"""Plain PyTorch: a session for a hand-written loop; files of `torch.save` that are atomic and verified.

Names are loaded when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lastgasp.errors import MissingExtra

if TYPE_CHECKING:
    from lastgasp.pytorch.elastic.loader import ElasticLoader
    from lastgasp.pytorch.loop.again import train
    from lastgasp.pytorch.loop.session import Session
    from lastgasp.pytorch.loop.state import TorchState
    from lastgasp.pytorch.plain import load, newest_good, save

_PUBLIC = {
    "ElasticLoader": "elastic.loader",
    "Session": "loop.session",
    "TorchState": "loop.state",
    "load": "plain",
    "newest_good": "plain",
    "save": "plain",
    "train": "loop.again",
}
"""Public name -> module of this package. Most modules here need torch; the command line uses one that does not."""

__all__ = ["ElasticLoader", "Session", "TorchState", "load", "newest_good", "save", "train"]


def __getattr__(name: str) -> Any:
    """A public name.

    Raises:
        AttributeError: there is none of that name.
        MissingExtra: torch is not installed.
    """
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise MissingExtra("torch", "pytorch") from error
