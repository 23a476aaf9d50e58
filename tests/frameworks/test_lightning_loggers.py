"""Loggers over restarts: the same version is gone on in, without doubled and without missing steps."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader

from frameworks.fit_rig import Boom, Job, Small, data, fit, seed
from support import logged

BOARD = importlib.util.find_spec("tensorboard") is not None
KINDS = 2 if BOARD else 1
"""How many loggers the scripts have."""
Row = dict[str, str]


class Logged(Small):
    """Logs each step, each epoch, on an axis of its own, and directly."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("each", loss.detach() * 2)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        step = self.trainer.global_step
        for logger in self.loggers:
            logger.log_metrics({"samples": float(step)}, step=4 * step)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Each batch, on Lightning's axis: how many there were before."""
        super().validation_step(batch, batch_idx)
        self.log("checked", torch.tensor(float(batch_idx)), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.log("step", float(self.current_epoch))


def loggers(folder: Path) -> list[Any]:
    return [CSVLogger(folder / "logs"), *([TensorBoardLogger(str(folder / "board"))] if BOARD else [])]


def train(job: Job, strike: int | None = None, own: Any = None, model: Any = None, **more: Any) -> L.Trainer:
    """One attempt of the script."""
    job.restart()
    seed(3)
    callbacks = more.pop("callbacks", [LearningRateMonitor("step")])
    chosen = own if own is not None else loggers(job.folder)
    trainer = job.make(*callbacks, strike=strike, logger=chosen, log_every_n_steps=1, **more)
    options = {"val_dataloaders": DataLoader(data(5), 8)}
    ended = fit(trainer, model or Logged(), **options)
    assert ended is (strike is None)
    return trainer


def rows(folder: Path, version: int = 0) -> list[Row]:
    return logged.rows(folder / "logs", version)


def scalars(folder: Path) -> Any:
    return logged.scalars(folder / "board")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    train(Job(folder))
    return folder


FULL = pytest.mark.full


@pytest.mark.parametrize("strikes", [(2, 6, 8), *(pytest.param(one, marks=FULL) for one in ((5,), (6,), (11,)))])
def test_a_restart_continues_in_the_same_version(straight: Path, tmp_path: Path, strikes: tuple[int, ...]) -> None:
    job = Job(tmp_path)
    for strike in strikes:
        train(job, strike)
    train(job)
    assert logged.versions(tmp_path) == ["version_0"] * KINDS
    assert rows(tmp_path) == rows(straight)
    assert scalars(tmp_path) == scalars(straight)


def test_a_step_that_was_logged_after_its_boundary_is_not_there_twice(straight: Path, tmp_path: Path) -> None:
    """A resume from an older checkpoint writes again all that was logged since."""
    job = Job(tmp_path)
    for strike in (8, None):
        saves = [LearningRateMonitor("step"), ModelCheckpoint(job.folder / "ckpts", save_top_k=-1)]
        train(job, strike, callbacks=list(saves), enable_checkpointing=True)
        if strike is not None:
            assert [row for row in rows(tmp_path) if row["step"] == "7"] != []
            for gasp in (tmp_path / "ckpts").glob("gasp*"):
                gasp.unlink()
    assert logged.versions(tmp_path) == ["version_0"] * KINDS
    assert rows(tmp_path) == rows(straight)
    assert scalars(tmp_path) == scalars(straight)


def test_checkpoints_of_lightning_stay_in_the_same_version(tmp_path: Path) -> None:
    """With what ModelCheckpoint knows of the best ones: it belongs to their folder."""
    job = Job(tmp_path)
    known = []
    for strike in (8, None):
        best = ModelCheckpoint(monitor="val_loss", save_top_k=2)
        train(job, strike, callbacks=[best], enable_checkpointing=True)
        known.append(dict(best.best_k_models))
    folder = tmp_path / "logs/lightning_logs/version_0/checkpoints"
    assert {Path(path).parent for path in known[1]} == {folder}
    assert set(known[0]) < set(known[1]) and {str(path) for path in folder.glob("*.ckpt")} == set(known[1])


def test_a_version_that_the_user_named_is_left_alone(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for attempt, strike in enumerate((5, None)):
        train(job, strike, own=[CSVLogger(tmp_path / "logs", version=attempt)])
    assert logged.versions(tmp_path) == ["version_0", "version_1"]
    assert [row["step"] for row in rows(tmp_path, 0) if "each" in row] == ["0", "1", "2", "3", "4"]
    assert next(row["step"] for row in rows(tmp_path, 1) if "each" in row) == "4"


def test_a_checkpoint_that_was_named_begins_a_new_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    train(job, 5)
    before = rows(tmp_path)
    (gasp,) = (tmp_path / "ckpts").glob("gasp*.ckpt")
    monkeypatch.setenv("LASTGASP_RESUME", str(gasp))
    train(job)
    assert logged.versions(tmp_path) == ["version_0"] * KINDS + ["version_1"] * KINDS
    assert rows(tmp_path) == before


def test_a_copy_of_the_checkpoints_leaves_the_logs_of_the_original_alone(tmp_path: Path) -> None:
    train(Job(tmp_path), 5)
    before = rows(tmp_path)
    shutil.copytree(tmp_path / "ckpts", tmp_path / "copy/ckpts")
    train(Job(tmp_path / "copy"), own=loggers(tmp_path))
    assert "version_1" in logged.versions(tmp_path)
    assert rows(tmp_path) == before


@pytest.mark.parametrize(
    "damage", ["cut", *(pytest.param(one, marks=FULL) for one in ("binary", "header", "gone", "marker"))]
)
def test_what_cannot_be_gone_on_with_costs_that_alone(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path)
    train(job, 5, own=[CSVLogger(tmp_path / "logs")])
    folder = tmp_path / "logs/lightning_logs/version_0"
    table = folder / "metrics.csv"
    lines = table.read_bytes().splitlines(keepends=True)
    if damage == "cut":
        table.write_bytes(b"".join(lines[:3]))
    elif damage == "binary":
        table.write_bytes(os.urandom(300))
    elif damage == "header":
        table.write_bytes(b"".join(lines[1:]))
    elif damage == "gone":
        table.unlink()
    else:
        (folder / ".lastgasp.json").write_text("{")
    left = table.read_bytes() if table.exists() else None
    train(job, own=[CSVLogger(tmp_path / "logs")])
    assert logged.versions(tmp_path) == ["version_0", "version_1"]
    assert (table.read_bytes() if table.exists() else None) == left
    assert caplog.text.count("is not continued, a new version begins") == 1
    assert next(row["step"] for row in rows(tmp_path, 1) if "each" in row) == "4"


@pytest.mark.skipif(not BOARD, reason="tensorboard is not installed: there are no event files")
def test_a_damaged_event_file_is_not_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    train(job, 5)
    (file,) = (tmp_path / "board/lightning_logs/version_0").glob("events*")
    content = bytearray(file.read_bytes())
    content[200:240] = bytes(40)
    file.write_bytes(content)
    train(job)
    assert file.read_bytes() == content
    assert logged.versions(tmp_path) == ["version_0", "version_0", "version_1"], "of the board alone"
    assert caplog.text.count("is not continued, a new version begins") == 1


def test_two_fits_that_share_a_logger_share_its_version(tmp_path: Path) -> None:
    """The first one, gone through again by a restart, does not take away what the second one has logged."""

    def script(folder: Path, strike: int | None) -> None:
        job = Job(folder)
        job.restart()
        seed(3)
        logger = CSVLogger(folder / "logs")
        for number in range(2):
            trainer = job.make(
                ModelCheckpoint(folder / "ckpts", save_top_k=-1), strike=strike if number else None,
                enable_checkpointing=True, logger=logger, log_every_n_steps=1,
            )  # fmt: skip
            if not fit(trainer, Logged(), val_dataloaders=DataLoader(data(5), 8)):
                return

    script(tmp_path / "straight", None)
    script(tmp_path / "faulted", 5)
    script(tmp_path / "faulted", None)
    assert rows(tmp_path / "faulted") == rows(tmp_path / "straight")


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_second_fit_of_a_named_checkpoint_logs_no_step_twice(tmp_path: Path, epochs: int) -> None:
    """As without us: what is replayed at the boundary has been logged, as the same logger went on behind it."""
    job = Job(tmp_path)
    job.restart()
    seed(3)
    model, keeps = Small(), ModelCheckpoint(tmp_path / "kept", save_last=True)
    trainer = job.make(keeps, logger=CSVLogger(tmp_path / "logs"), enable_checkpointing=True, log_every_n_steps=1)
    assert fit(trainer, model, val_dataloaders=DataLoader(data(5), 8))
    first = rows(tmp_path)
    trainer.fit_loop.max_epochs = epochs
    assert fit(trainer, model, val_dataloaders=DataLoader(data(5), 8), ckpt_path="last")
    assert rows(tmp_path)[: len(first)] == first
    losses = [int(row["step"]) for row in rows(tmp_path) if "loss_step" in row]
    assert losses == list(range(6 * epochs))
    assert [row["step"] for row in rows(tmp_path) if "val_loss" in row] == ["5", "11", "17"][:epochs]
    assert [row["step"] for row in rows(tmp_path) if "loss_epoch" in row] == ["5", "11", "17"][:epochs]


class Told(L.Callback):
    """Raises between the boundary and the row that Lightning logs behind it."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 4:
            raise Boom


def test_a_step_that_was_cut_short_behind_its_update_is_logged(straight: Path, tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.restart()
    seed(3)
    trainer = job.make(LearningRateMonitor("step"), Told(), logger=loggers(tmp_path), log_every_n_steps=1)
    assert not fit(trainer, Small(), val_dataloaders=DataLoader(data(5), 8))
    train(job, model=Small())
    assert [row["step"] for row in rows(tmp_path) if "loss_step" in row] == [str(n) for n in range(12)]


def test_a_mark_costs_little_to_keep(tmp_path: Path) -> None:
    """It is made anew only where something was logged; what waits in memory is in it."""
    from lastgasp_lightning.loggers import LogRecord
    from lastgasp_lightning.logversions import watch_versions

    watch_versions()  # as making a LastGasp does
    logger = CSVLogger(tmp_path)
    trainer = L.Trainer(logger=logger, accelerator="cpu", enable_checkpointing=False)
    record = LogRecord(trainer, tmp_path, lambda: 0)
    assert logger.version == 0
    record.install()
    first = record.mark()
    assert record.mark() is first
    logger.log_metrics({"a": torch.tensor(1.5)}, step=3)
    waiting = json.loads(record.mark()[8:])[0]
    assert (waiting["rows"], waiting["waiting"]) == (0, [{"a": 1.5, "step": 3}])
    logger.save()
    assert json.loads(record.mark()[8:])[0]["rows"] == 1
    record.uninstall()
