"""How files of `torch.save` lie in a directory. Implements `ports.Layout`; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lastgasp.checkpoint import SingleFile
from lastgasp.checkpoint.layout import MANIFEST_SUFFIX, is_moved_away

FORMAT = "pytorch"
"""`format` in the manifests."""
ENDINGS = (".pt", ".pth", ".pt.tar", ".pth.tar")
"""Names that PyTorch's documentation gives to checkpoints."""
_NUMBERS = (
    re.compile(r"(?:step|iter(?:ation)?)[=_-]?(\d+)"),
    re.compile(r"epoch[=_-]?(\d+)"),
    re.compile(r"(?<!rank)[=_-](\d+)$"),  # of the name without its ending: ckpt-12; resnet50 has no step
)
_ONE = SingleFile()


@dataclass(unsafe_hash=True)  # not frozen: the port's `name` is a settable attribute
class PlainFiles:
    """One file per checkpoint, with any of several endings, and any other file that has a manifest.

    Args:
        endings: how names of checkpoints end, with the dot.
        others: whether files with other endings count when a manifest stands beside them.
    """

    endings: tuple[str, ...] = ENDINGS
    others: bool = True
    name: str = field(default="plain-files", init=False)

    def discover(self, directory: Path) -> Iterable[Path]:
        """Names with an ending, names that only a manifest is left of, and other files with a manifest."""
        found = {path for ending in self.endings for path in SingleFile(ending).discover(directory)}
        return sorted(found | (_with_manifest(directory) if self.others else set()))

    def files(self, checkpoint: Path) -> Mapping[str, Path]:
        """The file itself, or nothing when it is gone."""
        return _ONE.files(checkpoint)

    def parts(self, checkpoint: Path) -> list[Path]:
        """The file itself, or nothing when it is gone."""
        return _ONE.parts(checkpoint)

    def owns(self, checkpoint: Path, relative: str) -> bool:
        """Whether it is the file's own name."""
        return _ONE.owns(checkpoint, relative)

    def manifest_path(self, checkpoint: Path) -> Path:
        """`<name>.manifest.json` beside the file."""
        return _ONE.manifest_path(checkpoint)

    def step(self, checkpoint: Path) -> int | None:
        """The number after step, iter or epoch in the name, else the one after the last `-`, `_` or `=` of it."""
        stem = checkpoint.name
        for ending in sorted(self.endings, key=len, reverse=True):
            stem = stem.removesuffix(ending)
        for pattern in _NUMBERS:
            if numbers := pattern.findall(stem):
                return int(numbers[-1])
        return None


def _with_manifest(directory: Path) -> set[Path]:
    manifests = directory.glob(f"*{MANIFEST_SUFFIX}") if directory.is_dir() else ()
    data = [path.with_name(path.name.removesuffix(MANIFEST_SUFFIX)) for path in manifests]
    return {path for path in data if path.is_file() and not is_moved_away(path.name)}
