"""As `train_many_faults`, a fit of Lightning's `ddp` with what makes it hold more: a logger, checkpoints, validations,
workers of a loader, averages."""

from __future__ import annotations

import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lastgasp_lightning import LastGasp
from support.train_many_faults import APART, WIDTH, arguments, step_of
from support.train_many_faults_lightning import Pause


class Wide(LightningModule):
    """Logs each step; keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self.seen: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """On noise, too."""
        self.seen.append(self.global_step)
        loss: Tensor = self.net(batch[0] + torch.randn(4, 8)).square().mean()
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """What is logged there has no part in the training."""
        self.log("error", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam's moments."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    """Train."""
    args = arguments()
    torch.set_num_threads(1)
    seed_everything(3 + int(os.environ["RANK"]))
    world, steps = int(os.environ["WORLD_SIZE"]), step_of(args.faults) + 2
    data = TensorDataset(torch.randn(4 * world * steps, 8, generator=torch.Generator().manual_seed(1)))
    few = DataLoader(TensorDataset(data.tensors[0][: 4 * world]), batch_size=4)
    ours, saves = LastGasp(args.dir), ModelCheckpoint(args.dir / "own", every_n_train_steps=2 * APART)
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy="ddp", max_steps=steps, max_epochs=-1, val_check_interval=APART,
        enable_progress_bar=False, enable_model_summary=False, logger=CSVLogger(args.dir / "logs"),
        log_every_n_steps=1, default_root_dir=args.dir,
        callbacks=[Pause(args.dir, args.faults, args.after, ours), saves, EMAWeightAveraging(decay=0.9), ours],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Wide()
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True), few)
    if trainer.is_global_zero:
        assert model.seen == list(range(steps)), model.seen
        torch.save(model.state_dict(), args.dir / "final.pt")


if __name__ == "__main__":
    main()
