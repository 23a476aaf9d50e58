"""The state of a Lightning run as the engine's port (ports.StateSource): native .ckpt files with manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lastgasp.checkpoint import SingleFile
from lastgasp.checkpoint.samefit import name_of_fit
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import GaspConfig
from lastgasp.ports import SaveResult
from lastgasp.pytorch.io import save_verified
from lastgasp.pytorch.staged import StagedGasp, contribute, publish, stage
from lastgasp.replicas import require_alike
from lastgasp.topology import Place
from lastgasp_lightning.state import LightningState

LAYOUT = SingleFile(".ckpt")


class LightningSource:
    """Called by the engine's threads while the training thread is parked, stuck or waiting."""

    def __init__(self, state: LightningState, config: GaspConfig, place: Place) -> None:
        self._state, self._config, self.place = state, config, place
        self.writer = ManifestWriter("lightning", place, lambda: state.fit.fit)
        self.rank = place.rank
        self.alike = True
        self.stood: frozenset[str] | None = None

    @property
    def buffer_fd(self) -> int:
        """The crash-safe buffer's descriptor."""
        return self._state.recorder.fd

    def capture(self, step: int) -> bytes:
        """This rank's auxiliary state of `step`; empty when it is no longer known."""
        return self._state.aux(step) or b""

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> StagedGasp:
        """Write `gasp-step=N.ckpt` (of a further fit `gasp-fit=M-step=N.ckpt`) to a temporary name."""
        require_alike(self.alike)
        directory, fit = self._config.directory, name_of_fit(self._state.fit.number())
        target, checkpoint = directory / f"gasp-{fit}step={step:08d}.ckpt", self._state.dump(step, aux)
        staged = stage(lambda files: save_verified(checkpoint, files), target, LAYOUT, self._config)
        about = self.writer.provenance(step, "gasp", self.writer.newest_beside(target, LAYOUT))
        own = self.capture(step)
        return StagedGasp(staged, about, self.stood, {**aux, self.rank: own} if own else aux)

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str:
        """Make it visible, unless others have committed this step before; then remove gasps beyond `keep`."""
        assert isinstance(result, StagedGasp)
        return publish(result, LAYOUT, self._config, self.place)

    def discard(self, result: SaveResult) -> None:
        """Remove the temporary file."""
        assert isinstance(result, StagedGasp)
        result.staged.discard()

    def contribute(self, step: int, path: str) -> str:
        """As `ports.Contributor` says."""
        own = self.capture(step)
        return contribute(Path(path), LAYOUT, {self.rank: own}) if own else ""
