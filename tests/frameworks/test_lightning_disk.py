"""Disks that fail under a real fit in one process: training continues, and a gasp that cannot be written says so."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lastgasp import _fs
from lastgasp.checkpoint import SingleFile, candidates, verify
from lastgasp.fits import FITS
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.pytorch.io import save_verified
from lastgasp_lightning import LastGasp
from support.train_tiny import Tiny

LAYOUT = SingleFile(".ckpt")
pytestmark = pytest.mark.usefixtures("restored_environ")


class Raise(Callback):
    """Raises in a forward pass, after `step` steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        """Now."""
        if trainer.global_step == self.step:
            raise ValueError("a bug of the user's")


def fit(directory: Path, *callbacks: Callback, keep: int = -1, steps: int = 8) -> Trainer:
    """Eight steps with a checkpoint at every second one."""
    every: list[Callback] = [LastGasp(directory), *callbacks]
    every.append(ModelCheckpoint(directory, "{step}", every_n_train_steps=2, save_top_k=keep))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=every,
    )  # fmt: skip
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(Tiny(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
    return trainer


def steps_that_verify(directory: Path) -> list[int]:
    """Of all checkpoints there, in ascending order."""
    return sorted(c.step or 0 for c in candidates([directory], LAYOUT) if verify(c.path, LAYOUT).ok)


def test_bytes_that_are_written_are_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk is no hang."""
    phases, original = list[str](), RankStatus.progress

    def progress(self: RankStatus, phase: Any) -> None:
        phases.append(phase)
        original(self, phase)

    class Large(Callback):
        def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
            pl_module.register_buffer("large", torch.zeros(5 << 20))

    monkeypatch.setattr(RankStatus, "progress", progress)
    fit(tmp_path, Large())
    assert phases.count("save") >= 4 * 5  # one for each 4 MB


def test_the_directory_vanishes_in_the_middle_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory, real, saves = tmp_path / "ckpts", save_verified, iter(range(100))

    def save_and_vanish(*args: Any) -> None:
        real(*args)
        if next(saves) == 1:
            shutil.rmtree(directory)

    monkeypatch.setattr("lastgasp_lightning.checkpoint_io.save_verified", save_and_vanish)
    trainer = fit(directory)
    assert trainer.global_step == 8
    assert "could not be written" in caplog.text
    assert steps_that_verify(directory) == [6, 8]


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on no file can be created."""

    def refuse(*args: Any, **options: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    return lambda: monkeypatch.setattr(_fs.Disk, "create", refuse)


class Then(Callback):
    """Does something once `step` steps are done."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self.action = step, action

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Now."""
        if trainer.global_step == self.step:
            self.action()


def test_a_disk_that_becomes_read_only_does_not_end_training(
    tmp_path: Path, read_only: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = fit(tmp_path, Then(5, read_only))
    assert trainer.global_step == 8
    assert "Read-only file system" in caplog.text
    assert steps_that_verify(tmp_path) == [2, 4]


def test_the_only_checkpoint_stays_until_the_next_one_is_written(
    tmp_path: Path, read_only: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ModelCheckpoint keeps one by default, and removes the one before once Lightning has returned from the save."""
    create = _fs.Disk.create
    mended = Then(5, lambda: monkeypatch.setattr(_fs.Disk, "create", create))
    fit(tmp_path, Then(5, read_only), keep=1)
    assert steps_that_verify(tmp_path) == [4]
    assert "step=4.ckpt stays until another one is written" in caplog.text
    mended.action()
    fit(tmp_path / "again", Then(3, read_only), mended, keep=1)
    assert steps_that_verify(tmp_path / "again") == [8], "2 was to go for 4, and went once 6 was there"


class Ascending(Callback):
    """A metric for ModelCheckpoint: the newest are the best."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        pl_module.log("ascending", float(trainer.global_step))


@pytest.mark.parametrize("began", [0, 4])
def test_a_disk_with_room_for_two_goes_on_with_the_newest(
    tmp_path: Path, began: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ModelCheckpoint asks once for each removal: were none made for a failed save, there would be room no more."""
    create = _fs.Disk.create

    def with_room_for_two(self: _fs.Disk, path: Path, **options: Any) -> int:
        if path.name.startswith(".step=") and len(list(tmp_path.glob("step=*.ckpt"))) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(self, path, **options)

    def best() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, "{step}", "ascending", mode="max", save_top_k=2, every_n_train_steps=2)

    if began:
        fit(tmp_path, Ascending(), best(), keep=0, steps=began)
        FITS._last.clear()
    monkeypatch.setattr(_fs.Disk, "create", with_room_for_two)
    fit(tmp_path, Ascending(), best(), keep=0)
    assert steps_that_verify(tmp_path)[-1] == 8


class Scores(Callback):
    """A metric for ModelCheckpoint, by steps."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        pl_module.log("score", {2: 1.0, 4: 2.0, 6: 3.0, 8: 4.0}.get(trainer.global_step, 0.0))


@pytest.mark.parametrize("last", [True, None], ids=["its last one", "another ModelCheckpoint's"])
def test_the_best_checkpoint_stays_until_the_next_best_is_written(
    last: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer ones that are not for the best take nobody's place."""
    create, seen = _fs.Disk.create, list[set[str]]()

    def refuse(self: _fs.Disk, path: Path, **options: Any) -> int:
        if path.name.startswith(".best-step=4"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(self, path, **options)

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            seen.append({path.name for path in tmp_path.glob("best*.ckpt")})

    monkeypatch.setattr(_fs.Disk, "create", refuse)
    of_scores = ModelCheckpoint(tmp_path, "best-{step}", "score", mode="max", every_n_train_steps=2, save_last=last)
    fit(tmp_path, Scores(), of_scores, Look(), keep=1)
    assert seen[3] == seen[4] == seen[5] == {"best-step=2.ckpt"}
    assert {path.name for path in tmp_path.glob("best*.ckpt")} == {"best-step=8.ckpt"}


def test_weights_alone_take_no_checkpoints_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing resumes from them."""
    create = _fs.Disk.create

    def refuse(self: _fs.Disk, path: Path, **options: Any) -> int:
        if path.name.startswith(".step=") and not path.name.startswith(".step=2"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(self, path, **options)

    monkeypatch.setattr(_fs.Disk, "create", refuse)
    weights = ModelCheckpoint(tmp_path, "weights-{step}", save_weights_only=True, every_n_train_steps=1)
    fit(tmp_path, weights, keep=1)
    assert steps_that_verify(tmp_path) == [2, 8]
    assert (tmp_path / "step=2.ckpt").exists()


def test_a_gasp_that_cannot_be_written_is_reported_and_harms_nothing(
    tmp_path: Path, read_only: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "lastgasp"), pytest.raises(ValueError, match="a bug of the user's"):
        fit(tmp_path, Then(5, read_only), Raise(5))
    assert "could NOT be saved" in caplog.text
    assert "Read-only file system" in caplog.text
    assert steps_that_verify(tmp_path) == [2, 4]


def test_a_gasp_is_saved_and_the_users_exception_stays_his(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bug of the user's"):
        fit(tmp_path, Raise(5))
    assert steps_that_verify(tmp_path) == [2, 4, 5]
    assert fit(tmp_path).global_step == 8
