"""A gasp of one file: written and fsynced, seen by nobody until it is published."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lastgasp.checkpoint import Provenance, Staged, World, apply, candidates
from lastgasp.checkpoint.manifest import Fit, Kind
from lastgasp.config import GaspConfig
from lastgasp.errors import LastgaspError
from lastgasp.ports import Layout
from lastgasp.pytorch.io import save_verified
from lastgasp.testing import faults
from lastgasp.topology import Place

log = logging.getLogger("lastgasp")


@dataclass(frozen=True)
class StagedGasp:
    """Implements `ports.SaveResult`."""

    staged: Staged
    provenance: Provenance
    part: bytes = b""

    @property
    def path(self) -> str:
        """Where it will stand."""
        return str(self.staged.target)

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return self.staged.nbytes

    @property
    def first_byte_ns(self) -> int:
        """Wall-clock time of the first byte, ns since the epoch."""
        return self.staged.first_byte_ns or 0


def stage(checkpoint: object, target: Path, layout: Layout, config: GaspConfig) -> Staged:
    """`checkpoint` in a temporary file beside `target`, durable.

    Raises:
        OSError: the disk refused; nothing is left.
    """
    staged = Staged(target, layout, sha256=config.sha256)
    try:
        save_verified(checkpoint, staged)
        faults.fire_at("gasp_save")
        staged.seal()
    except BaseException:
        staged.discard()
        raise
    return staged


def publish(result: StagedGasp, layout: Layout, config: GaspConfig, place: Place) -> None:
    """Make it visible; then remove gasps beyond `keep`.

    Raises:
        OSError: the disk refused.
    """
    result.staged.publish(result.provenance)
    job = place.job if config.resume == "never" else None
    fit = result.provenance.fit.number if isinstance(result.provenance.fit, Fit) else None
    try:
        apply([config.directory], layout, config.keep, job=job, protected=[Path(result.path)], fit=fit)
    except (OSError, LastgaspError) as error:  # the gasp itself is safe; old ones may stay
        log.warning("old checkpoints could not be removed: %s", error)


@dataclass(frozen=True)
class Writer:
    """Who writes checkpoints of what format.

    Args:
        format: of the manifest; layout: how they lie.
        fit: tells which fit this is, where the process may have several.
    """

    format: str
    layout: Layout
    place: Place
    fit: Callable[[], Fit] | None = None

    def provenance(self, step: int, kind: Kind, parent: str | None = None) -> Provenance:
        """Who wrote it, for the manifest."""
        place = self.place
        world = World(world_size=place.world_size, replica_groups=place.replicas)
        made = Provenance(
            format=self.format, step=step, kind=kind, job=place.job, attempt=place.attempt, world=world, parent=parent
        )
        return made if self.fit is None else msgspec.structs.replace(made, fit=self.fit())

    def newest(self, directory: Path) -> str | None:
        """The name of the newest checkpoint: the parent of the next one."""
        found = candidates([directory], self.layout)
        return found[0].path.name if found else None
