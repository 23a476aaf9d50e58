"""Directories of a session's checkpoints of a DeepSpeed engine: `step=00000012.zero` and `gasp-step=00000012.zero`.

Each is a directory that `engine.load_checkpoint` reads: `latest`, `global_step12/`. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lastgasp.checkpoint import DirectoryLayout
from lastgasp.checkpoint.samefit import name_of_fit

FORMAT = "deepspeed"
"""`format` in the manifests."""
_NAME = re.compile(r"^(gasp-)?(fit=\d+-)?step=\d+\.zero$")


@dataclass(unsafe_hash=True)  # not frozen: the port's `name` is a settable attribute
class EngineFiles(DirectoryLayout):
    """`DirectoryLayout("*step=*.zero")` that leaves the user's own directories alone."""

    pattern: str = "*step=*.zero"

    def discover(self, directory: Path) -> Iterable[Path]:
        """Names given by a session, and names of which only a manifest is left."""
        return [path for path in super().discover(directory) if _NAME.match(path.name)]


LAYOUT = EngineFiles()


def periodic_path(directory: Path, step: int, fit: int = 0) -> Path:
    """The path of a periodic checkpoint of the script's training number `fit`."""
    return directory / f"{name_of_fit(fit)}step={step:08d}.zero"


def gasp_path(directory: Path, step: int, fit: int = 0) -> Path:
    """The path of a gasp."""
    return directory / f"gasp-{name_of_fit(fit)}step={step:08d}.zero"
