"""Finds the checkpoints of one fit in a directory: a script may train several models one after another."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from .candidates import Candidate
from .manifest import Fit

_NUMBER = re.compile(r"fit=(\d+)")


def name_of_fit(number: int) -> str:
    """The part of a checkpoint's name that distinguishes its fit, so that two fits never write the same file."""
    return f"fit={number}-" if number else ""


def number_of(candidate: Candidate) -> int | None:
    """The fit number in a checkpoint's manifest; None if it has none."""
    if candidate.manifest is not None and not isinstance(candidate.manifest.fit, msgspec.UnsetType):
        return candidate.manifest.fit.number
    named = _NUMBER.search(candidate.path.name)
    return int(named[1]) if named and candidate.manifest is None else None


def of_fit(found: Iterable[Candidate], number: int, home: Path | None = None) -> list[Candidate]:
    """The checkpoints that fit `number` may resume from; those without a number belong to the first fit.

    Args:
        home: the directory that it is counted in. A folder of checkpoints may be shared with fits of other directories.
    """
    return [one for one in found if (number_of(one) or 0) == number and not (home and _is_at_home_elsewhere(one, home))]


def is_behind(found: Iterable[Candidate], number: int, home: Path) -> bool:
    """Whether the script that counts its fits in `home` had come to one after fit `number`."""
    return any((number_of(one) or 0) > number and not _is_at_home_elsewhere(one, home) for one in found)


def is_of_home(candidate: Candidate, home: Path) -> bool:
    """Whether it lies elsewhere and says that a fit of `home` wrote it."""
    its = _home_of(candidate)
    return its is not None and its.resolve() == home.resolve()


def _is_at_home_elsewhere(candidate: Candidate, home: Path) -> bool:
    """Whether a fit of another directory wrote it, which is still there: one that is not may have been moved here."""
    its = _home_of(candidate)
    return its is not None and its.is_dir() and its.resolve() != home.resolve()


def _home_of(candidate: Candidate) -> Path | None:
    fit = candidate.manifest.fit if candidate.manifest is not None else msgspec.UNSET
    if isinstance(fit, msgspec.UnsetType) or isinstance(fit.home, msgspec.UnsetType):
        return None
    return candidate.path.parent / fit.home


def differences(path: Path, saved: Fit | msgspec.UnsetType, now: Fit) -> list[str]:
    """Why a fit must not resume from the checkpoint at `path`, one line each; missing values count as equal."""
    if isinstance(saved, msgspec.UnsetType):
        return []
    lines = []
    if saved.number != now.number:
        lines.append(f"fit {saved.number} of its script wrote it, this is fit {now.number}")
    for part in ("model", "optimizer", "data"):
        old, new = getattr(saved, part), getattr(now, part)
        if old and new and old != new:
            lines.append(f"{_PARTS[part]} (digest {old[:8]} in {path.name}, {new[:8]} here)")
    return lines


_PARTS = {
    "model": "names, shapes or dtypes of the model's parameters differ",
    "optimizer": "the optimizers are of other types",
    "data": "the training data differ",
}
