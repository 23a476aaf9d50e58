"""The layouts that the commands know, and what lies in a directory under any of them."""

from __future__ import annotations

from pathlib import Path

from lastgasp.checkpoint import Candidate, DirectoryLayout, SingleFile, candidates
from lastgasp.errors import ConfigError
from lastgasp.ports import Layout

LIGHTNING, MEGATRON = SingleFile(".ckpt"), DirectoryLayout("iter_*")
LAYOUTS: dict[str, Layout] = {"lightning": LIGHTNING, "megatron": MEGATRON}
"""By the name of their format."""


def find(directory: Path) -> list[tuple[str, Layout, Candidate]]:
    """Format, layout and checkpoint, newest first.

    Raises:
        ConfigError: the directory cannot be listed.
    """
    found = [(name, layout, c) for name, layout in LAYOUTS.items() for c in candidates([directory], layout)]
    return sorted(found, key=lambda item: item[2].age_key, reverse=True)


def nothing_in(directory: Path) -> ConfigError:
    """The error for a directory without checkpoints."""
    allowed = "a directory with *.ckpt files or iter_* directories"
    return ConfigError("DIR", str(directory), allowed, "Give the checkpoint directory.")
