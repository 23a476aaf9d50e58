"""What this rank runs on, and with which versions."""

from __future__ import annotations

import importlib
import re
import sys

import torch

OLDEST, NEWEST = (0, 12, 1), (0, 19, 2)
"""Versions of megatron-core that this was written for, both included."""


def device() -> torch.device:
    """Where Megatron puts this rank's tensors."""
    for kind in ("npu", "cuda"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return torch.empty(0, device=kind).device  # what a shim answers, too
    return torch.device("cpu")


def versions() -> dict[str, str]:
    """What this worker runs, for the table of `lastgasp ps`."""
    found = {"megatron-core": _version("megatron.core"), "torch": torch.__version__}
    return found | {name: _version(name) for name in ("mindspeed", "mindspeed_llm") if name in sys.modules}


def untried(version: str) -> str:
    """A warning about a version of megatron-core that lastgasp is untested with; empty for all others."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is not None and OLDEST <= tuple(map(int, found.groups())) <= NEWEST:
        return ""
    oldest, newest = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
    return (
        f"megatron-core {version} is not among the versions that lastgasp was tried with, {oldest} to {newest}: before "
        "you trust it, kill a rank of a short run and compare the losses, or take one of those"
    )


def _version(module: str) -> str:
    try:
        return str(getattr(importlib.import_module(module), "__version__", "unknown"))
    except ImportError:
        return "unknown"
