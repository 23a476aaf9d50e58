"""What ModelCheckpoint saves behind a fault: the same files as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from frameworks.fit_rig import Boom, Job, Small, data, fit, seed

pytestmark = pytest.mark.usefixtures("restored_environ")


class Worse(L.Callback):
    """A metric of the validation that was best at its first."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("worse", float(trainer.global_step))


class StrikeAtValidation(L.Callback):
    """Raises when the first validation begins, in the first attempt."""

    def __init__(self, strikes: bool) -> None:
        self.strikes = strikes

    def on_validation_start(self, *args: object) -> None:
        if self.strikes:
            raise Boom


def saves(folder: Path, saving: dict[str, Any], strike: int | None, validation: bool, **options: Any) -> dict[str, Any]:
    """Names, and what they link to or which step they are of, behind one fault."""
    job = Job(folder, {"num_sanity_val_steps": 0, "enable_checkpointing": True, **options})
    for attempt in range(2):
        seed(1)
        job.restart()
        keeps = ModelCheckpoint(folder / "kept", "{step}", **saving)
        strikes = StrikeAtValidation(validation and not attempt)
        trainer = job.make(Worse(), keeps, strikes, strike=None if attempt else strike)
        loaders = DataLoader(data(), 4, shuffle=True), DataLoader(data(2, 8), 4)
        if fit(trainer, Small(), loaders[0], val_dataloaders=loaders[1]):
            break
    files = [path for path in (folder / "kept").iterdir() if path.suffix == ".ckpt"]
    return {
        path.name: path.readlink().name if path.is_symlink()
        else torch.load(path, weights_only=False)["global_step"]
        for path in files
    }  # fmt: skip


@pytest.mark.parametrize("last", [True, "link"])
def test_last_stays_what_it_was(tmp_path: Path, last: Any) -> None:
    """Where nothing has become better since: at its end ModelCheckpoint saves it only if it has never saved."""
    saving = {"monitor": "worse", "save_top_k": 1, "save_last": last}
    assert saves(tmp_path / "straight", saving, None, False) == saves(tmp_path / "struck", saving, 8, False)


def test_what_waits_for_a_validation_is_saved_behind_it(tmp_path: Path) -> None:
    """The metric is not there before; the fault comes in between."""
    saving = {"monitor": "worse", "save_top_k": -1, "every_n_train_steps": 4}
    straight = saves(tmp_path / "straight", saving, None, False, val_check_interval=5)
    assert "step=5.ckpt" in straight
    assert saves(tmp_path / "struck", saving, None, True, val_check_interval=5) == straight
