"""Fits with the real LastGasp in one process: one rank, faults by exception."""

from __future__ import annotations

import random
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lastgasp.fits import FITS
from lastgasp_lightning import LastGasp

_TRAINED: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()


class Boom(Exception):
    """The injected fault."""


class Small(L.LightningModule):
    """Dropout and batch norm, so that every random number counts."""

    def __init__(self, lr: float = 0.02, width: int = 6) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1))
        _TRAINED[self] = []

    @property
    def trained(self) -> list[int]:
        """The steps that this very module has begun: not among its values, which a resume has again."""
        return _TRAINED[self]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.trained.append(self.trainer.global_step)
        loss: Tensor = ((self.net(batch[0]) - batch[1]) ** 2).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", ((self.net(batch[0]) - batch[1]) ** 2).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Strike(L.Callback):
    """Raises in the forward pass of the step that follows `step` completed ones."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *args: object) -> None:
        if self.step is not None and trainer.global_step == self.step:
            raise Boom


def gasp_of(trainer: Any) -> Any:
    (found,) = (cb for cb in trainer.callbacks if isinstance(cb, LastGasp))
    return found


class AsOneOfSeveral(L.Callback):
    """Has a lone rank capture what the ranks of a larger job capture."""

    def on_train_start(self, trainer: L.Trainer, *args: object) -> None:
        gasp_of(trainer)._run.state._single = False


def data(seed: int = 1, size: int = 24) -> Dataset[tuple[Tensor, ...]]:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


@dataclass
class Job:
    """What stays the same over the restarts of one script.

    """

    folder: Path
    trainer: dict[str, Any] = field(default_factory=dict)

    def restart(self) -> None:
        FITS._last.clear()

    def make(self, *callbacks: L.Callback, strike: int | None = None, **more: Any) -> L.Trainer:
        arguments: dict[str, Any] = {"max_epochs": 2, "logger": False, "enable_checkpointing": False}
        arguments |= self.trainer | more
        return L.Trainer(
            callbacks=[*callbacks, Strike(strike), LastGasp(self.folder / "ckpts", marks=False)],
            accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, default_root_dir=self.folder,
            **arguments,
        )  # fmt: skip


def seed(number: int) -> None:
    """As seed_everything, which leaves environment variables behind."""
    random.seed(number), np.random.seed(number), torch.manual_seed(number)


def fit(trainer: L.Trainer, model: L.LightningModule, loaders: Any = None, **options: Any) -> bool:
    """Whether it ended well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(model, loaders if loaders is not None else DataLoader(data(), 4, shuffle=True), **options)
        except Boom:
            return False
    return True


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}
