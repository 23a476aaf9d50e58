"""The layouts that the commands know, and what lies in a directory under any of them."""

from __future__ import annotations

from pathlib import Path

from lastgasp.checkpoint import Candidate, DirectoryLayout, SingleFile, candidates
from lastgasp.errors import ConfigError
from lastgasp.ports import Layout
from lastgasp.pytorch.layout import PlainFiles
from lastgasp.tensorflow.layout import LAYOUT

LIGHTNING, MEGATRON, PLAIN = SingleFile(".ckpt"), DirectoryLayout("iter_*"), PlainFiles()
LAYOUTS: dict[str, Layout] = {
    "lightning": LIGHTNING,
    "megatron": MEGATRON,
    "tensorflow": LAYOUT,
    "pytorch": PLAIN,
}
"""By the name of their format. What two of them find belongs to the first."""


def find(directory: Path) -> list[tuple[str, Layout, Candidate]]:
    """Format, layout and checkpoint, newest first.

    Raises:
        ConfigError: the directory cannot be listed.
    """
    found: dict[Path, tuple[str, Layout, Candidate]] = {}
    for name, layout in LAYOUTS.items():
        for candidate in candidates([directory], layout):
            found.setdefault(candidate.path, (name, layout, candidate))
    return sorted(found.values(), key=lambda item: item[2].age_key, reverse=True)


def nothing_in(directory: Path) -> ConfigError:
    """The error for a directory without checkpoints."""
    allowed = "a directory with *.ckpt, *.pt or *.pth files, TensorFlow's *.index with *.data-*, or iter_* directories"
    return ConfigError("DIR", str(directory), allowed, "Give the checkpoint directory.")
