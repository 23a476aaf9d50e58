"""The state of a loop as the engine's port (ports.StateSource)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lastgasp.config import GaspConfig
from lastgasp.ports import SaveResult
from lastgasp.pytorch.loop import files
from lastgasp.pytorch.staged import StagedGasp, Writer, publish, stage
from lastgasp.replicas import require_alike


class LoopSource:
    """Called by the engine's threads while the training thread is parked, stuck or waiting.

    Args:
        run: has the state (`run.Run`).
        writer: names who writes.
    """

    def __init__(self, run: Any, config: GaspConfig, writer: Writer) -> None:
        self._run, self._config, self._writer = run, config, writer
        self.rank: int = writer.place.rank

    @property
    def box(self) -> int:
        """The black box's descriptor."""
        return int(self._run.recorder.fd)

    def capture(self, step: int) -> bytes:
        """This rank's small state of `step`; empty when it is no longer known."""
        return self._run.recorder.read(step) or b""

    def save(self, step: int, small: Mapping[int, bytes], reason: str) -> StagedGasp:
        """Write `gasp-step=N.pt` to a temporary name."""
        require_alike(self._run.alike)
        directory = self._config.directory
        with self._run.marks.saving():
            target = files.gasp_path(directory, step, self._run.fit.number)
            staged = stage(self._run.dump(step, small), target, files.LAYOUT, self._config)
        return StagedGasp(staged, self._writer.provenance(step, "gasp", self._writer.newest(directory)))

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> None:
        """Make it visible; then remove gasps beyond `keep`."""
        assert isinstance(result, StagedGasp)
        publish(result, files.LAYOUT, self._config, self._writer.place)

    def discard(self, result: SaveResult) -> None:
        """Remove the temporary file."""
        assert isinstance(result, StagedGasp)
        result.staged.discard()
