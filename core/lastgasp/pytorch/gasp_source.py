"""The state of a torch training that all ranks hold, as the engine's port (`ports.StateSource`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import GaspConfig
from lastgasp.ports import Layout, SaveResult
from lastgasp.pytorch.ondemand import OnDemand
from lastgasp.pytorch.queued import QueuedWork
from lastgasp.pytorch.staged import StagedGasp, contribute, publish, stage
from lastgasp.replicas import require_alike
from lastgasp.trailer import with_trailer

Write = Callable[[Staged, int, Mapping[int, bytes]], None]
"""Write the checkpoint of a step from this rank's live state and the auxiliary states by rank; enters no collective."""


class Recorder(Protocol):
    """Knows this rank's auxiliary state; `AuxRecorder` is one."""

    @property
    def fd(self) -> int:
        """Descriptor of the crash-safe buffer; -1 where there is none."""

    @property
    def queued(self) -> QueuedWork:
        """What this rank's accelerators have been given."""

    def read(self, step: int) -> bytes | None:
        """The encoded auxiliary state of `step`, if it is known."""


class GaspSource:
    """Called by the engine's threads while the training thread waits, is stuck or has raised.

    Every rank that saves writes the whole checkpoint, so this is for state that all ranks hold (data parallel).

    Args:
        write: writes the files of a step; raises NotSaveable where this rank's state is not that of the step.
        target: where the gasp of a step will stand; layout: how it lies there.
        recorder: the auxiliary state of this rank.
        writer: names who writes.
        alike: whether all replicas were found to hold the same.

    Attributes:
        present: the manifests that were there when training began (`CheckpointSelector.present`).
        carried: what a live rank adds to its auxiliary state (`ports.CarriesValues`), if it is anything.
    """

    def __init__(
        self,
        write: Write,
        target: Callable[[int], Path],
        layout: Layout,
        *,
        recorder: Recorder,
        writer: ManifestWriter,
        config: GaspConfig,
        alike: Callable[[], bool],
    ) -> None:
        self._write, self._target, self._layout = write, target, layout
        self._recorder, self._writer, self._config, self._alike = recorder, writer, config, alike
        self.rank = writer.place.rank
        self.present: frozenset[str] | None = None
        self.carried: OnDemand | None = None

    @property
    def buffer_fd(self) -> int:
        """Descriptor of the crash-safe buffer with this rank's auxiliary state."""
        return self._recorder.fd

    def capture(self, step: int) -> bytes:
        """This rank's auxiliary state of `step`; empty when it is no longer known."""
        return self._recorder.read(step) or b""

    def values(self, step: int) -> bytes | None:
        """As `ports.CarriesValues` says."""
        return self.carried.poll(step) if self.carried is not None else b""

    def save(self, step: int, aux: Mapping[int, bytes], reason: str) -> StagedGasp:
        """Write the checkpoint under a temporary name.

        Raises:
            NotSaveable: this rank's state is not that of `step`, or ranks that should be replicas hold something else.
            OSError: the disk refused; nothing is left.
        """
        require_alike(self._alike())
        target, own = self._target(step), self._own(step)
        aux = {**aux, self.rank: own} if own else aux
        with self._recorder.queued.reading():
            staged = stage(lambda files: self._write(files, step, aux), target, self._layout, self._config)
        about = self._writer.provenance(step, "gasp", self._writer.newest_beside(target, self._layout))
        return StagedGasp(staged, about, self.present, aux)

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> str:
        """Make it visible, unless others have committed this step before; then remove gasps beyond `keep`."""
        assert isinstance(result, StagedGasp)
        return publish(result, self._layout, self._config, self._writer.place)

    def discard(self, result: SaveResult) -> None:
        """Remove the temporary files."""
        assert isinstance(result, StagedGasp)
        result.staged.discard()

    def contribute(self, step: int, path: str) -> str:
        """As `ports.Contributor` says."""
        own = self._own(step)
        return contribute(Path(path), self._layout, {self.rank: own}) if own else ""

    def _own(self, step: int) -> bytes:
        own = self.capture(step)
        return with_trailer(own, self.carried.wait(step)) if own and self.carried is not None else own
