"""As `train_many_faults`, a fit of `ModelParallelStrategy`: each fault is answered with the arenas of all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lastgasp_lightning import LastGasp
from support.train_many_faults import arguments, pause, step_of

WIDTH = 100_000
"""8 MB of parameters and moments in the arena of each of three ranks."""


class Wide(LightningModule):
    """Two layers in shards."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def configure_model(self) -> None:
        """Shards of each."""
        meshes: Any = self.device_mesh
        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=meshes["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """On noise, too."""
        found: Tensor = self.net(batch[0] + torch.randn(4, 8)).square().mean()
        return found

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam's moments are in the arenas as well."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Pause(Callback):
    """Waits for each fault, and writes down what is held."""

    def __init__(self, directory: Path, faults: int, after: int, ours: LastGasp) -> None:
        self._held, self._ours = (directory, faults, after), ours

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """A step begins."""
        run: Any = self._ours._run
        pause(*self._held, trainer.global_step, lambda: run.progress("data"))


def main() -> None:
    """Train."""
    args = arguments()
    torch.set_num_threads(1)
    seed_everything(3 + int(os.environ["RANK"]))
    world, steps = int(os.environ["WORLD_SIZE"]), step_of(args.faults) + 2
    data = TensorDataset(torch.randn(4 * world * steps, 8, generator=torch.Generator().manual_seed(1)))
    ours = LastGasp(args.dir, arena="every 1", recovery="auto")
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=ModelParallelStrategy(world, 1), max_steps=steps, max_epochs=-1,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, logger=False,
        callbacks=[Pause(args.dir, args.faults, args.after, ours), ours],
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Wide()
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if trainer.is_global_zero:
        torch.save(whole, args.dir / "final.pt")


if __name__ == "__main__":
    main()
