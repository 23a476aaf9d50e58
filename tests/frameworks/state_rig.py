"""A small, thoroughly random training run, a fault at any of its moments, and the comparison with no fault."""

from __future__ import annotations

import gc
import random
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from frameworks.loop_rig import Masters
from frameworks.test_loop_schedulers import WarmUp
from lastgasp.errors import NotSaveable
from lastgasp.pytorch.owncopy import schedule_of
from lastgasp_lightning.boundary import reorder
from lastgasp_lightning.resume import Resume
from lastgasp_lightning.state import LightningState
from lastgasp_lightning.thisfit import ThisFit

SIZE, BATCH, FEATURES = 22, 4, 5


class Boom(Exception):
    """The injected fault."""


@dataclass
class Fault:
    """Strike at the `nth` time (from 1) that `moment` comes; `dump` from a thread first when `live`."""

    moment: str
    nth: int
    live: bool = False


@dataclass
class Run:
    """One run: how it is configured, and what it left."""

    directory: Path
    trainer_args: dict[str, Any] = field(default_factory=dict)
    module_args: dict[str, Any] = field(default_factory=dict)
    loader: Callable[[], Any] | None = None
    callbacks: Callable[[], list[L.Callback]] = list
    fault: Fault | None = None
    resume_from: Path | None = None


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Each item draws from Python's, numpy's and torch's generator of the process that loads it."""

    def __init__(self, size: int = SIZE, noise: bool = True) -> None:
        self.size, self.noise = size, noise
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, FEATURES, generator=generator)
        self.hook: Callable[[str], None] = lambda moment: None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.hook("data")
        x = self.x[index]
        if self.noise:
            x = x + 0.1 * random.random() + 0.1 * float(np.random.randn()) + 0.1 * torch.randn(FEATURES)
        return x, x.sum().reshape(1)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Shuffles with the global generator when it starts; optionally without a length."""

    def __init__(self, noise: bool = True, size: int = SIZE) -> None:
        self.items = Noisy(size, noise)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = torch.utils.data.get_worker_info()
        order = torch.randperm(len(self.items)).tolist()
        if info is not None:
            order = [i for i in range(len(self.items)) if i % info.num_workers == info.id]
        for index in order:
            yield self.items[index]


class Stateful:
    """A loader that knows its own position, with or without a length."""

    def __init__(self) -> None:
        self.position = 0
        self.items = Noisy(SIZE)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.position < 6:
            at = self.position
            self.position += 1
            pairs = [self.items[(at * 3 + i) % SIZE] for i in range(3)]
            yield torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Pairs:
    """A plain sized iterable. (Lightning takes a bare list for a collection of loaders.)"""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.pairs = [(torch.randn(3, FEATURES, generator=generator), torch.ones(3, 1)) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.pairs)


class SizedStateful(Stateful):
    def __len__(self) -> int:
        return 6


class Model(L.LightningModule):
    """BatchNorm, dropout, logging at step and epoch; hooks report every moment to `strike`."""

    def __init__(self, schedulers: str = "none", manual: bool = False, optimizer: str = "adam") -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.second = nn.Linear(8, 1)
        self.kind, self.optimizer_kind = schedulers, optimizer
        self.automatic_optimization = not manual
        self.losses: dict[int, float] = {}
        self.strike: Callable[[str], None] = lambda moment: None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch if isinstance(batch[0], (list, tuple)) else [batch]
        loss = torch.stack([nn.functional.mse_loss(self(x), y) for x, y in parts]).mean()
        self.strike("forward")
        self.losses[self.trainer.fit_loop.epoch_loop.total_batch_idx] = float(loss)
        self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=len(parts[0][0]))
        if not self.automatic_optimization:
            return self._manual(loss)
        return loss

    def _manual(self, loss: Tensor) -> None:
        optimizers: Any = self.optimizers()
        one, two = optimizers
        one.zero_grad(), two.zero_grad()
        self.manual_backward(loss)
        one.step()
        self.strike("between_optimizers")
        if random.random() < 2:
            two.step()
        self.strike("after_manual")

    def on_after_backward(self) -> None:
        self.strike("backward")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.strike("validation")
        loss = nn.functional.mse_loss(self(x + 0.01 * torch.randn_like(x)), y)
        self.log("val_loss", loss, sync_dist=True)

    def on_validation_end(self) -> None:
        self.strike("validation_end")

    def on_train_epoch_end(self) -> None:
        self.strike("epoch_end")

    def on_train_epoch_start(self) -> None:
        torch.rand(1)
        self.strike("epoch_start")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.strike("scheduler")
        super().lr_scheduler_step(scheduler, metric)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.strike("after_update")

    def configure_optimizers(self) -> Any:
        if not self.automatic_optimization:
            return [
                torch.optim.Adam(self.first.parameters(), lr=0.01),
                torch.optim.SGD(self.second.parameters(), lr=0.01, momentum=0.9),
            ]
        if self.optimizer_kind == "masters":
            return Masters(self.parameters())
        optimizer = StrikingAdam(self.parameters(), lr=0.02)
        optimizer.strike = self.strike_late
        return {"optimizer": optimizer, **self._scheduler(optimizer)}

    def strike_late(self, moment: str) -> None:
        self.strike(moment)

    def _scheduler(self, optimizer: Any) -> dict[str, Any]:
        schedulers = torch.optim.lr_scheduler
        if self.kind == "step":
            return {"lr_scheduler": {"scheduler": schedulers.StepLR(optimizer, 2, 0.7), "interval": "step"}}
        if self.kind == "onecycle":
            one = schedulers.OneCycleLR(optimizer, 0.05, total_steps=200)
            return {"lr_scheduler": {"scheduler": one, "interval": "step"}}
        if self.kind == "warm_up":
            then = WarmUp(optimizer, 3, schedulers.ExponentialLR(optimizer, 0.8))
            then.after.model = self
            return {"lr_scheduler": {"scheduler": then, "interval": "step"}}
        if self.kind == "epoch":
            return {"lr_scheduler": schedulers.ExponentialLR(optimizer, 0.5)}
        if self.kind in ("plateau", "plateau_train"):
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.9)
            monitor = "val_loss" if self.kind == "plateau" else "train_loss_epoch"
            return {"lr_scheduler": {"scheduler": plateau, "monitor": monitor}}
        if self.kind == "plateau_step":
            plateau = schedulers.ReduceLROnPlateau(optimizer, patience=1, factor=0.9, threshold=0.9)
            return {"lr_scheduler": {"scheduler": plateau, "monitor": "train_loss", "interval": "step"}}
        return {}


class StrikingAdam(torch.optim.Adam):
    """Adam that may be struck in the middle of its update."""

    strike: Callable[[str], None]

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        out = super()._init_group(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.strike("inside_update")
        return out


class Before(L.Callback):
    """An ordinary callback that may raise in on_train_batch_end, and has a state."""

    def __init__(self) -> None:
        self.batches = self.epochs = 0
        self.strike: Callable[[str], None] = lambda moment: None

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1
        self.strike("batch_end")

    def on_train_epoch_end(self, *args: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches, self.epochs = state_dict["batches"], state_dict["epochs"]


class Harness(L.Callback):
    """What the real callback does, plus the fault."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.count = 0
        self.moments: Counter[str] = Counter()
        self.saved: Path | None = None
        self.step: int | None = None
        self.refused = ""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        reorder(trainer, self)
        self.trainer = trainer
        self.state = LightningState(trainer, ThisFit(trainer, Path(trainer.default_root_dir)))
        self.resume = Resume(self.state)
        self.state.prepare()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.resume.install(trainer, checkpoint)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.state.install()

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.state.before_update()

    def on_train_batch_end(self, *args: Any) -> None:
        self.state.boundary()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.state.annotate(checkpoint)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.saved is None and isinstance(exception, Boom) and not self.refused:
            if self.state.finish_step():
                self.in_thread()
            else:
                self.refused = "finish_step"
        self.state.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.state.close()

    def strike(self, moment: str) -> None:
        fault = self.run.fault
        if self.trainer.sanity_checking:
            return
        self.moments[moment] += 1
        if fault is None or moment != fault.moment:
            return
        self.count += 1
        if self.count == fault.nth:
            if fault.live:
                self.in_thread()
            raise Boom(moment)

    def in_thread(self) -> None:
        thread = threading.Thread(target=self.dump)
        thread.start()
        thread.join()

    def dump(self) -> None:
        try:
            self.step = self.state.snapshot.step if self.state.snapshot is not None else 0
            checkpoint = self.state.dump(self.step)
        except NotSaveable as error:
            self.refused = str(error)
            return
        self.saved = self.run.directory / "gasp.ckpt"
        torch.save(checkpoint, self.saved)


