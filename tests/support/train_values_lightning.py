"""A Lightning job whose module and callbacks keep plain values, as users write them.

Given a directory. LASTGASP_FAULT brings the fault; the gate is that of `train_again_lightning`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lastgasp.adapter.again import Limits
from lastgasp.pytorch.uservalues import keeper
from lastgasp_lightning import LastGasp
from support.again_faults import note
from support.train_again_lightning import GATE

vars(keeper)["Limits"] = partial(Limits, seconds=1.0)  # more than a busy machine takes in such short steps
STEPS = 40
"""Batches of an epoch: more than a list may have that is copied in each step."""


@dataclass
class Seen:
    """What a data class of the user's has counted."""

    batches: int = 0
    places: list[int] = field(default_factory=list)


class Body(nn.Module):
    """Counts in its own forward, and in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)), 0
        self.activations: list[float] = []
        self.net[0].register_forward_hook(self.seen)

    def seen(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """A hook with a state."""
        self.activations.append(float(output.detach().mean()))

    def forward(self, x: Tensor) -> Any:
        """As usual."""
        self.calls += 1
        return self.net(x)


class Net(LightningModule):
    """Keeps what people keep."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.body = Body()
        self.training_step_outputs: list[Tensor] = []
        self.count, self.recent, self.classes = 0, deque[float](maxlen=4), Counter[str]()
        self.noise, self.numbers, self.seen = torch.Generator().manual_seed(5), np.random.default_rng(6), Seen()
        self.running = torch.zeros(3)
        self.cleared: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The noise is the module's own."""
        x, y = batch
        self.count += 1
        noise = torch.randn(x.shape, generator=self.noise) + float(self.numbers.normal())
        loss: Tensor = ((self.body(x + 0.1 * noise) - y) ** 2).mean() * (1 + self.running.mean())
        self.training_step_outputs.append(loss.detach())
        self.recent.append(loss.item())
        self.classes["odd" if batch_idx % 2 else "even"] += 1
        self.seen.batches += 1
        self.seen.places.append(batch_idx)
        self.running.mul_(0.9).add_(0.001 * self.count)
        return loss

    def on_train_epoch_end(self) -> None:
        """As Lightning's own documents have it."""
        self.cleared.append(len(self.training_step_outputs))
        self.training_step_outputs.clear()

    def configure_optimizers(self) -> Any:
        """Plain."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Average(Callback):
    """An average of weights of one's own, and without a state_dict."""

    def __init__(self) -> None:
        self.shadow: dict[str, Tensor] = {}
        self.updates = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """From where training starts."""
        self.shadow = {name: value.detach().clone() for name, value in pl_module.named_parameters()}

    def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """In the middle of a step: a survivor does it twice."""
        self.updates += 1
        for name, value in pl_module.named_parameters():
            self.shadow[name].data.mul_(0.9).add_(value.detach(), alpha=0.1)


class Gate(Callback):
    """Notes who trains, and waits for the test."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A fit is entered."""
        note(Path(sys.argv[1]), f"entered {os.getpid()} {trainer.global_step}")

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Until the file is there."""
        [run] = [one._run for one in trainer.callbacks if isinstance(one, LastGasp)]  # type: ignore[attr-defined]
        while run is not None and trainer.global_step >= GATE and not (Path(sys.argv[1]) / "go").exists():
            run.progress("data")
            time.sleep(0.01)


def values_of(net: Net, average: Average) -> dict[str, Any]:
    """All that is kept, but for numbers that are a rank's own."""
    return {
        "count": net.count, "steps": len(net.training_step_outputs), "cleared": net.cleared, "recent": len(net.recent),
        "classes": dict(net.classes), "noise": net.noise.get_state().sum().item(), "seen": str(net.seen),
        "numbers": str(net.numbers.bit_generator.state), "running": net.running.tolist(), "calls": net.body.calls,
        "activations": len(net.body.activations), "updates": average.updates,
        "shadow": [float(value.double().sum()) for value in average.shadow.values()],
    }  # fmt: skip


def main() -> None:
    """Two epochs; the second one is short."""
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    rank, world, here = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    seed_everything(7 + rank)
    x = torch.randn(4 * STEPS * world, 8, generator=torch.Generator().manual_seed(1))
    net, average = Net(), Average()
    trainer = Trainer(
        accelerator="cpu", devices=here, num_nodes=world // here, strategy="ddp", max_steps=STEPS + 12, logger=False,
        default_root_dir=directory, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Gate(), average, LastGasp(directory)],
    )  # fmt: skip
    trainer.fit(net, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True))
    note(directory, f"left {os.getpid()} {trainer.global_step}")
    note(directory, "values " + json.dumps(values_of(net, average), sort_keys=True))
    note(directory, "own " + json.dumps([one.item() for one in net.training_step_outputs] + list(net.recent)))
    if trainer.is_global_zero:
        torch.save({name: value.clone() for name, value in net.state_dict().items()}, directory / "final.pt")


if __name__ == "__main__":
    main()
