"""The state of a pynative training as the engine's port: `iteration_*` directories as MindFormers writes them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mindspore

from lastgasp import _clock
from lastgasp._fs import DISK, fsync_dir, make_directory, unique_temp
from lastgasp.checkpoint import FileEntry, Staged, apply, digest_file
from lastgasp.config import GaspConfig
from lastgasp.errors import LastgaspError, Moved, NotSaveable
from lastgasp.ports import SaveResult
from lastgasp.testing import faults
from lastgasp.topology import Place
from lastgasp_mindformers.layouts import ITERATIONS, encode_small
from lastgasp_mindformers.manifests import SMALL, newest_name, provenance
from lastgasp_mindformers.state import MindSporeState
from lastgasp_mindformers.tracker import NAME as TRACKER

log = logging.getLogger("lastgasp")

COMMON = "common.json"


@dataclass(frozen=True)
class SavedIteration:
    """What was written.

    Args:
        target: where it will stand; folder: where it waits.
        entries: its files.
    """

    step: int
    target: Path
    folder: Path
    entries: tuple[FileEntry, ...]
    first_byte_ns: int
    part: bytes = b""

    @property
    def path(self) -> str:
        """Where the checkpoint will stand."""
        return str(self.target)

    @property
    def nbytes(self) -> int:
        """Bytes written."""
        return sum(entry.size for entry in self.entries)


class PynativeSource:
    """Called by the engine's threads, in a job of one process.

    Args:
        state: where training stands; trainer: whose model and optimizer are saved.
        directory: where `iteration_*` go.
        place: who this rank is; config: how many gasps stay.
    """

    def __init__(self, state: MindSporeState, trainer: Any, directory: Path, place: Place, config: GaspConfig) -> None:
        self._state, self._trainer, self._directory = state, trainer, directory
        self._place, self._config = place, config
        self.rank = place.rank

    @property
    def box(self) -> int:
        """The black box's descriptor."""
        return self._state.small.box.fd

    def capture(self, step: int) -> bytes:
        """This rank's small state of `step`; empty when it is no longer known."""
        return self._state.small.read(step)

    def save(self, step: int, small: Mapping[int, bytes], reason: str) -> SavedIteration:
        """Write it under a temporary name."""
        self._require(step)
        target = self._directory / f"iteration_{step:08d}"
        make_directory(target.parent)
        folder, begun = unique_temp(target), _clock.wall_ns()
        folder.mkdir()
        states = {rank: data for rank, data in small.items() if data} | {self.rank: self.capture(step)}
        try:
            self._write(folder, step)
            (folder / SMALL).write_bytes(encode_small(states))
            faults.fire_at("gasp_save", step)
            self._require(step)
            entries = tuple(_durable(path, f"{target.name}/{path.name}") for path in sorted(folder.iterdir()))
            fsync_dir(folder)
        except BaseException:
            DISK.remove(folder)
            raise
        return SavedIteration(step, target, folder, entries, begun)

    def _require(self, step: int) -> None:
        why = self._state.stands_on(step)
        if why and (self._state.numbers.step > step or "has begun" in why):
            raise Moved(why)
        if why:
            raise NotSaveable(why)

    def _write(self, folder: Path, step: int) -> None:
        """The three files of MindFormers' own `save_checkpoint`, which has barriers and removes before it writes."""
        trainer = self._trainer
        model = trainer.model[0] if isinstance(trainer.model, list | tuple) else trainer.model
        weights = set(model.parameters_dict())
        prefix = trainer.config.checkpoint.prefix
        start = f"{prefix}-" if prefix is not None else ""
        parts = {"model": (model, None), "opt": (trainer.optimizer, lambda name: name not in weights)}
        for kind, (cell, keep) in parts.items():
            path = folder / f"{start}{kind}-{0:07d}-{1:07d}"
            mindspore.save_checkpoint(cell, str(path), format="safetensors", choice_func=keep)
        told = {
            "epoch_num": int(trainer.state.epoch) or 1,
            "step_num": int(trainer.state.max_steps),
            "global_step": step,
            "loss_scale": 1.0,
            "global_batch_size": int(trainer.global_batch_size),
            "ckpt_status": None,
        }
        (folder / COMMON).write_text(json.dumps(told, indent=4))

    def publish(self, result: SaveResult, parts: Mapping[int, bytes]) -> None:
        """Make it visible: the directory, then MindFormers' tracker, then the manifest."""
        assert isinstance(result, SavedIteration)
        staged = Staged(result.target, ITERATIONS, sha256=self._config.sha256)
        staged.adopt(result.folder, result.entries)
        made_by = provenance(self._place, result.step, "gasp", newest_name(result.target, ITERATIONS))
        staged.publish(made_by, markers={TRACKER: str(result.step).encode()}, aside=True)
        job = self._place.job if self._config.resume == "never" else None
        try:
            apply([self._directory], ITERATIONS, self._config.keep, job=job, protected=[result.target])
        except (OSError, LastgaspError) as error:  # the gasp itself is safe; old ones may stay
            log.warning("old checkpoints could not be removed: %s", error)

    def discard(self, result: SaveResult) -> None:
        """Remove what was written. Never raises."""
        assert isinstance(result, SavedIteration)
        try:
            DISK.remove(result.folder)
        except OSError as error:
            log.debug("%s stays: %s", result.folder, error)


def _durable(path: Path, relative: str) -> FileEntry:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        DISK.fsync(descriptor)
    finally:
        os.close(descriptor)
    return digest_file(path, relative)
