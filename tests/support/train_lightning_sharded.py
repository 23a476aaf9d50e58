"""A tiny job of ModelParallelStrategy: shards on each rank, batch norm, dropout, a schedule, shuffling."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


class Sharded(LightningModule):
    """A perceptron whose forward pass draws random numbers."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape
        self.net = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 33), nn.Linear(33, 1)
        )
        self.automatic_optimization = shape != "manual"

    def configure_model(self) -> None:
        """Shards of each layer."""
        found: Any = self.device_mesh
        for layer in self.net:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=found["data_parallel"])
        fully_shard(self.net, mesh=found["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Squared error on noisy inputs."""
        x, y = batch
        loss: Tensor = ((self.net(x + 0.1 * torch.randn_like(x)) - y) ** 2).mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            schedule: Any = self.lr_schedulers()
            schedule.step()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Only there so that validation takes place."""
        self.net(batch[0])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam and a step schedule."""
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Ending(Sharded):
    """Changes its weights in its own `on_train_batch_end`, after all callbacks."""

    def on_train_batch_end(self, *_: Any) -> None:
        """A little decay."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.999)


def main() -> None:
    """Two epochs and a bit; validation at the end of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--final", type=Path)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--shape", default="plain", choices=("plain", "ending", "accumulated", "manual"))
    parser.add_argument("--without", action="store_true", help="plain Lightning")
    parser.add_argument("--from", dest="start", help="ckpt_path")
    args = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(7 + 1000 * int(os.environ.get("LOCAL_RANK", "0")))
    x = torch.randn(4 * 5 * args.devices * 2, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    callbacks: list[Callback] = [ModelCheckpoint(args.dir, "{step}", every_n_train_steps=4, save_top_k=-1)]
    if not args.without:
        from lastgasp_lightning import LastGasp

        callbacks.append(LastGasp(args.dir, arena="every 1"))
    trainer = Trainer(
        accelerator="cpu", devices=args.devices, strategy=ModelParallelStrategy(args.devices, 1),
        max_steps=args.steps, max_epochs=-1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, callbacks=callbacks, accumulate_grad_batches=2 if args.shape == "accumulated" else 1,
    )  # fmt: skip
    model = (Ending if args.shape == "ending" else Sharded)(args.shape)
    loaders = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8)
    trainer.fit(model, *loaders, ckpt_path=args.start)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if args.final and trainer.is_global_zero:
        torch.save({name: value for name, value in whole.items() if "running" not in name}, args.final)


if __name__ == "__main__":
    main()
