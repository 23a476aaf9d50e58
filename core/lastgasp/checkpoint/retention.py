"""Removes old gasps. Only what lastgasp wrote as a gasp is removed, and never the newest good one."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from lastgasp._fs import DISK, fsync_dir, locked, remove_stale_temps, unique_temp
from lastgasp.config import GaspConfig
from lastgasp.errors import ConfigError, LastgaspError
from lastgasp.ports import Layout
from lastgasp.topology import Place

from .addenda import remove_orphans
from .candidates import Candidate, candidates
from .manifest import Kind
from .moving import move_parts
from .samefit import of_fit
from .verify import verify

log = logging.getLogger("lastgasp")


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Which checkpoints count towards `keep`, and are removed beyond it; all others stay.

    Attributes:
        kind: gasps, or periodic checkpoints, which only their writer removes.
        job: only those of this job; None: of any. since_ns: and only what was saved since then.
        fit: only those of this training of the script; None: of any.
        in_order: puts them in another order, newest first.
    """

    kind: Kind = "gasp"
    job: str | None = None
    since_ns: int = 0
    fit: int | None = None
    in_order: Callable[[list[Candidate]], list[Candidate]] = list


def to_remove(
    found: list[Candidate], keep: int, kind: Kind = "gasp", protected: Collection[Path] = ()
) -> list[Candidate]:
    """Return superfluous checkpoints: all of `kind` except the `keep` newest. Pure.

    Args:
        found: newest first, as `candidates` returns them.
        keep: how many of `kind` stay; at least 1.
        kind: what may be removed; anything else, and anything without a valid manifest, is kept.
        protected: paths that stay and do not count; the newest verified one belongs here.

    Raises:
        ConfigError: `keep` below 1.
    """
    if keep < 1:
        raise ConfigError("keep", keep, "1 or more", "At least the newest gasp is kept; to keep all, do not prune.")
    own = [c for c in found if c.problem is None and c.manifest is not None and c.manifest.kind == kind]
    return [candidate for candidate in own[keep:] if candidate.path not in set(protected)]


def prune(
    config: GaspConfig,
    layout: Layout,
    newest: Path,
    place: Place,
    *,
    kind: Kind = "gasp",
    fit: int | None = None,
    in_order: Callable[[list[Candidate]], list[Candidate]] = list,
) -> None:
    """`newest` was just published: remove what is beyond `config.keep` in its directory. Never raises OSError.

    With a periodic one also what a rank that was replaced has left of its save: no start comes that would do it.

    Args:
        place: where the user did not leave the choice to lastgasp (`resume`), those of other jobs stay, and do not
            count, and so does the one that was named; kind, fit, in_order: as in `Counted`.
    """
    counted = Counted(kind=kind, fit=fit, in_order=in_order)
    if config.resume != "auto":
        counted = replace(counted, job=place.job, since_ns=place.since_ns)
    named = [Path(config.resume).absolute()] if config.resume not in ("auto", "never") else []
    try:
        apply([newest.parent], layout, config.keep, counted, protected=[newest, *named])
        if kind == "periodic":
            remove_stale_temps(newest.parent)
    except (OSError, LastgaspError) as error:  # the newest is safe; old ones may stay
        log.warning("old checkpoints could not be removed: %s", error)


def apply(
    directories: Iterable[Path],
    layout: Layout,
    keep: int,
    counted: Counted = Counted(),
    *,
    protected: Collection[Path] = (),
) -> list[Path]:
    """Remove superfluous checkpoints; returns the paths that were removed.

    Args:
        directories: where to look; layout: how checkpoints lie there.
        keep: how many stay, of those that are `counted`.
        protected: paths known to be good, such as one just published. When empty, checkpoints are verified
            from the newest on until a good one is found; when none is good, nothing is removed.

    Raises:
        ConfigError: `keep` below 1, or a directory that cannot be listed.
        OSError: the disk refused.
    """
    listed = counted.in_order(candidates(directories, layout, counted.job))
    found = [one for one in listed if one.created_ns >= counted.since_ns]
    if counted.fit is not None:
        found = of_fit(found, counted.fit)
    superfluous = to_remove(found, keep, counted.kind, protected)
    if superfluous and not protected:
        good = next((c.path for c in found if not c.problem and verify(c.path, layout).ok), None)
        superfluous = to_remove(found, keep, counted.kind, [good]) if good else []
    for candidate in superfluous:
        remove(candidate.path, layout)
    for folder in {candidate.path.parent for candidate in superfluous}:
        remove_orphans(folder)
    return [candidate.path for candidate in superfluous]


def remove(path: Path, layout: Layout) -> None:
    """Remove a checkpoint with its manifest.

    The data goes first: a crash leaves a manifest without (all of) its data, which `apply` removes.

    Raises:
        OSError: the disk refused.
    """
    with locked(path.parent):
        temp = unique_temp(path)
        move_parts(path, layout, temp)
        with contextlib.suppress(FileNotFoundError):
            DISK.remove(layout.manifest_path(path))
    with contextlib.suppress(FileNotFoundError):
        DISK.remove(temp)
    fsync_dir(path.parent)
