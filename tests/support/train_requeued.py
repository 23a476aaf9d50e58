"""A Lightning job as one of Slurm's, or of `torch.multiprocessing.spawn`, starts it.

Usage: train_requeued.py DIRECTORY FINAL. With `REQUEUE_AT` each rank gets, at that step, the signal by which Slurm
announces the end of its time; Lightning then saves, and has `scontrol` put the job into the queue again. It reads and
writes its own checkpoints in the working directory.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lastgasp_lightning import LastGasp

STEPS = 16


class Requeued(LightningModule):
    """Dropout, so that random state counts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Slurm signals all ranks at once."""
        if os.environ.get("REQUEUE_AT") == str(self.global_step):
            os.kill(os.getpid(), signal.SIGUSR1)
        loss: Tensor = self.net(batch[0]).pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    """Two ranks on one node."""
    directory, final = sys.argv[1:]
    seed_everything(3)
    model = Requeued()
    loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=2, shuffle=True)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS, callbacks=[LastGasp(directory)], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        torch.save(model.state_dict(), final)


if __name__ == "__main__":
    main()
