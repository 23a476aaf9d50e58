"""A checkpoint of one file in one pass: each rank loads all of it, so what it verifies is what it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lastgasp.adapter.preload import Preload
from lastgasp.checkpoint import Candidate, FileEntry
from lastgasp.checkpoint.manifest import Fit
from lastgasp.checkpoint.samefit import differences
from lastgasp.pytorch.io import load_entry


class OnePass(Preload):
    """Of a checkpoint that is a directory, or of something else than `fit`, nothing is unpickled before it is chosen.

    Args:
        fit: which training this is, of what.
    """

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self._fit = fit

    def covers(self, candidate: Candidate) -> list[str]:
        """Its file."""
        return [entry.path for entry in self.mine(candidate)]

    def mine(self, candidate: Candidate) -> list[FileEntry]:
        """The same on all ranks."""
        manifest = candidate.manifest
        if manifest is None or candidate.path.is_dir() or differences(candidate.path, manifest.fit, self._fit):
            return []
        return list(manifest.files)

    def parse(self, path: Path, entry: FileEntry) -> Any:
        """Not weights_only: it is our own file, and holds states of the user's objects."""
        return load_entry(path, entry, map_location="cpu", weights_only=False)
