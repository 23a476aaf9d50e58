"""Creates the provenance that manifests record: writer and format."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from lastgasp.ports import Layout
from lastgasp.topology import Place

from .candidates import candidates
from .manifest import Fit, Kind, Provenance, World


@dataclass
class ManifestWriter:
    """The provenance of one job's checkpoints in one format.

    Args:
        format: of the manifest.
        place: this rank's place; replaced once the replicas are known.
        fit: returns the current fit, if the process may have several.
        sha256: whether files that the framework itself writes get SHA-256 digests, too.
        home: the directory that its fits are counted in; checkpoints elsewhere say so.
    """

    format: str
    place: Place
    fit: Callable[[], Fit] | None = None
    sha256: bool = False
    home: Path | None = None

    def provenance(
        self, step: int, kind: Kind, parent: str | None = None, folder: Path | None = None
    ) -> Provenance:
        """Return the provenance of the checkpoint of `step`.

        Args:
            parent: the name of the newest one before it (`newest_beside`).
            folder: where it is written, if that need not be `home`.
        """
        place = self.place
        world = World(world_size=place.world_size, replica_groups=place.replicas)
        made = Provenance(
            format=self.format, step=step, kind=kind, job=place.job, attempt=place.attempt, world=world, parent=parent,
            since_ns=place.since_ns,
        )  # fmt: skip
        if self.fit is None:
            return made
        fit = self.fit()
        if folder is not None and self.home is not None and folder.resolve() != self.home.resolve():
            fit = msgspec.structs.replace(fit, home=os.path.relpath(self.home.resolve(), folder.resolve()))
        return msgspec.structs.replace(made, fit=fit)

    def newest_beside(self, checkpoint: Path, layout: Layout) -> str | None:
        """The newest other checkpoint with a manifest in its directory, which is the parent; or None."""
        found = candidates([checkpoint.parent], layout)
        return next((c.path.name for c in found if c.manifest is not None and c.path.name != checkpoint.name), None)
