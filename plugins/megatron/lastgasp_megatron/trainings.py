"""Which training of its script one is: a script may call `pretrain` several times, as for the stages of a curriculum.

The number is the same after a restart, because the whole script runs again; checkpoints and arenas have it.
"""

from __future__ import annotations

from pathlib import Path

from lastgasp.adapter import ManifestWriter, Place
from lastgasp.adapter.checkpoint import Candidate, Fit, number_of
from lastgasp_megatron.tracker import FORMAT


class Trainings:
    """Those of one process, counted by the directory that they save in."""

    def __init__(self) -> None:
        self._counts: dict[Path, int] = {}
        self._another = True

    def begins(self) -> None:
        """`pretrain` is called by the script, and not to enter a training again."""
        self._another = True

    def number(self, directory: Path) -> int:
        """That of the current one, from 0; `directory`: where its checkpoints go."""
        if self._another:
            self._counts[directory] = self._counts.get(directory, -1) + 1
            self._another = False
        return self._counts.get(directory, 0)


def name_of(number: int, directory: Path) -> str:
    """For people, and to compare."""
    return f"training {number} in {directory.absolute()}"


def writer_of(place: Place, number: int, sha256: bool = False) -> ManifestWriter:
    """Names in manifests who writes, and which training, unless it is the first one of its directory."""
    return ManifestWriter(FORMAT, place, fit=(lambda: Fit(number=number)) if number else None, sha256=sha256)


def is_of(candidate: Candidate, number: int) -> bool:
    """Whether training `number` of its directory has saved it, or a later one, before which that one has ended."""
    return (number_of(candidate) or 0) >= number
