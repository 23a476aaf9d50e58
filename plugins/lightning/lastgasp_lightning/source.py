"""The state of a Lightning run as the engine's port (ports.StateSource): native .ckpt files with manifest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lastgasp.checkpoint import Provenance, SingleFile, Staged, World, apply, candidates
from lastgasp.config import GaspConfig
from lastgasp.errors import LastgaspError
from lastgasp.ports import SaveResult
from lastgasp.pytorch.io import save_verified
from lastgasp.testing import faults
from lastgasp.topology import Place
from lastgasp_lightning.state import LightningState

log = logging.getLogger("lastgasp")

LAYOUT = SingleFile(".ckpt")


@dataclass(frozen=True)
class StagedGasp:
    """A written, fsynced checkpoint that nobody sees yet."""

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


class LightningSource:
    """Called by the engine's threads while the training thread is parked, stuck or waiting."""

    def __init__(self, state: LightningState, config: GaspConfig, place: Place) -> None:
        self._state, self._config, self.place = state, config, place
        self.rank = place.rank

    @property
    def box(self) -> int:
        """The black box's descriptor."""
        return self._state.recorder.fd

    def capture(self, step: int) -> bytes:
        """This rank's small state of `step`; empty when it is no longer known."""
        return self._state.small(step) or b""

    def save(self, step: int, small: Mapping[int, bytes], reason: str) -> StagedGasp:
        """Write `gasp-step=N.ckpt` to a temporary name."""
        directory = self._config.directory
        checkpoint = self._state.dump(step, small)
        target = directory / f"gasp-step={step:08d}.ckpt"
        staged = Staged(target, LAYOUT, sha256=self._config.sha256)
        try:
            save_verified(checkpoint, staged)
            faults.fire_at("gasp_save")
            staged.seal()
        except BaseException:
            staged.discard()
            raise
        return StagedGasp(staged, provenance(self.place, step, "gasp", _newest(directory)))

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> None:
        """Make it visible; then remove gasps beyond `keep`."""
        assert isinstance(result, StagedGasp)
        result.staged.publish(result.provenance)
        job = self.place.job if self._config.resume == "never" else None
        try:
            apply([self._config.directory], LAYOUT, self._config.keep, job=job, protected=[Path(result.path)])
        except (OSError, LastgaspError) as error:  # the gasp itself is safe; old ones may stay
            log.warning("old checkpoints could not be removed: %s", error)

    def discard(self, result: SaveResult) -> None:
        """Remove the temporary file."""
        assert isinstance(result, StagedGasp)
        result.staged.discard()


def provenance(place: Place, step: int, kind: str, parent: str | None) -> Provenance:
    """Who wrote it, for the manifest."""
    world = World(world_size=place.world_size, replica_groups=place.replicas)
    return Provenance(
        format="lightning",
        step=step,
        kind="gasp" if kind == "gasp" else "periodic",
        job=place.job,
        attempt=place.attempt,
        world=world,
        parent=parent,
    )


def _newest(directory: Path) -> str | None:
    found = candidates([directory], LAYOUT)
    return found[0].path.name if found else None
