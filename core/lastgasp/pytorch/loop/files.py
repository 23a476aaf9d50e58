"""The file names of a session's checkpoints: `step=00000012.pt` and `gasp-step=00000012.pt`, and no other files.

Those of further sessions of the same script are `fit=1-step=00000012.pt`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lastgasp.checkpoint import SingleFile
from lastgasp.checkpoint.samefit import name_of_fit

FORMAT = "pytorch-loop"
_NAME = re.compile(r"^(gasp-)?(fit=\d+-)?step=\d+\.pt$")


@dataclass(unsafe_hash=True)  # not frozen: the port's `name` is a settable attribute
class LoopFiles(SingleFile):
    """`SingleFile(".pt")` that leaves the user's own files, such as model_best.pt, alone."""

    suffix: str = ".pt"

    def discover(self, directory: Path) -> Iterable[Path]:
        """Names given by a session, and names of which only a manifest is left."""
        return [path for path in super().discover(directory) if _NAME.match(path.name)]


LAYOUT = LoopFiles()


def periodic_path(directory: Path, step: int, fit: int = 0) -> Path:
    """The path of a periodic checkpoint of the script's training number `fit`."""
    return directory / f"{name_of_fit(fit)}step={step:08d}.pt"


def gasp_path(directory: Path, step: int, fit: int = 0) -> Path:
    """The path of a gasp."""
    return directory / f"gasp-{name_of_fit(fit)}step={step:08d}.pt"
