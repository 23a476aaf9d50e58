"""Finds the newest checkpoint that verifies, for a single process. Several ranks use `agree`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from lastgasp.errors import NoGoodCheckpoint
from lastgasp.ports import Layout

from .adopt import ADOPTED
from .candidates import Candidate, candidates
from .progress import progress_bar
from .quarantine import quarantine as move_away
from .samefit import of_fit
from .verify import verify

_log = logging.getLogger("lastgasp")


def newest_good(
    directories: Iterable[Path],
    layout: Layout,
    quarantine: bool = True,
    job: str | None = None,
    *,
    fit: int | None = None,
    format: str | None = None,
) -> Candidate | None:
    """Return the newest checkpoint whose content matches its manifest; None if there are none at all.

    Args:
        directories: where to look; layout: how checkpoints lie there.
        quarantine: whether newer ones that are proven bad are moved away, once a good one is found.
        job: when given, checkpoints of other jobs are not used.
        fit: when given, those of other fits are ignored.
        format: when given, those that a job has saved in another one come last, and where one of them is good none
            is moved away.

    Raises:
        NoGoodCheckpoint: there are checkpoints, and none can be trusted. A file without a manifest counts:
            to load it all the same, the user gives resume=<path>. Nothing was moved.
        ConfigError: a directory cannot be listed.
    """
    folders = [Path(directory) for directory in directories]
    found = candidates(folders, layout, job)
    if fit is not None:
        found = of_fit(found, fit)
    foreign = {one.path for one in found if format is not None and _of_another_format(one, format)}
    found = sorted(found, key=lambda one: one.path in foreign)  # and as they were in each part
    rejected: list[tuple[Candidate, list[str], bool]] = []
    for candidate in found:
        reasons, proven = _judge(candidate, layout)
        if not reasons:
            for worse, why, _ in rejected:
                _log.warning("%s is not used: %s", worse.path, "; ".join(why))
            _quarantine_all(rejected if quarantine and candidate.path not in foreign else [], layout)
            return candidate
        rejected.append((candidate, reasons, proven))
    if found:
        listing = {str(candidate.path): "; ".join(reasons) for candidate, reasons, _ in rejected}
        raise NoGoodCheckpoint(", ".join(map(str, folders)), listing)
    return None


def _of_another_format(candidate: Candidate, format: str) -> bool:
    """Not by what `lastgasp manifest` says, which goes by names."""
    manifest = candidate.manifest
    return manifest is not None and manifest.format != format and manifest.job != ADOPTED


def _judge(candidate: Candidate, layout: Layout) -> tuple[list[str], bool]:
    """Reasons against it, none if it is good; and whether one is proven."""
    if candidate.problem is not None:
        return [candidate.problem], candidate.proven
    with progress_bar(f"verifying {candidate.path.name}") as progress:
        verdict = verify(candidate.path, layout, manifest=candidate.manifest, progress=progress)
    return verdict.reasons, verdict.proven


def _quarantine_all(rejected: list[tuple[Candidate, list[str], bool]], layout: Layout) -> None:
    for candidate, reasons, proven in rejected:
        move_away(candidate, reasons, proven=proven, layout=layout)
