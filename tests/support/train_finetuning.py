"""Lightning's BaseFinetuning under DDP: train_finetuning.py DIRECTORY. Rank 1 kills itself once, in epoch 2."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lastgasp_lightning import LastGasp


class Model(L.LightningModule):
    """A backbone that begins frozen, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Rank 1 dies in the last step of all."""
        mark = Path(sys.argv[1]) / "died"
        if self.trainer.global_step == 9 and self.trainer.global_rank == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        loss: Tensor = self.head(self.backbone(batch)).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        """Of the head alone."""
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class Finetuning(BaseFinetuning):
    """As Lightning's documents have it."""

    def freeze_before_training(self, pl_module: Any) -> None:
        """The backbone."""
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        """From the second epoch on all is trained."""
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.1)


def main() -> None:
    """Two epochs of five steps."""
    L.seed_everything(1, verbose=False)
    data: DataLoader[Tensor] = DataLoader(list(torch.randn(20, 4)), batch_size=2)  # type: ignore[arg-type]
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Finetuning(), LastGasp(sys.argv[1])],
    )  # fmt: skip
    trainer.fit(Model(), data)


if __name__ == "__main__":
    main()
