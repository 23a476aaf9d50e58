"""A tiny DDP job with everything that makes resuming hard: batch norm, dropout, a schedule, shuffling."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lastgasp_lightning import LastGasp

sys.path.append(str(Path(__file__).parents[1]))  # as a script of its own
from support import card


class Tiny(LightningModule):
    """A perceptron whose forward pass draws from all three random generators."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Squared error on noisy inputs."""
        x, y = batch
        noise = random.random() * 0.1 + float(np.random.rand()) * 0.1
        loss: Tensor = ((self.net(x + noise * torch.randn_like(x)) - y) ** 2).mean()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Only there so that validation takes place."""
        self.net(batch[0])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam and a step schedule."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Awaiting(Callback):
    """Where the job is told to stop, training has not ended before that was heard."""

    def __init__(self, lastgasp: LastGasp, steps: int) -> None:
        self._lastgasp, self._steps = lastgasp, steps

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Before the last step."""
        run = self._lastgasp._run
        while run is not None and not run.session.status.held and trainer.global_step == self._steps - 1:
            time.sleep(0.01)


def own_callbacks(directory: str, steps: int) -> list[Callback]:
    """Ours, and what the first attempt of a job that is told to stop needs."""
    ours = LastGasp(directory)
    told = "sigterm" in os.environ.get("LASTGASP_FAULT", "") and os.environ.get("LASTGASP_ATTEMPT", "0") == "0"
    return [ours, Awaiting(ours, steps)] if told else [ours]


def main() -> None:
    """Two epochs and a bit; validation at the end of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--final", type=Path)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--no-callback", action="store_true", help="leave it to LASTGASP=1")
    parser.add_argument("--no-periodic", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    card.one_card()
    rank = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    seed_everything(7 + 1000 * rank)  # other random numbers on each rank
    x = torch.randn(4 * 5 * args.devices, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    periodic = [] if args.no_periodic else [ModelCheckpoint(args.dir, "{step}", every_n_train_steps=4, save_top_k=-1)]
    trainer = Trainer(
        **card.trainer(args.devices), strategy="ddp" if args.devices > 1 else "auto",
        max_steps=args.steps, max_epochs=-1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, enable_checkpointing=bool(periodic),
        callbacks=[*periodic, *([] if args.no_callback else own_callbacks(args.dir, args.steps))],
    )  # fmt: skip
    model = Tiny()
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8))
    if args.final and trainer.is_global_zero:
        torch.save({name: value.clone() for name, value in model.state_dict().items()}, args.final)


if __name__ == "__main__":
    main()
