"""A Lightning job over an `ElasticLoader`, whose `fit` can be entered again with fewer ranks."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.distributed import get_world_size, group
from torch.distributed._functional_collectives import all_reduce
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAccuracy

from lastgasp.gasp.joining import JOINS
from lastgasp.pytorch import ElasticLoader
from lastgasp_lightning import LastGasp
from support import again_faults
from support.again_faults import note
from support.train_elastic import GATES, Noisy, newcomer, tell

STEPS, MICROS = 12, 4
VALIDATED = 24
"""As many for 4, 3 and 2 ranks, so that none has a sample twice."""


class Net(LightningModule):
    """With random numbers, and with buffers; other weights on each rank but for DDP."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
        self.right = BinaryAccuracy()

    def train_dataloader(self) -> Any:
        """Asked for in each entry."""
        if self.args.plain:
            return DataLoader(Noisy(), batch_size=4)  # type: ignore[arg-type]
        ordered, workers = not self.args.any_order, self.args.workers
        self.loader = ElasticLoader(
            Noisy(), self, batch_size=4, ranks=MICROS, seed=5, canonical=ordered, num_workers=workers
        )
        return self.loader

    def val_dataloader(self) -> Any:
        """Each rank has a part of it."""
        x = torch.randn(VALIDATED, 8, generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Squared error on noisy inputs."""
        inputs, wanted = batch
        found = self.net(inputs) + 0.01 * torch.randn(1)
        loss: Tensor = ((found - wanted) ** 2).mean()
        loss = loss * get_world_size() * self.trainer.world_size * int(os.environ["WORLD_SIZE"]) / MICROS**3
        if self.args.exchanges:
            loss = loss * (1 + all_reduce(loss.detach(), "sum", group.WORLD))
        self.log("loss", loss)
        self.right(found > 0, wanted > 0)
        self.log("right", self.right, on_step=True, on_epoch=True)
        self.log("sum", loss * len(inputs), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """What ModelCheckpoint looks at."""
        x, y = batch
        self.log("error", ((self.net(x) - y) ** 2).mean(), sync_dist=True)
        self.log("validated", float(len(x)), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW and a schedule for each step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6, 10], 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Diary(Callback):
    """Notes who trains, and on what; holds the ranks at the gates."""

    def __init__(self, directory: Path, ours: LastGasp) -> None:
        self._directory, self._ours = directory, ours

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The process group is there."""
        again_faults.at("function called")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A fit is entered."""
        note(self._directory, f"entered {os.getpid()} {trainer.global_step} {trainer.global_rank} {trainer.world_size}")

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Faults come once the test says so."""
        run, step = self._ours._run, trainer.global_step
        while run is not None and step in GATES and not (self._directory / f"go-{step}").exists():
            run.progress("data")
            time.sleep(0.01)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """The step is complete."""
        loader = getattr(trainer.lightning_module, "loader", None)
        if loader is not None:
            tell(self._directory, loader, loader._open, trainer.global_step - 1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The fit is over."""
        note(self._directory, f"ended {os.getpid()} {trainer.global_step}")


def main() -> None:
    """Twelve steps: two epochs of five, and a bit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--any-order", action="store_true", help="gradients are summed as it comes")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--exchanges", action="store_true", help="within each micro-batch")
    parser.add_argument("--plain", action="store_true", help="a DataLoader, without anything elastic")
    args = parser.parse_args()
    torch.set_num_threads(1)
    again_faults.install(args.dir)
    newcomer(args.dir, os.environ.get(JOINS, ""))
    rank, here = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    seed_everything(3 + 1000 * rank)
    ours, module = LastGasp(args.dir), Net(args)
    trainer = Trainer(
        accelerator="cpu", devices=here, num_nodes=args.nodes, strategy="ddp", max_steps=STEPS, max_epochs=-1,
        val_check_interval=2, log_every_n_steps=1, enable_model_summary=False, default_root_dir=args.dir,
        logger=CSVLogger(args.dir / "logs/table"),
        callbacks=[Diary(args.dir, ours), ours, LearningRateMonitor(), ModelCheckpoint(monitor="error", save_top_k=2)],
    )  # fmt: skip
    trainer.fit(module)
    note(args.dir, f"left {os.getpid()} {trainer.global_step}")
    if trainer.is_global_zero:
        torch.save({name: value.clone() for name, value in module.state_dict().items()}, args.dir / "final.pt")


if __name__ == "__main__":
    main()
