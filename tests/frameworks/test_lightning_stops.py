"""A training that was asked to stop (`trainer.should_stop`) ends there, also where a fault comes before its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from frameworks.fit_rig import Boom, Job, Small, data, fit
from lastgasp.checkpoint.addenda import remove_orphans

ASKED = 8
"""In the middle of the second epoch of four."""


class Stops(L.Callback):
    """Asks for the end at one step, as Lightning's documents say."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        if trainer.global_step == ASKED:
            trainer.should_stop = True


class Struck(Small):
    """Raises in what is due at the end: the last validation, its end, or the epoch's."""

    def __init__(self, moment: str, step: int) -> None:
        super().__init__()
        self._due = moment, step

    def _strike(self, moment: str) -> None:
        if self._due == (moment, self.trainer.global_step):
            raise Boom

    def val_dataloader(self) -> Any:
        return DataLoader(data(), 8)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._strike("validation")

    def on_validation_epoch_end(self) -> None:
        self._strike("validation's end")

    def on_train_epoch_end(self) -> None:
        self._strike("epoch's end")


@pytest.mark.parametrize("moment", ["validation", "validation's end", "epoch's end"])
@pytest.mark.parametrize("least", [None, 15], ids=["at-once", "min-steps"])
def test_a_stop_holds_where_what_is_due_then_fails(
    tmp_path: Path, moment: str, least: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    job, end = Job(tmp_path, {"max_epochs": 4, "min_steps": least}), least or ASKED
    assert not fit(job.make(Stops()), Struck(moment, end))
    job.restart()
    model, trainer = Struck("", 0), job.make(Stops())
    assert fit(trainer, model)
    assert (trainer.global_step, model.trained) == (end, [])
    assert caplog.text.count(f"training ends with step {end}") == 1


def saving(job: Job) -> ModelCheckpoint:
    return ModelCheckpoint(job.folder / "ckpts", "{epoch}-{step}", save_last=True)


def ended(job: Job, model: L.LightningModule | None = None) -> int:
    trainer = job.make(Stops(), saving(job), enable_checkpointing=True)
    assert fit(trainer, model or Small())
    return trainer.global_step


@pytest.mark.parametrize("attempt", [0, 1])
def test_another_job_trains_on_and_a_restart_of_the_same_one_does_not(
    tmp_path: Path, attempt: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who stops by the clock starts another job to go on."""
    monkeypatch.setenv("LASTGASP_JOB", "a-name-of-its-own")
    job = Job(tmp_path, {"max_epochs": 4})
    assert ended(job) == ASKED
    job.restart()
    monkeypatch.setenv("LASTGASP_ATTEMPT", str(attempt))
    assert ended(job) == (ASKED if attempt else 24)
    assert caplog.text.count("an earlier job has ended with step 8") == (not attempt)


def test_an_earlier_fit_of_the_script_ends_where_it_did(tmp_path: Path) -> None:
    job = Job(tmp_path, {"max_epochs": 4})
    assert ended(job) == ASKED
    assert not fit(job.make(strike=5), Small())
    job.restart()
    assert ended(job) == ASKED
    model = Small()
    assert fit(job.make(), model)
    assert model.trained[0] == 5


def test_a_training_that_was_stopped_by_a_fault_in_its_last_moment_ends_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The gasp stays the newest, and a chain of jobs with a time budget each would never get further."""
    job = Job(tmp_path, {"max_epochs": 4})
    assert not fit(job.make(Stops()), Struck("validation", ASKED))
    found = []
    for _ in range(3):
        job.restart()
        trainer = job.make(Stops())
        assert fit(trainer, Struck("", 0))
        found.append(trainer.global_step)
    assert found == [ASKED, 24, 24]
    assert caplog.text.count("an earlier job has ended with step 8") == 2
    gasp, = (tmp_path / "ckpts").glob("gasp*.ckpt")
    assert (marker := gasp.with_name(f".{gasp.name}.ended")).exists()
    gasp.unlink()
    remove_orphans(gasp.parent)
    assert not marker.exists()
