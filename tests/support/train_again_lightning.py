"""A Lightning job whose `fit` can be entered again: loggers, checkpoints, validation, and what makes a resume hard."""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset
from torchmetrics.classification import BinaryAccuracy

from lastgasp.adapter import AdapterRun
from lastgasp.pytorch.loop import again_here
from lastgasp_lightning import LastGasp
from support import again_faults, card
from support.again_faults import note

GATE = 5
"""Completed steps after which the ranks wait for the file `go`: faults come behind it."""
STEPS = 14
_optimizers: list[weakref.ref[Any]] = []
LINGER = 15.0
"""Seconds that a thread may take to end; a rank that does not enter again in 40 s is given up."""


class Net(LightningModule):
    """Draws from all three random generators; wide enough that DDP rebuilds its buckets after the first step."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.net = nn.Sequential(
                nn.Linear(8, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Dropout(0.3), nn.Linear(600, 1)
            )
        self.right = BinaryAccuracy()
        self.given: list[Callback] = []

    def configure_callbacks(self) -> list[Callback]:
        """As some modules do."""
        return self.given

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Squared error on noisy inputs."""
        x, y = batch
        noise = random.random() * 0.1 + float(np.random.rand()) * 0.1
        found = self.net(x + noise * torch.randn_like(x))
        loss: Tensor = ((found - y) ** 2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        if card.KIND != "cuda":  # there they are left out
            self.right(found > 0, y > 0)
            self.log("right", self.right, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """What ModelCheckpoint and EarlyStopping look at."""
        x, y = batch
        self.log("error", ((self.net(x) - y) ** 2).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """AdamW and a schedule for each step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6, 10], 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def held() -> list[int]:
    """Descriptors and threads of this process."""
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]


def held_more(before: list[int]) -> bool:
    """Whether there are more than `before`, if that is known."""
    return any(now > then for then, now in zip(before, held(), strict=False))


class Entered:
    """What this process knows of its entries; values of a callback would be put back."""

    entries = 0
    held: list[int]


ENTERED = Entered()
ENTERED.held = []


class Diary(Callback):
    """Notes who trains, holds the ranks at the gate, and brings a second fault where the test wants one."""

    def __init__(self, args: argparse.Namespace, ours: LastGasp) -> None:
        self._directory, self._ours, self._stopped, self._dies = args.dir, ours, args.stopped, args.dies
        self._ends, self._stuck = args.ends, args.stuck

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The process group is there; ours has not connected yet. What trained before is gone: it takes memory."""
        gc.collect()
        assert all(one() is None for one in _optimizers), "the optimizers of the entry before are in memory still"
        if (os.environ["RANK"], os.environ.get("LASTGASP_INCARNATION")) == (self._dies, "1"):
            note(self._directory, f"died {os.getpid()}")
            os.kill(os.getpid(), signal.SIGKILL)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Also between two entries, when no session takes SIGTERM."""
        first = os.environ["LASTGASP_ATTEMPT"] == "0" and "LASTGASP_INCARNATION" not in os.environ
        if self._stopped and first and trainer.global_step < STEPS:
            signal.raise_signal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A fit is entered; what is held then must not grow with the entries after this process's second one."""
        deadline = time.monotonic() + LINGER
        while (more := held_more(ENTERED.held)) and time.monotonic() < deadline:  # a thread may be ending
            time.sleep(0.05)
        _optimizers[:] = [weakref.ref(one) for one in trainer.optimizers]
        ENTERED.entries += 1
        if ENTERED.entries > 1:
            ENTERED.held = ENTERED.held or held()
            note(self._directory, f"more {more}")
        note(self._directory, f"entered {os.getpid()} {trainer.global_step}")

        if self._ends and "LASTGASP_INCARNATION" not in os.environ:
            ends(self._directory, trainer)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Faults come once the test says so."""
        run = self._ours._run
        while run is not None and trainer.global_step >= GATE and not (self._directory / "go").exists():
            run.progress("data")
            time.sleep(0.01)
        first = (os.environ["LASTGASP_ATTEMPT"], os.environ.get("LASTGASP_INCARNATION")) == ("0", None)
        if self._stuck and first and trainer.global_rank and trainer.global_step == 8:
            time.sleep(10 * again_faults.PATIENCE)
        again_faults.at("first step")
        again_faults.device_fault(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The fit is over."""
        _optimizers.clear()
        note(self._directory, f"ended {os.getpid()} {trainer.global_step}")


def ends(directory: Path, trainer: Trainer) -> None:
    """Behind its last epoch rank 1 raises, once rank 0 is about to say that its training has ended.

    Rank 0 says so when it has heard of a fault, and not yet what follows from it.
    """
    ended, deadline = directory / "ends", time.monotonic() + 10 * again_faults.PATIENCE
    done, said = trainer.fit_loop.on_iteration_done, AdapterRun.finish

    def iteration_done() -> None:
        done()
        while trainer.global_step >= STEPS and time.monotonic() < deadline:
            if ended.exists():
                raise RuntimeError("a rank fails behind its last epoch")
            time.sleep(0.001)

    def finish(run: AdapterRun) -> None:
        AdapterRun.finish = said  # type: ignore[method-assign]
        ended.touch()
        while not run.session.status.held and time.monotonic() < deadline:
            time.sleep(0.001)
        said(run)

    if trainer.global_rank == 1:
        trainer.fit_loop.on_iteration_done = iteration_done  # type: ignore[method-assign]
    else:
        AdapterRun.finish = finish  # type: ignore[method-assign,assignment]


def loggers(folder: Path, board: bool) -> list[Any]:
    """Those that can be continued."""
    return [CSVLogger(folder / "table"), *([TensorBoardLogger(str(folder / "board"))] if board else [])]


def callbacks_of(args: argparse.Namespace, ours: LastGasp) -> list[Callback]:
    """Ours and Lightning's."""
    saves = ModelCheckpoint(monitor="error", save_top_k=2, filename="{step}", save_last=True)
    found = [Diary(args, ours), *([] if args.configured else [ours]), saves, LearningRateMonitor()]
    return [*found, EarlyStopping("error", patience=2, min_delta=10.0)] if args.stop else found


class Counting(Sampler[int]):
    """Another order in each pass, by a count of its own."""

    def __init__(self, size: int) -> None:
        self._size, self._passes = size, 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        self._passes += 1
        yield from torch.randperm(self._size, generator=torch.Generator().manual_seed(self._passes)).tolist()


def data_of(args: argparse.Namespace, rank: int, world: int) -> tuple[Dataset[Any], Any]:
    """The data, and what `fit` is given of it; of other loaders than a usual one all steps are in one epoch."""
    epochs = 4 if args.loader else 1
    x = torch.randn(4 * 5 * world * args.accumulate * epochs, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    if args.loader == "generator":
        return data, (data[4 * part : 4 * part + 4] for part in range(rank, len(data) // 4, world))
    if args.loader == "counting":
        return data, DataLoader(data, batch_size=4, sampler=Counting(len(data)))
    return data, DataLoader(data, batch_size=4, shuffle=True)


def main() -> None:
    """Fourteen steps, validation every third batch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--stop", action="store_true", help="EarlyStopping ends it sooner")
    parser.add_argument("--board", action="store_true", help="logs with TensorBoard, too")
    parser.add_argument("--stopped", action="store_true", help="SIGTERM comes between two entries of fit")
    parser.add_argument("--dies", default="", help="this rank is killed in setup when fit is entered again")
    parser.add_argument("--ends", action="store_true", help="a rank fails when another one has ended its training")
    parser.add_argument("--stuck", action="store_true", help="a callback of all ranks but the first does not return")
    parser.add_argument("--full", action="store_true", help="the host has no memory left for copies of the state")
    parser.add_argument("--twice", action="store_true", help="a short fit of another trainer comes before")
    parser.add_argument("--configured", action="store_true", help="the module gives LastGasp to its trainer")
    parser.add_argument("--loader", choices=("generator", "counting"), help="one that does not begin again as it did")
    parser.add_argument("--validate", action="store_true", help="before fit, so that ranks have met before")
    args = parser.parse_args()
    torch.set_num_threads(1)
    card.one_card()
    again_faults.install(args.dir)
    if args.full:
        vars(again_here)["available"] = lambda: 1000
    rank, world, here = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    seed_everything(7 + 1000 * rank)
    data, loader = data_of(args, rank, world)
    model, ours = Net(), LastGasp(args.dir)
    if args.configured:
        model.given = [ours]
    trainer = Trainer(
        **card.trainer(here, world // here), strategy="ddp", max_steps=STEPS, max_epochs=-1,
        val_check_interval=3,
        accumulate_grad_batches=args.accumulate, log_every_n_steps=1, enable_model_summary=False,
        default_root_dir=args.dir, logger=loggers(args.dir / "logs", args.board),
        callbacks=callbacks_of(args, ours),
    )  # fmt: skip
    if args.twice:
        Trainer(
            **card.trainer(here, world // here), strategy="ddp", callbacks=[LastGasp(args.dir)],
            max_steps=2, logger=False, enable_checkpointing=False, enable_model_summary=False,
        ).fit(Net(), DataLoader(data, batch_size=4))  # fmt: skip
    if args.validate:
        trainer.validate(model, DataLoader(data, batch_size=8), verbose=False)
    trainer.fit(model, loader, DataLoader(data, batch_size=8))
    note(args.dir, f"left {os.getpid()} {trainer.global_step}")
    if trainer.is_global_zero:
        torch.save({name: value.clone() for name, value in model.state_dict().items()}, args.dir / "final.pt")
    trainer.validate(model, DataLoader(data, batch_size=8), verbose=False)


if __name__ == "__main__":
    main()
