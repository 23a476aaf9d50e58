"""A tiny job of ModelParallelStrategy or FSDPStrategy: batch norm, dropout, a schedule, shuffling."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import wrap
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).parents[1]))  # as a script of its own
from support import fsdp_strategy

SHAPES = ("plain", "ending", "accumulated", "manual", "hybrid", "tensor", "both")
TENSOR = ("tensor", "both")
"""Two ranks share each of two layers: alone, or with `fully_shard` besides."""


class Perceptron(LightningModule):
    """Draws random numbers in its forward pass."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape
        odd = 34 if shape in TENSOR else 33
        self.net = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, odd), nn.Linear(odd, 1)
        )
        self.automatic_optimization = shape != "manual"

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
        trained: Any = self.trainer.model if self.shape == "fsdp-grads" else self  # as Lightning asks for flat ones
        optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Sharded(Perceptron):
    """Shards itself."""

    def configure_model(self) -> None:
        """Shards of each layer."""
        found: Any = self.device_mesh
        if self.shape in TENSOR:
            parallelize_module(self.net, found["tensor_parallel"], {"4": ColwiseParallel(), "5": RowwiseParallel()})
        if self.shape == "tensor":
            return
        mesh = found["data_parallel"]
        if self.shape == "hybrid":
            mesh = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("replicate", "shard"))
        for layer in self.net:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)


class Ending(Sharded):
    """Changes its weights in its own `on_train_batch_end`, after all callbacks."""

    def on_train_batch_end(self, *_: Any) -> None:
        """A little decay."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.999)


class Wrapped(Perceptron):
    """Wraps its layers itself, and leaves nothing to the strategy."""

    def configure_model(self) -> None:
        """As `FSDPStrategy` wants it."""
        wrap_layers(self)


class Legacy(Perceptron):
    """By the hook of older releases, behind which Lightning wraps nothing."""

    def configure_sharded_model(self) -> None:
        """As the new one."""
        wrap_layers(self)


def wrap_layers(module: Perceptron) -> None:
    """Each in FSDP1, and all of them once more."""
    inner = (wrap(layer) if any(True for _ in layer.parameters()) else layer for layer in module.net)
    wrapped: Any = wrap(nn.Sequential(*inner))
    module.net = wrapped


def module_of(shape: str) -> Perceptron:
    """The module of a job."""
    kinds: dict[str, type[Perceptron]] = {"ending": Ending, "fsdp-wrapped": Wrapped, "fsdp-legacy": Legacy}
    return kinds.get(shape, Perceptron if shape in fsdp_strategy.SHAPES else Sharded)(shape)


def options(shape: str, world: int) -> dict[str, Any]:
    """Strategy and what belongs to it, for a Trainer."""
    if shape in fsdp_strategy.SHAPES:
        return fsdp_strategy.options(shape, world)
    tensor = 2 if shape in TENSOR else 1
    return {"accelerator": "cpu", "strategy": ModelParallelStrategy(world // tensor, tensor),
            "accumulate_grad_batches": 2 if shape == "accumulated" else 1}  # fmt: skip


def main() -> None:
    """Two epochs and a bit; validation at the end of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--final", type=Path)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--data-of", type=int, help="as many data as so many devices have")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--shape", default="plain", choices=SHAPES + fsdp_strategy.SHAPES)
    parser.add_argument("--without", action="store_true", help="plain Lightning")
    parser.add_argument("--state", type=Path, help="where all is saved at the end")
    parser.add_argument("--from", dest="start", help="ckpt_path")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tensor = 2 if args.shape in TENSOR else 1
    seed_everything(7 + 1000 * (int(os.environ.get("LOCAL_RANK", "0")) // tensor))  # who shares layers draws the same
    x = torch.randn(4 * 5 * (args.data_of or args.devices) * 2, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    callbacks: list[Callback] = [ModelCheckpoint(args.dir, "{step}", every_n_train_steps=4, save_top_k=-1)]
    if not args.without:
        from lastgasp_lightning import LastGasp

        callbacks.append(LastGasp(args.dir, arena="every 1", recovery="restart"))
    trainer = Trainer(
        devices=args.devices, max_steps=args.steps, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, callbacks=callbacks, **options(args.shape, args.devices),
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)  # replicas begin alike: fully_shard does not see to that
        model = module_of(args.shape)
    loaders = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8)
    trainer.fit(model, *loaders, ckpt_path=args.start)
    if args.state:
        trainer.save_checkpoint(args.state)
    wrapped: Any = trainer.strategy.model
    whole = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))
    if args.final and trainer.is_global_zero:
        torch.save({name: value for name, value in whole.items() if "running" not in name}, args.final)


if __name__ == "__main__":
    main()
