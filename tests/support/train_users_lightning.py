"""A Lightning job as users write them: loggers, averaged weights, accumulation, schedules, workers, mixed precision.

Its `fit` can be entered again; the gate is that of `train_again_lightning`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanAbsoluteError

from lastgasp_lightning import LastGasp
from support.again_faults import kill, note
from support.train_again_lightning import Diary, loggers

SHAPES = (
    "ema", "swa", "manual", "schedule", "config", "compile", "scaler", "once", "common", "prune", "bare"
)  # fmt: skip


class Net(LightningModule):
    """One optimizer, a schedule for each step and one for each epoch; the metric is one of torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Dropout(0.3), nn.Linear(300, 1))
        self.error, self.seen, self.one_schedule, self.measures = MeanAbsoluteError(), MeanAbsoluteError(), False, False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        """Squared error on noisy inputs."""
        x, y = batch
        found = self.net(x + 0.1 * torch.randn_like(x))
        loss: Tensor = ((found - y) ** 2).mean()
        if self.measures:
            self.seen(found.detach().float(), y)
            self.log("seen", self.seen, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """A metric that is logged as an object."""
        x, y = batch
        self.error(self.net(x).float(), y)
        self.log("error", self.error)

    def configure_optimizers(self) -> Any:
        """Two schedules of one optimizer."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        by_step = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=60)
        if self.one_schedule:  # all that StochasticWeightAveraging takes
            return [optimizer], [{"scheduler": by_step, "interval": "step"}]
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, {"scheduler": by_epoch, "interval": "epoch"}]


class Manual(Net):
    """Two optimizers, which step in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        """First the critic, then the net; each schedule by hand."""
        optimizers: Any = self.optimizers()
        schedules: Any = self.lr_schedulers()
        x, y = batch
        critic = (self.critic(self.net(x).detach()) - y).square().mean()
        net = (self.net(x) - y).square().mean() + 0 * self.critic.weight.sum()
        for optimizer, loss in zip(optimizers, (critic, net), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        for schedule in schedules:
            schedule.step()
        self.log_dict({"critic": critic, "net": net}, on_step=True, sync_dist=True)
        return None

    def configure_optimizers(self) -> Any:
        """One for each part."""
        optimizers = [
            torch.optim.SGD(self.critic.parameters(), lr=0.01, momentum=0.9),
            torch.optim.AdamW(self.net.parameters(), lr=0.01),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(one, 4, 0.8) for one in optimizers]


class Two(Net):
    """Validated with two loaders; no schedule."""

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """One value for each loader."""
        x, y = batch
        self.log("error", (self.net(x).float() - y).abs().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Plain."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Data(LightningDataModule):
    """Shuffled, read by a worker that persists."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self._world, self.transferred = world, 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Counts batches of the training."""
        self.transferred += bool(self.trainer and self.trainer.training)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Its count is part of a checkpoint."""
        return {"transferred": self.transferred}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As saved."""
        self.transferred = state_dict["transferred"]

    def setup(self, stage: str) -> None:
        """Made in each process."""
        x = torch.randn(32 * self._world, 8, generator=torch.Generator().manual_seed(1))
        self._data = TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self) -> Any:
        """Eight batches for each rank."""
        return DataLoader(self._data, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)

    def val_dataloader(self) -> Any:
        """Four for each rank."""
        return DataLoader(self._data, batch_size=8)


class OwnSampler(Data):
    """Prepared once on each host, with a sampler of its own, and with two loaders for the validation."""

    prepared = 0

    def prepare_data(self) -> None:
        """As a download."""
        self.prepared += 1

    def train_dataloader(self) -> Any:
        """Lightning is told to leave the sampler alone."""
        assert self.trainer is not None
        sampler: Any = DistributedSampler(self._data, self._world, self.trainer.global_rank, seed=5)
        return DataLoader(self._data, batch_size=4, sampler=sampler)

    def val_dataloader(self) -> Any:
        """All of it on each rank, and a part."""
        return [DataLoader(self._data, batch_size=8), DataLoader(TensorDataset(*self._data[:9]), batch_size=3)]


class Counter(Callback):
    """A user's own callback, whose numbers are its state; they are alike on all ranks, as in any of Lightning's."""

    def __init__(self) -> None:
        self.batches, self.places = 0, 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Each batch counts once."""
        self.batches, self.places = self.batches + 1, self.places + batch_idx

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {"batches": self.batches, "places": self.places}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As saved."""
        self.batches, self.places = state_dict["batches"], state_dict["places"]


class Once(Callback):
    """Meets the other ranks in its first fit alone: a new process waits where the others do not come."""

    met = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As it may be done to look at the data together."""
        if not self.met:
            trainer.strategy.broadcast({"numbers": list(range(1000))})
        self.met = True


class Body(nn.Sequential):
    """What torch.compile compiles: frames of torch.nn alone are left as they are."""

    def forward(self, x: Tensor) -> Tensor:
        """In turn."""
        for part in self:
            x = part(x)
        return x


class Kills(Callback):
    """The faults of a compiled module: the hooks of the test kit in the model would be in its graphs."""

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Rank 1, and then rank 0."""
        now = trainer.global_rank, trainer.global_step, os.environ.get("LASTGASP_INCARNATION")
        if "TEST_KILLS" in os.environ and now in ((1, 6, None), (0, 10, "1")):
            kill(os.getpid())


class Parser:
    """What LightningCLI's callback needs of its parser; the real one is not among what the tests install."""

    def save(self, config: Any, path: str, **options: Any) -> None:
        """As a file."""
        Path(path).write_text(f"{config}\n")


OTHERS: dict[str, Any] = {
    "once": lambda: [Once()],
    "compile": lambda: [Kills()],
    "prune": lambda: [ModelPruning("l1_unstructured", amount=0.1)],
    "common": lambda: [TQDMProgressBar(refresh_rate=3), ModelSummary(max_depth=2)],
}
"""Callbacks of a shape."""


def averages(shape: str, args: argparse.Namespace) -> list[Callback]:
    """What the shape adds."""
    if shape == "config":
        parser: Any = Parser()
        return [SaveConfigCallback(parser, parser), RichProgressBar(), OnExceptionCheckpoint(args.dir / "raised")]
    if shape == "scaler":
        return [Counter(), Timer("00:01:00:00", interval="step")]
    if shape in OTHERS:
        return list(OTHERS[shape]())
    if shape == "ema":
        return [EMAWeightAveraging(decay=0.9)]
    if shape == "swa":
        return [StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1)]
    return [GradientAccumulationScheduler({0: 1, 1: 2})] if shape == "schedule" else []


def trainer_of(args: argparse.Namespace, world: int) -> Trainer:
    """As the shape has it; four epochs."""
    shape, ours, written = args.shape, LastGasp(args.dir), loggers(args.dir / "logs", args.board)
    saves = ModelCheckpoint(every_n_train_steps=4, save_last=True, save_top_k=2, monitor="step", mode="max")
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3))
    if shape in ("config", "common"):
        written.append(CSVLogger(args.dir / "logs/named", name="other"))
    more: dict[str, Any] = {"plugins": scaled} if shape == "scaler" else {"precision": "bf16-mixed"}
    if shape == "common":
        more |= {"use_distributed_sampler": False, "profiler": "simple", "reload_dataloaders_every_n_epochs": 1}
    unused = shape in ("manual", "common")
    return Trainer(
        accelerator="cpu", devices=world, strategy="ddp_find_unused_parameters_true" if unused else "ddp", max_epochs=4,
        val_check_interval=0.25 if shape == "common" else 0.5,
        accumulate_grad_batches=2 if shape in ("ema", "swa", "scaler") else 1,
        log_every_n_steps=1, enable_model_summary=shape == "config", default_root_dir=args.dir,
        limit_train_batches={"config": 6, "common": 0.75}.get(shape), max_time="00:02:00:00",
        gradient_clip_val=None if shape == "manual" else 1.0, logger=written,
        callbacks=[Diary(args, ours), LearningRateMonitor(), *averages(shape, args), saves, ours], **more,
    )  # fmt: skip


