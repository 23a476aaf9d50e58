"""Periodic checkpoints of a loop: rank 0 writes, all ranks contribute their auxiliary state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lastgasp.checkpoint import Staged
from lastgasp.checkpoint.retention import prune
from lastgasp.checkpoint.writer import ManifestWriter
from lastgasp.config import GaspConfig
from lastgasp.errors import ControlError, DeadlineExceeded, LastgaspError
from lastgasp.gasp.by_files import gather_saved
from lastgasp.gasp.gathers import GATHER_TIMEOUT
from lastgasp.pytorch.io import save_verified
from lastgasp.pytorch.loop import files
from lastgasp.pytorch.loop.parts import under_join
from lastgasp.session import Session as Engine
from lastgasp.testing import faults

log = logging.getLogger("lastgasp")

JOINED = 30.0
"""Seconds to wait for the others under torch's `Join`, where a rank that has no data left makes no more steps."""


def together(
    engine: Engine, tag: str, own: bytes, config: GaspConfig, patience: float | None = None
) -> list[bytes] | None:
    """What all ranks have of a periodic checkpoint; None, with a line in the log, where they do not come together.

    One that is much slower than the others (it evaluates, or its disk is slow) costs a checkpoint, not the job.
    """
    try:
        return gather_saved(engine, tag, own, patience or max(GATHER_TIMEOUT, config.save_timeout))
    except (ControlError, DeadlineExceeded) as error:
        log.error("no checkpoint of this step (%s): training continues; older ones remain", error)
        return None


def failed(what: str, error: Exception) -> None:
    """Log that a periodic checkpoint is not there, or this rank's part of one; with a traceback where it is unknown.

    Raises:
        InjectedFault: `error`, where that is a drill's, which is to end the training.
    """
    if isinstance(error, faults.InjectedFault):
        raise error
    known = isinstance(error, OSError | LastgaspError)
    log.error("%s could not be written (%s): training continues; older ones remain", what,
              error if known else f"{type(error).__name__}: {error}", exc_info=not known)  # fmt: skip


class Joined:
    """Under torch's `Join` ranks may come to different numbers of steps: no periodic checkpoints are written then.

    Args:
        state: the user's. Where ranks hold parts, nothing is saved under `Join` (`ShardedLoop.keep`).
    """

    def __init__(self, engine: Engine, config: GaspConfig, state: Any) -> None:
        self._engine, self._config, self._state, self._uneven = engine, config, state, False

    def wait(self, step: int) -> bool:
        """Whether all ranks have come to `step`, of which a checkpoint is due; at once without `Join`.

        Nothing of the checkpoint goes along: where the controller is slow it may count a rank that has just given up.
        """
        engine = self._engine
        if not under_join(self._state):
            return True
        if self._uneven or self._state.sharded:
            return False
        engine.progress("save")
        self._uneven = together(engine, f"loop/joined/{step}", b"", self._config, JOINED) is None
        if self._uneven:
            engine.note("under torch's Join the ranks have come to different numbers of steps: no periodic "
                        "checkpoints are written from now on")  # fmt: skip
            engine.progress("data")
        return not self._uneven


class Periodic:
    """Writes periodic checkpoints. All ranks call `save` after the same step."""

    def __init__(self, engine: Engine, writer: ManifestWriter, config: GaspConfig, fit: int) -> None:
        self._engine, self._writer, self._config, self._fit = engine, writer, config, fit

    def save(self, step: int, own: bytes, dump: Callable[[Mapping[int, bytes]], dict[str, Any]]) -> None:
        """Gather the auxiliary states; write, on rank 0. What fails there does not end training.

        Args:
            step: completed steps; own: this rank's auxiliary state of it.
            dump: makes the checkpoint from all auxiliary states.

        """
        engine, rank = self._engine, self._writer.place.rank
        engine.progress("save")
        found = together(engine, f"loop/save/{step}", own, self._config)
        if rank == 0 and found is not None:
            try:
                self._write(step, dump({r: aux for r, aux in enumerate(found) if aux}))
            except Exception as error:  # also of the user's own objects
                failed(f"the checkpoint of step {step}", error)
        else:
            faults.fire_at("periodic_save", step)
        engine.progress("data")

    def _write(self, step: int, checkpoint: dict[str, Any]) -> None:
        target = files.periodic_path(self._config.directory, step, self._fit)
        moved = partial(self._engine.progress, "save")
        with Staged(target, files.LAYOUT, sha256=self._config.sha256, moved=moved) as staged:
            save_verified(checkpoint, staged)
            staged.publish(self._writer.provenance(step, "periodic"))
        status = self._engine.status
        status.durable = max(status.durable, step)
        prune(self._config, files.LAYOUT, target, self._writer.place, kind="periodic", fit=self._fit)
