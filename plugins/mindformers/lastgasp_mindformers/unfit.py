"""Checkpoints that verify and that MindFormers cannot load: written down, so that a restart passes them over.

MindFormers loads when data, callbacks and network are made already, with the counters of one checkpoint. So another
one is tried by another start. Nothing is moved before one has been loaded: a model that was just changed leaves all
checkpoints where they are.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from lastgasp.adapter import CheckpointError, ControlError, DeadlineExceeded, Gather, NothingLoads, Place
from lastgasp.adapter.checkpoint import Candidate
from lastgasp.adapter.files import write_atomically

log = logging.getLogger("lastgasp")

NAME = ".lastgasp.unfit"


class DoesNotLoad(CheckpointError):
    """No rank could load the newest checkpoint; the restart tries the one before.

    Args:
        path: the checkpoint.
        reasons: what MindFormers said, one line each.
    """

    def __init__(self, path: str, reasons: list[str]) -> None:
        self.path, self.reasons = path, reasons
        super().__init__(
            f"{path} verifies, and MindFormers cannot load it ({'; '.join(reasons)}): `lastgasp run` starts the job "
            "again from the one before. Without it, give resume=<path> to load another one."
        )


def refuse_missing(wanted: Iterable[str], held: Collection[str]) -> None:
    """Compare names of parameters: what a training has and a checkpoint lacks would stay as it was drawn.

    Raises:
        CheckpointError: there are such parameters.
    """
    missing = sorted(set(wanted).difference(held))
    if missing:
        few = ", ".join(missing[:3])
        raise CheckpointError(f"it is of another network: {len(missing)} parameters are not in it ({few}, ...)")


class _Word(msgspec.Struct, frozen=True):
    """Checkpoints by path, with the reasons of this job's earlier attempts."""

    job: str
    refused: dict[str, list[str]]


_WORDS = msgspec.json.Decoder(_Word)


class Unfit:
    """What earlier attempts of this job could not load. A new job tries everything again: it may be another model.

    Args:
        directory: where it is written down, the same on all ranks.
        gather: the all-gather of the job.
    """

    def __init__(self, directory: Path, place: Place, gather: Gather) -> None:
        self._file, self._place, self._gather = directory / NAME, place, gather
        self.refused: dict[str, list[str]] = {}

    def read(self) -> list[Path]:
        """The paths, the same on all ranks, which call it together."""
        mine = _encode(_Word(self._place.job, self._told())) if self._place.rank == 0 else b""
        self.refused = _WORDS.decode(self._gather("reload/unfit", mine)[0]).refused
        return [Path(path) for path in self.refused]

    def add(self, path: Path, reasons: list[str]) -> None:
        """No rank could load this one either. All ranks together: the first that exits takes the others with it."""
        self.refused[str(path)] = reasons
        if self._place.rank == 0:
            try:
                write_atomically(self._file, _encode(_Word(self._place.job, self.refused)))
            except OSError as error:
                log.warning("%s could not be written, so the restart tries %s again: %s", self._file, path, error)
        with contextlib.suppress(ControlError, DeadlineExceeded):
            self._gather("reload/unfit/told", b"")

    def forget(self) -> None:
        """The next start tries all of them again."""
        self.refused = {}
        if self._place.rank == 0:
            _remove(self._file)

    def nothing_loads(self) -> NothingLoads:
        """None of the checkpoints loads, as the attempts before have found out."""
        told, folder = {path: "; ".join(why) for path, why in self.refused.items()}, Path(next(iter(self.refused)))
        self.forget()
        return NothingLoads(str(folder.parent), told)

    def among(self, found: Iterable[Candidate]) -> list[tuple[Candidate, list[str]]]:
        """Those of `found` that were refused, with the reasons."""
        return [(one, self.refused[str(one.path)]) for one in found if str(one.path) in self.refused]

    def _told(self) -> dict[str, list[str]]:
        if self._place.attempt == 0:
            _remove(self._file)
            return {}
        try:
            word = _WORDS.decode(self._file.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read, so what did not load is tried again: %s", self._file, error)
            return {}
        return word.refused if word.job == self._place.job else {}


def _encode(word: _Word) -> bytes:
    return msgspec.json.encode(word)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s could not be removed: %s", path, error)