def bare(args: argparse.Namespace, world: int) -> Trainer:
    """Without all that can be left out."""
    ours = LastGasp(args.dir)
    return Trainer(
        barebones=True, accelerator="cpu", devices=world, strategy="ddp", max_epochs=4, default_root_dir=args.dir,
        callbacks=[Diary(args, ours), ours],
    )  # fmt: skip


def main() -> None:
    """Train it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--shape", required=True, choices=SHAPES)
    parser.add_argument("--board", action="store_true")
    args = parser.parse_args()
    for name, value in {"stopped": False, "dies": "", "ends": False, "stuck": False}.items():  # for the diary
        setattr(args, name, value)
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seed_everything(7 + rank, workers=True)
    model: Net = {"manual": Manual, "common": Two, "bare": Two}.get(args.shape, Net)()
    model.one_schedule, model.measures = args.shape == "swa", args.shape == "config"
    data = OwnSampler(world) if args.shape == "common" else Data(world)
    trainer = bare(args, world) if args.shape == "bare" else trainer_of(args, world)
    if args.shape == "compile":  # torch 2.13 fails on self.log; with dynamic shapes bits depend on earlier ones
        model.net = Body(*model.net)
        model.net.compile(dynamic=False)
    trainer.fit(model, datamodule=data)
    if args.shape == "compile":
        assert sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"] > 0
    note(args.dir, f"left {os.getpid()} {trainer.global_step}")
    note(args.dir, "kept " + json.dumps(kept(trainer, data, args.dir), sort_keys=True, default=str))
    if trainer.is_global_zero:
        torch.save({name: value.clone() for name, value in model.state_dict().items()}, args.dir / "final.pt")


def kept(trainer: Trainer, data: Data, directory: Path) -> dict[str, Any]:
    """What is left of callbacks, data and precision; times are not."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    found = {type(one).__name__: one.state_dict() for one in callbacks}
    found = {name: state for name, state in found.items() if state and name != "Timer"}
    found |= {"data": data.state_dict(), "precision": trainer.precision_plugin.state_dict()}
    text: dict[str, Any] = json.loads(json.dumps(found, default=str).replace(str(directory), ""))
    return text


if __name__ == "__main__":
    main()
