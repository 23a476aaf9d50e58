"""Lists the checkpoints in the checkpoint directories, newest first."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lastgasp.errors import ConfigError
from lastgasp.ports import Layout

from .manifest import Manifest, ManifestProblem
from .manifest_lookup import read_pair


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be resumed from, if it verifies.

    Args:
        path: the checkpoint.
        step: completed optimizer updates; from the manifest, else from the name, else None.
        manifest: None when `problem` is about the manifest.
        problem: why it cannot be used, whatever its content; None if that depends on verification.
        proven: whether `problem` proves that bytes are bad.
        samples: trained on in all, where steps of several sizes lie side by side; then it takes the place of `step`.
    """

    path: Path
    step: int | None
    manifest: Manifest | None = None
    problem: str | None = None
    proven: bool = False
    samples: int | None = None

    @property
    def created_ns(self) -> int:
        """When its manifest was created, wall-clock ns since the epoch; 0 without one."""
        return self.manifest.creator.time_ns if self.manifest else 0

    @property
    def age_key(self) -> tuple[int, int, str]:
        """Sorts by step, then creation time; the path makes the order the same on every rank."""
        count = self.step if self.samples is None else self.samples
        return (-1 if count is None else count, self.created_ns, str(self.path))


def candidates(directories: Iterable[Path], layout: Layout, job: str | None = None) -> list[Candidate]:
    """List every checkpoint in `directories`, newest first by step and creation time.

    A bad entry becomes a candidate with a problem. A missing directory counts as empty.

    Args:
        directories: where to look, without subdirectories.
        layout: how checkpoints lie there.
        job: when given, checkpoints of other jobs get a problem.

    Raises:
        ConfigError: a directory cannot be listed.
    """
    paths = {path for directory in directories for path in _listing(directory, layout)}
    return sorted((_candidate(path, layout, job) for path in paths), key=lambda c: c.age_key, reverse=True)


def _listing(directory: Path, layout: Layout) -> list[Path]:
    try:
        found = list(layout.discover(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(
            "directory",
            str(directory),
            "a directory that this process can list",
            f"Listing it failed: {error.strerror or error}. Check the path, its permissions and the mount.",
        ) from error
    return [path for path in found if not _second_name(path, found, layout)]


def _second_name(path: Path, found: list[Path], layout: Layout) -> bool:
    """Whether it is a link to another one of them (`last.ckpt`), which has the manifest."""
    if not path.is_symlink() or os.path.lexists(layout.manifest_path(path)):
        return False
    target = Path(os.path.realpath(path))
    return target.parent == Path(os.path.realpath(path.parent)) and path.with_name(target.name) in found


def _candidate(path: Path, layout: Layout, job: str | None) -> Candidate:
    found = read_pair(path, layout)
    if isinstance(found, ManifestProblem):
        return Candidate(path, layout.step(path), None, found.text, found.kind == "damaged")
    if job is not None and found.job != job:
        return Candidate(path, found.step, found, f"belongs to job {found.job!r}, not to {job!r}")
    return Candidate(path, found.step, found)
