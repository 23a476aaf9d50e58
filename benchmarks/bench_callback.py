"""What LastGasp costs per Lightning step: CPU time of the training thread, against no callback and an empty one.

Each sample is a `fit` of its own, on one process; the clock runs between two calls of `training_step` after a
warm-up, so that starting and resuming are not in it. The three kinds of fit take turns; the median is taken
over the differences within a round.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Measure, Options, interleave
from lastgasp_lightning import LastGasp

ROUNDS, STEPS, WARM_UP = 21, 1500, 100
TARGET_US = 25.0


@dataclass(frozen=True)
class Shape:
    """What the training does besides the bare minimum."""

    name: str
    typical: bool


SHAPES = (
    Shape("bare (linear, SGD)", typical=False),
    Shape("typical (batch norm, AdamW, schedule per step, self.log)", typical=True),
)


class Timed(LightningModule):
    """A model so small that a step is almost only Lightning. Notes the time in two of its steps."""

    def __init__(self, shape: Shape, steps: int, warm_up: int) -> None:
        super().__init__()
        self.shape, self.ends = shape, (warm_up, warm_up + steps)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) if shape.typical else nn.Linear(4, 1)
        self.wall_ns, self.cpu_ns = list[int](), list[int]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean of the outputs."""
        if batch_idx in self.ends:
            self.wall_ns.append(time.perf_counter_ns())
            self.cpu_ns.append(time.thread_time_ns())
        loss: Tensor = self.net(batch[0]).mean()
        if self.shape.typical:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """As the shape says."""
        if not self.shape.typical:
            return torch.optim.SGD(self.parameters(), lr=1e-3)
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Empty(Callback):
    """What any callback costs (facts/lightning.md: about 10 us)."""


def measure(options: Options) -> list[Measure]:
    """CPU and wall time per step, net of no callback."""
    rounds, steps, warm_up = (2, 30, 5) if options.quick else (ROUNDS, STEPS, WARM_UP)
    torch.set_num_threads(1)
    measures = []
    for shape in SHAPES:
        bench = _Fits(shape, steps, warm_up, options.folder)
        variants: dict[str, Callable[[], float]] = {
            "none": lambda bench=bench: bench.fit([]),  # type: ignore[misc]
            "empty": lambda bench=bench: bench.fit([Empty()]),  # type: ignore[misc]
            "lastgasp": lambda bench=bench: bench.fit([LastGasp(bench.fresh())]),  # type: ignore[misc]
        }
        cpu = interleave(variants, rounds)
        measures += bench.report(cpu)
    return measures


class _Fits:
    """Fits of one shape; remembers wall times beside the CPU times that it returns, both in us per step."""

    def __init__(self, shape: Shape, steps: int, warm_up: int, folder: Path) -> None:
        self.shape, self.steps, self.warm_up, self.folder = shape, steps, warm_up, folder
        self.wall: dict[str, list[float]] = {"none": [], "empty": [], "lastgasp": []}
        self._number = 0

    def fresh(self) -> Path:
        """A directory that no earlier fit has used."""
        self._number += 1
        return self.folder / f"{self.shape.typical}-{self._number}"

    def fit(self, callbacks: list[Callback]) -> float:
        """CPU time per step, us."""
        seed_everything(1, verbose=False)
        model, total = Timed(self.shape, self.steps, self.warm_up), self.warm_up + self.steps + 1
        data = DataLoader(TensorDataset(torch.randn(4 * total, 4)), batch_size=4, shuffle=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _trainer(total, callbacks).fit(model, data)
        name = {Empty: "empty", LastGasp: "lastgasp"}[type(callbacks[0])] if callbacks else "none"
        self.wall[name].append((model.wall_ns[1] - model.wall_ns[0]) / 1e3 / self.steps)
        return (model.cpu_ns[1] - model.cpu_ns[0]) / 1e3 / self.steps

    def report(self, cpu: dict[str, list[float]]) -> list[Measure]:
        """The step itself, and what each callback adds to it."""
        name = self.shape.name
        return [
            Measure(name=f"{name}: step without a callback, CPU", unit="us", samples=cpu["none"]),
            Measure(name=f"{name}: an empty callback adds, CPU", unit="us", samples=_more(cpu, "empty")),
            Measure(name=f"{name}: LastGasp adds, CPU", unit="us", samples=_more(cpu, "lastgasp"), target=TARGET_US),
            Measure(name=f"{name}: LastGasp adds, wall", unit="us", samples=_more(self.wall, "lastgasp")),
        ]


def _more(samples: dict[str, list[float]], name: str) -> list[float]:
    return [a - b for a, b in zip(samples[name], samples["none"], strict=True)]


def _trainer(total: int, callbacks: list[Callback]) -> Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return Trainer(
        accelerator="cpu", devices=1, max_epochs=1, max_steps=total, callbacks=callbacks, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
