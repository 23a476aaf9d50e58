"""The state of a loop as the engine's port (ports.StateSource)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lastgasp.config import GaspConfig
from lastgasp.ports import SaveResult
from lastgasp.pytorch.loop import files
from lastgasp.pytorch.staged import StagedGasp, Writer, contribute, publish, stage
from lastgasp.replicas import require_alike


class LoopSource:
    """Called by the engine's threads while the training thread is parked, stuck or waiting.

    Args:
        run: has the state (`run.Run`).
        writer: names who writes.

    Attributes:
        stood: the manifests that stood there when training began.
    """

    def __init__(self, run: Any, config: GaspConfig, writer: Writer) -> None:
        self._run, self._config, self._writer = run, config, writer
        self.rank: int = writer.place.rank
        self.stood: frozenset[str] | None = None

    @property
    def buffer_fd(self) -> int:
        """The crash-safe buffer's descriptor."""
        return int(self._run.recorder.fd)

    def capture(self, step: int) -> bytes:
        """This rank's auxiliary state of `step`; empty when it is no longer known."""
        return self._run.recorder.read(step) or b""

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> StagedGasp:
        """Write `gasp-step=N.pt` to a temporary name."""
        require_alike(self._run.alike)
        directory = self._config.directory
        with self._run.marks.saving():
            target = files.gasp_path(directory, step, self._run.fit.number)
            staged = stage(self._run.dump(step, aux), target, files.LAYOUT, self._config)
        about = self._writer.provenance(step, "gasp", self._writer.newest(directory))
        own = self.capture(step)
        return StagedGasp(staged, about, self.stood, {**aux, self.rank: own} if own else aux)

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str:
        """Make it visible, unless others have committed this step before; then remove gasps beyond `keep`."""
        assert isinstance(result, StagedGasp)
        return publish(result, files.LAYOUT, self._config, self._writer.place)

    def discard(self, result: SaveResult) -> None:
        """Remove the temporary file."""
        assert isinstance(result, StagedGasp)
        result.staged.discard()

    def contribute(self, step: int, path: str) -> str:
        """As `ports.Contributor` says."""
        own = self.capture(step)
        return contribute(Path(path), files.LAYOUT, {self.rank: own}) if own else ""
