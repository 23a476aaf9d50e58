"""What a training that begins from other weights (`load_checkpoint` without `resume_training`) counts as its own.

Its base, or an older training, may lie where it saves: MindFormers' output_dir is `./output` for all. Steps alone tell
nothing: those of a pretraining are higher. So the first start records what is there already, and each start its job.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from lastgasp.adapter import ConfigError, Gather, Place
from lastgasp.adapter.checkpoint import ADOPTED, Candidate
from lastgasp.adapter.files import write_atomically

log = logging.getLogger("lastgasp")

NAME = ".lastgasp.base"


class Base(msgspec.Struct, frozen=True):
    """The weights that a training began from.

    Attributes:
        load: what `load_checkpoint` named, resolved.
        jobs: of all starts that named it, oldest first.
        before: what there was at the first of them, each as `key` or `lost_key` has it.
    """

    load: str
    jobs: tuple[str, ...]
    before: frozenset[str]

    def is_other(self, candidate: Candidate) -> bool:
        """Whether another training has saved it. Without a manifest of a job only its place tells."""
        if candidate.manifest is not None and candidate.manifest.job != ADOPTED:
            return candidate.manifest.job not in self.jobs
        return key(candidate.path) in self.before


_BASES = msgspec.json.Decoder(Base)
_TOLD = msgspec.json.Decoder(tuple[Base | None, tuple[str, str, str, str] | None])
"""What rank 0 has found: one of both, and a ConfigError by its parts."""


def key(path: Path) -> str:
    """The same for each spelling of its directory."""
    return os.path.join(os.path.realpath(path.parent), path.name)


def lost_key(folder: str, why: str) -> str:
    """Of files that were lost, by the reason to think so."""
    return f"{os.path.realpath(folder)}: {why}"


def begun_from(load: Path, directory: Path, place: Place, gather: Gather, there: Callable[[], set[str]]) -> Base:
    """Rank 0 records this start, and tells all others. Logs what the disk refuses.

    Args:
        directory: LastGasp's. there: lists what lies where this training saves, for its first start.

    Raises:
        DeadlineExceeded, ControlError: the ranks could not agree.
        ConfigError: as `there`; the same on all ranks, of which none waits for one that has raised.
    """
    base, refused = None, None
    if place.rank == 0:
        try:
            base = _recorded(load, directory, place, there)
        except ConfigError as error:
            refused = (error.field, str(error.value), error.allowed, error.remedy)
    told = msgspec.json.encode((base, refused)) if place.rank == 0 else b""
    base, refused = _TOLD.decode(gather("steer/base", told)[0])
    if base is None:
        assert refused is not None
        raise ConfigError(*refused)
    return base


def _recorded(load: Path, directory: Path, place: Place, there: Callable[[], set[str]]) -> Base:
    named, known = os.path.realpath(load), _read(directory)
    if known is None or known.load != named:
        base = Base(named, (place.job,), frozenset(there()))
    elif place.job in known.jobs:
        return known
    else:
        base = msgspec.structs.replace(known, jobs=(*known.jobs, place.job))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomically(directory / NAME, msgspec.json.encode(base))
    except OSError as error:
        log.warning("%s could not be written: a later start will begin from %s once more: %s", NAME, load, error)
    return base


def _read(directory: Path) -> Base | None:
    try:
        return _BASES.decode((directory / NAME).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s cannot be read: only what this job saves from now on counts as its own: %s", NAME, error)
        return None
