"""A Lightning job that keeps its losses in a list for the end of the epoch, as Lightning's own documents have it.

Given a directory. LASTGASP_FAULT brings the fault. An empty list ends the job, and lists of different lengths do.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lastgasp_lightning import LastGasp

STEPS = 12
"""Batches of an epoch."""


class Net(LightningModule):
    """What it keeps is no part of its state, and changes its loss."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.outs: list[Tensor] = []
        self.kinds: dict[str, int] = {}
        self.mean, self.scale, self.never = torch.zeros(()), scale, [1.0]
        self.means: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The running mean weighs the loss."""
        x, y = batch
        loss: Tensor = ((self.net(x) - y) ** 2).mean() * (1 + 0.01 * self.mean)
        self.outs.append(loss.detach())
        self.kinds[f"b{batch_idx % 3}"] = self.kinds.get(f"b{batch_idx % 3}", 0) + 1
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        self.scale += 1.0
        return loss

    def on_train_start(self) -> None:
        """What belongs to the process."""
        self.process = os.getpid()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """A place for a fault."""

    def on_train_epoch_end(self) -> None:
        """Raises where the list is empty, or another rank's has another length."""
        found = torch.stack(self.outs)
        lengths: Any = self.all_gather(torch.tensor(len(self.outs)))
        assert len(lengths.unique()) == 1, lengths
        self.means.append(found.double().mean().item())
        self.outs.clear()

    def configure_optimizers(self) -> Any:
        """Plain."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Seen(Callback):
    """A callback without a state_dict."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        """One more."""
        self.losses.append(float(outputs["loss"]))


def main() -> None:
    """Two epochs; each rank writes what it has kept."""
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seed_everything(7 + rank)
    x = torch.randn(4 * STEPS * world, 8, generator=torch.Generator().manual_seed(1))
    net, seen = Net(float(os.environ.get("TEST_SCALE", "0"))), Seen()
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy="ddp", max_epochs=2, logger=False, num_sanity_val_steps=0,
        default_root_dir=directory, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[seen, LastGasp(directory)],
    )  # fmt: skip
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer.fit(net, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=32))
    assert net.process == os.getpid()
    kept = {"means": net.means, "outs": len(net.outs), "kinds": net.kinds, "mean": net.mean.item(),
            "scale": net.scale, "seen": seen.losses}  # fmt: skip
    (directory / f"kept-{rank}.json").write_text(json.dumps(kept, sort_keys=True))
    if trainer.is_global_zero:
        torch.save(net.state_dict(), directory / "final.pt")


if __name__ == "__main__":
    main()
