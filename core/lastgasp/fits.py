"""The training runs (fits) of this process, numbered by directory.

A script may train several models one after another: the folds of a cross-validation, the trials of a sweep. Each
resumes only from its own checkpoints. The number is the same after a restart, because the whole script runs again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from lastgasp.errors import ConfigError


@dataclass
class _Last:
    """The newest fit in a directory."""

    number: int
    owner: Callable[[], object]
    ended: bool = False
    durable: bool = True
    unnumbered: Path | None = None
    """A checkpoint without a fit number from which a fit of this process resumed."""


@dataclass
class Fits:
    """The fits of one process. Called on the training thread."""

    _last: dict[Path, _Last] = field(default_factory=dict)

    def begin(self, directory: Path, owner: object) -> int:
        """Count a fit and return its number, from 0.

        Training the model of an unsuccessful fit again is the same fit, not another one.

        Args:
            directory: where its checkpoints go.
            owner: what is trained; must support weak references.
        """
        number, before = self.coming(directory, owner), self._last.get(directory)
        self._last[directory] = _Last(number, weakref.ref(owner), unnumbered=before.unnumbered if before else None)
        return number

    def coming(self, directory: Path, owner: object = None) -> int:
        """Return the number that `begin` would return."""
        last = self._last.get(directory)
        if last is None:
            return 0
        again = not last.ended and owner is not None and last.owner() is owner
        return last.number if again else last.number + 1

    def interrupted(self, directory: Path) -> bool:
        """Whether the newest fit in `directory` has not (yet) ended successfully."""
        return directory in self._last and not self._last[directory].ended

    def end(self, directory: Path, durable: bool = True) -> None:
        """Record that the newest fit in `directory` was successful; `durable`: its last step is in a checkpoint."""
        if directory in self._last:
            self._last[directory].ended, self._last[directory].durable = True, durable

    def trains_again(self, directory: Path) -> int | None:
        """The newest fit in `directory`, if it was successful and a restart would have to train (part of) it again."""
        last = self._last.get(directory)
        return last.number if last is not None and last.ended and not last.durable else None

    def not_kept(self) -> str:
        """What to say where another fit begins while a restart would have to train (part of) a finished one again."""
        found = [f"{where} (fit {n.number})" for where, n in self._last.items() if n.ended and not n.durable]
        if not found:
            return ""
        return ("the last step of an earlier training of this script is in no checkpoint, and a restart from here on "
                f"trains it again: {', '.join(found)}")  # fmt: skip

    def resumed_unnumbered(self, directory: Path, path: Path) -> None:
        """Record that the newest fit resumed from a checkpoint without a fit number."""
        self._last[directory].unnumbered = path

    def refuse_unnumbered(self, directory: Path) -> None:
        """Refuse a further fit if it is unknown which fit's checkpoint the first one resumed from.

        Raises:
            ConfigError: a fit of this process resumed from a checkpoint without a fit number.
        """
        last = self._last.get(directory)
        if last is not None and last.number > 0 and last.unnumbered is not None:
            raise ConfigError(
                "dir",
                str(directory),
                "a directory whose checkpoints say which fit of the script they are of",
                f"This is fit {last.number} of this script, fit 0 resumed from {last.unnumbered}, and that may be of "
                "any of them: it was written by an older lastgasp or without it. Give each fit a directory of its own, "
                "or move the old checkpoints away.",
            )


FITS = Fits()
"""The fits of this process."""


def fingerprint(rows: Iterable[object]) -> str:
    """Return the digest of the `repr` of each row; rows are plain values that are equal in every process."""
    digest = xxhash.xxh3_128()
    for row in rows:
        digest.update(repr(row).encode() + b"\n")
    return digest.hexdigest()