@dataclass
class Outcome:
    """What a run left, in a form that compares bit for bit."""

    harness: Harness
    model: Model
    trainer: Any
    crashed: bool

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.trainer.optimizers],
            "schedulers": [schedule_of(c.scheduler) for c in self.trainer.lr_scheduler_configs],
            "callbacks": [
                c.state_dict()
                for c in self.trainer.callbacks
                if isinstance(c, (Before, L.pytorch.callbacks.EarlyStopping))
            ],
            "step": self.trainer.global_step,
            "epoch": self.trainer.current_epoch,
            "rng": (random.getstate(), torch.get_rng_state(), tuple(np.random.get_state())[1:]),
            "batches_that_stepped": self.trainer.fit_loop.epoch_loop._batches_that_stepped,
        }


def execute(run: Run) -> Outcome:
    """Train as `run` says; a Boom ends it."""
    # not seed_everything: it leaves environment variables behind
    random.seed(11), np.random.seed(11), torch.manual_seed(11)
    model = Model(**run.module_args)
    harness, before = Harness(run), Before()
    model.strike = before.strike = harness.strike
    arguments: dict[str, Any] = {"max_epochs": 3, "logger": False, "enable_checkpointing": False, **run.trainer_args}
    trainer = L.Trainer(
        callbacks=[harness, before, *run.callbacks()],
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.directory,
        **arguments,
    )
    loader = run.loader() if run.loader is not None else DataLoader(Noisy(), BATCH, shuffle=True)
    for part in loader if isinstance(loader, list) and isinstance(loader[0], DataLoader) else [loader]:
        dataset = getattr(part, "dataset", None)
        if isinstance(dataset, Noisy) and part.num_workers == 0:
            dataset.hook = harness.strike
    crashed = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(
                model,
                loader,
                DataLoader(Noisy(6, noise=False), 3),
                ckpt_path=str(run.resume_from) if run.resume_from else None,
                weights_only=False,
            )
        except Boom:
            crashed = True
    if crashed:
        # after an exception in validation Lightning tears only the validation loop down
        trainer.fit_loop.teardown()
        gc.collect()  # the traceback held the loader's iterator, and with it its workers
    return Outcome(harness, model, trainer, crashed)


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested values differ, bit for bit."""
    if isinstance(a, Tensor):
        return [] if isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b) else [path]
    if isinstance(a, np.ndarray):
        return [] if np.array_equal(a, b) else [path]
    if isinstance(a, torch.optim.lr_scheduler.LRScheduler):
        return differences(vars(a), vars(b), path)
    if isinstance(a, dict):
        if not isinstance(b, dict) or a.keys() != b.keys():
            return [f"{path} keys"]
        return [d for k in a for d in differences(a[k], b[k], f"{path}.{k}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path} length"]
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}[{i}]")]
    return [] if a == b or callable(a) else [f"{path}: {a!r} != {b!r}"]
