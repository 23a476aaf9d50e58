"""Periodic checkpoints of a loop: rank 0 writes, all ranks contribute their auxiliary state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.retention import prune
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import GaspConfig
from lastgasp.pytorch.io import save_verified
from lastgasp.pytorch.loop import files
from lastgasp.session import Session as Engine
from lastgasp.testing import faults

log = logging.getLogger("lastgasp")


class Periodic:
    """Writes periodic checkpoints. All ranks call `save` after the same step."""

    def __init__(self, engine: Engine, writer: ManifestWriter, config: GaspConfig, fit: int) -> None:
        self._engine, self._writer, self._config, self._fit = engine, writer, config, fit

    def save(self, step: int, own: bytes, dump: Callable[[Mapping[int, bytes]], dict[str, Any]]) -> None:
        """Gather the auxiliary states; write, on rank 0. A failing disk does not end training.

        Args:
            step: completed steps; own: this rank's auxiliary state of it.
            dump: makes the checkpoint from all auxiliary states.

        Raises:
            ControlError, DeadlineExceeded: another rank is gone.
        """
        engine, rank = self._engine, self._writer.place.rank
        engine.progress("save")
        found = engine.gather(f"loop/save/{step}", own)
        if rank == 0:
            self._write(step, dump({r: aux for r, aux in enumerate(found) if aux}))
        else:
            faults.fire_at("periodic_save", step)
        engine.progress("data")

    def _write(self, step: int, checkpoint: dict[str, Any]) -> None:
        target = files.periodic_path(self._config.directory, step, self._fit)
        try:
            with Staged(target, files.LAYOUT, sha256=self._config.sha256) as staged:
                save_verified(checkpoint, staged)
                staged.publish(self._writer.provenance(step, "periodic"))
        except OSError as error:
            log.error("checkpoint %s could not be written (%s): training continues; older ones remain", target, error)
            return
        status = self._engine.status
        status.durable = max(status.durable, step)
        prune(self._config, files.LAYOUT, target, self._writer.place.job, kind="periodic", fit=self._fit)
