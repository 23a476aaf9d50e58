"""Where the real `mindio_ttp` is installed the drop-in is not used, and that is said: one of them must go."""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path

LIBRARY = "framework_ttp/libttp_framework.so"
"""What the real package has: its core, in C++."""


def real_one(paths: list[str], own: Path) -> Path | None:
    """The folder of another `mindio_ttp` on these paths; None where there is none."""
    for path in paths:
        spec = importlib.machinery.PathFinder.find_spec("mindio_ttp", [path])
        for place in spec.submodule_search_locations or () if spec is not None else ():
            found = Path(place).resolve()
            if found != own and (found / "__init__.py").exists():
                return found
    return None


def refuse_beside_the_real_one(file: str) -> None:
    """Called by the drop-in when it is imported.

    Args:
        file: its `__init__.py`.

    Raises:
        ImportError: there is another package of its name.
    """
    found = real_one(sys.path, Path(file).resolve().parent)
    if found is not None:
        raise ImportError(
            f"lastgasp-mindio does not stand in for the mindio_ttp that is installed in {found}: uninstall one of the "
            "two (pip uninstall lastgasp-mindio keeps MindIO)"
        )
