"""Lightning jobs of the shapes that users' scripts have: adversaries, folds, a tuner, workers, mixed precision.

All of them log, into `logs` beside the final weights.

A fault is the script's own where `LASTGASP_FAULT` cannot name the moment: `--kill RANK,FIT,STEP` ends that rank, in the
first attempt, at the last optimizer's update of the batch that begins at that step of that fit.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from lastgasp_lightning import LastGasp


class Dying(torch.optim.Adam):
    """Adam that may end its process when it is about to change parameters."""

    when: Any = staticmethod(lambda: None)

    def _init_group(self, *args: Any, **options: Any) -> Any:
        self.when()
        return super()._init_group(*args, **options)  # type: ignore[no-untyped-call]


class Net(LightningModule):
    """Automatic optimization, with what makes a resume hard."""

    def __init__(self, kill: tuple[int, int, int] | None, fit: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1))
        self.kill, self.fit, self.lr = kill, fit, 0.01
        self.begun, self.armed, self.meet = 0, True, Path()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Remember where the batch begins."""
        self.begun = self.trainer.global_step

    def due(self) -> bool:
        """Whether this is the moment of the fault, and this rank the one; then the others have all gradients, too."""
        attempt = int(os.environ.get("LASTGASP_ATTEMPT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        if not self.armed or self.kill is None or self.kill[1:] != (self.fit, self.begun) or attempt:
            return False
        (self.meet / f"passed-{self.global_rank}").touch()
        if self.kill[0] != self.global_rank:
            return False
        end = time.monotonic() + 60.0
        while len(list(self.meet.glob("passed-*"))) < self.trainer.world_size and time.monotonic() < end:
            time.sleep(0.01)
        return True

    def die(self) -> None:
        """If it is time."""
        if self.due():
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        """Squared error on noisy inputs."""
        x, y = batch
        loss = ((self.net(x + 0.1 * random.random() * torch.randn_like(x)) - y) ** 2).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        """One that may die."""
        optimizer = Dying(self.parameters(), lr=self.lr)
        optimizer.when = self.die
        return optimizer


class Gan(Net):
    """As Lightning's own example: two optimizers, toggled, each with a forward pass of its own."""

    def __init__(self, kill: tuple[int, int, int] | None, fit: int = 0) -> None:
        super().__init__(kill, fit)
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """First the judge, then the generator, whose forward pass changes the statistics of both."""
        optimizers: Any = self.optimizers()
        judges, makes = optimizers
        x, y = batch
        for optimizer, wanted in ((judges, 0.0), (makes, 1.0)):
            self.toggle_optimizer(optimizer)
            made = self.judge(self.net(x + 0.1 * torch.randn_like(x)))
            real = self.judge(y) if wanted == 0.0 else torch.ones_like(made)
            loss = ((made - wanted) ** 2).mean() + ((real - 1.0) ** 2).mean()
            self.log(f"loss_{wanted:g}", loss)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        """The second one may die."""
        makes = Dying(self.net.parameters(), lr=self.lr)
        makes.when = self.die
        return [torch.optim.Adam(self.judge.parameters(), lr=self.lr), makes]


class Overflowing(Net):
    """Gradients in half precision that overflow at first: a scaler that begins too high skips these updates."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """A skipped update never comes to the optimizer, so the rank dies here."""
        if self.due():
            assert torch.stack([p.grad.isinf().any() | p.grad.isnan().any() for p in self.parameters()]).any()  # type: ignore[union-attr]
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        """With what the scaler has come to; behind the update a rank that dies in it would not have logged it."""
        self.log("scale", self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx)


def loggers(folder: Path) -> list[Any]:
    """Those that can be continued; TensorBoard's where it is installed."""
    board = importlib.util.find_spec("tensorboard") is not None
    return [CSVLogger(folder / "table"), *([TensorBoardLogger(str(folder / "board"))] if board else [])]


def model_of(shape: str, kill: tuple[int, int, int] | None, fit: int) -> Net:
    """What is trained."""
    return {"gan": Gan, "fp16": Overflowing}.get(shape, Net)(kill, fit)


def precision(shape: str) -> dict[str, Any]:
    """Lightning takes bfloat16 for half precision on CPUs, unless it is given the plugin."""
    if shape == "fp16":
        return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24))]}
    return {"precision": "bf16-mixed" if shape == "bf16" else "32-true"}


def main() -> None:
    """Train as `--shape` says."""
    parser = argparse.ArgumentParser()
    shapes = ("plain", "gan", "folds", "sweep", "tuner", "workers", "bf16", "fp16")
    parser.add_argument("--shape", choices=shapes, required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--final", type=Path, required=True)
    parser.add_argument("--kill", type=lambda text: tuple(map(int, text.split(","))), default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(7 + 1000 * int(os.environ.get("LOCAL_RANK", "0")))
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    strategy = "ddp_find_unused_parameters_true" if args.shape == "gan" else "ddp"
    found = []
    for fit in range(2 if args.shape in ("folds", "sweep") else 1):
        model = model_of(args.shape, args.kill, fit)
        model.meet = args.final.parent
        part = Subset(data, [i for i in range(48) if i % 3 != fit]) if args.shape == "folds" else data
        loader = DataLoader(part, 4, shuffle=True, num_workers=2 if args.shape == "workers" else 0)
        callbacks: list[Any] = [LastGasp(args.dir)]
        if args.shape == "sweep":  # nothing tells the fits apart but where they have their gasps
            callbacks = [LastGasp(f"{args.dir}/{fit}"), ModelCheckpoint(f"{args.dir}/shared")]
        trainer = Trainer(
            accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, enable_progress_bar=False,
            logger=loggers(args.final.parent / "logs"), log_every_n_steps=1, default_root_dir=args.final.parent,
            enable_model_summary=False, enable_checkpointing=args.shape == "sweep", callbacks=callbacks,
            **precision(args.shape),
        )  # fmt: skip
        if args.shape == "tuner":
            model.armed = False
            Tuner(trainer).lr_find(model, loader, num_training=30, update_attr=True)
            model.armed = True
        trainer.fit(model, loader)
        found.append(model.state_dict())
    if trainer.is_global_zero:
        final = {f"{n}.{name}": value.clone() for n, state in enumerate(found) for name, value in state.items()}
        torch.save(final, args.final)


if __name__ == "__main__":
    main()
