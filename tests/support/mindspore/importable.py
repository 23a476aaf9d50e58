"""Lets the plugin's framework-free modules be imported by unit tests where there is no MindSpore.

`import lastgasp_mindformers` refuses without it, as it must. Here the package is imported once while an empty MindSpore
can be found, and that is taken away again: whatever looks for MindSpore later finds what there is.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Nothing:
    """Finds an empty `mindspore`."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """As the finder protocol says."""
        return ModuleSpec(name, None) if name == "mindspore" else None


def make_importable() -> None:
    """Idempotent."""
    finder = _Nothing()
    sys.meta_path.append(finder)
    try:
        importlib.import_module("lastgasp_mindformers")
    finally:
        sys.meta_path.remove(finder)
