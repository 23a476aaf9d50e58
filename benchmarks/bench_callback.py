"""What LastGasp costs per Lightning step: CPU time of the training thread, against no callback and an empty one.

Three fits run at once, each in a process of its own, and hand the turn on after every block of steps, so that
whatever the machine does meanwhile hits all of them; only the one whose turn it is runs. The clock is that of
the training thread. The median is taken over the differences between neighbouring blocks. The typical fit captures what
each rank of a job of several ranks does.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Measure, Options
from lastgasp_lightning import LastGasp

ROUNDS, BLOCK, WARM_UP = 150, 40, 80
"""Blocks of each, steps of a block, and steps before the first one."""
LIMIT = 300.0
"""Seconds that a fit waits for its turn."""
KINDS = ("none", "empty", "lastgasp")
Times = tuple[list[float], list[float]]
"""CPU and wall time of each block, us per step."""


@dataclass(frozen=True)
class Shape:
    """What the training does besides the bare minimum."""

    name: str
    typical: bool
    target_us: float


SHAPES = (
    Shape("bare (linear, SGD)", typical=False, target_us=30.0),
    Shape("typical (batch norm, AdamW, schedule, self.log)", typical=True, target_us=40.0),
)


@dataclass
class Lane:
    """One of the fits that take turns, and what each of its blocks has taken, in us per step.

    Attributes:
        mine, following: the turn of this fit, and that of the one after it.
        rounds, block: how many turns, and how many steps each.
    """

    mine: Semaphore
    following: Semaphore
    rounds: int
    block: int
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)
    _begun: tuple[int, int] = (0, 0)

    @property
    def steps(self) -> int:
        """Of the whole fit."""
        return WARM_UP + self.rounds * self.block + 1

    def at(self, step: int) -> None:
        """Called in each step; at the edge of a block it waits for the next turn."""
        done, inside = divmod(step - WARM_UP, self.block)
        if inside or done < 0:
            return
        if done > 0:
            cpu, wall = time.thread_time_ns() - self._begun[0], time.perf_counter_ns() - self._begun[1]
            self.cpu.append(cpu / 1e3 / self.block)
            self.wall.append(wall / 1e3 / self.block)
            self.following.release()
        if done < self.rounds:
            if not self.mine.acquire(timeout=LIMIT):
                raise TimeoutError(f"another fit did not pass the turn on within {LIMIT:g} s")
            self._begun = time.thread_time_ns(), time.perf_counter_ns()


class Timed(LightningModule):
    """A model so small that a step is almost only Lightning."""

    def __init__(self, shape: Shape, lane: Lane) -> None:
        super().__init__()
        self.shape, self.lane = shape, lane
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) if shape.typical else nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean of the outputs."""
        self.lane.at(batch_idx)
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


class AsOneOfSeveral(Callback):
    """Has a lone rank capture what each rank of a larger job captures in a step."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """LastGasp stands behind all others, so it begins after this."""
        (found,) = (cb for cb in trainer.callbacks if isinstance(cb, LastGasp))  # type: ignore[attr-defined]
        assert found._run is not None
        found._run.state._single = False
        # a new list: Lightning is iterating over this one
        trainer.callbacks = [cb for cb in trainer.callbacks if cb is not self]  # type: ignore[attr-defined]


class Empty(Callback):
    """What any callback costs (docs/facts/lightning.md: about 10 us)."""


def measure(options: Options) -> list[Measure]:
    """CPU and wall time per step, net of no callback."""
    measures = []
    for shape in SHAPES:
        measures += _report(shape, race(shape, options))
    return measures


def race(shape: Shape, options: Options) -> dict[str, Times]:
    """Run the three fits to their end.

    Raises:
        EOFError: one of them failed; its traceback was printed.
    """
    rounds, block = (2, 10) if options.quick else (ROUNDS, BLOCK)
    context = multiprocessing.get_context("spawn")
    turns = [context.Semaphore(int(i == 0)) for i in range(len(KINDS))]
    processes, ends = [], []
    for i, kind in enumerate(KINDS):
        lane = Lane(turns[i], turns[(i + 1) % len(KINDS)], rounds, block)
        here, there = context.Pipe(duplex=False)
        arguments = (shape, lane, kind, options.folder / str(shape.typical), there)
        processes.append(context.Process(target=fit, args=arguments, daemon=True))
        processes[-1].start()
        there.close()
        ends.append(here)
    try:
        return {kind: here.recv() for kind, here in zip(KINDS, ends, strict=True)}
    finally:
        for process, here in zip(processes, ends, strict=True):
            process.kill()  # each has delivered, or one has failed and the others wait for it
            process.join()
            here.close()


def fit(shape: Shape, lane: Lane, kind: str, folder: Path, results: Connection) -> None:
    """One training on one process, one epoch."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    ours: list[Callback] = [LastGasp(folder), *([AsOneOfSeveral()] if shape.typical else [])]
    callbacks: dict[str, list[Callback]] = {"none": [], "empty": [Empty()], "lastgasp": ours}
    data = DataLoader(TensorDataset(torch.randn(4 * lane.steps, 4)), batch_size=4, shuffle=True)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, max_steps=lane.steps, callbacks=callbacks[kind], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Timed(shape, lane), data)
    results.send((lane.cpu, lane.wall))


def _report(shape: Shape, times: dict[str, Times]) -> list[Measure]:
    (none, none_wall), (empty, _), (ours, ours_wall) = (times[kind] for kind in KINDS)
    samples: list[tuple[str, list[float], float | None]] = [
        ("step without a callback, CPU", none, None),
        ("an empty callback adds, CPU", _more(empty, none), None),
        ("LastGasp adds, CPU", _more(ours, none), shape.target_us),
        ("LastGasp adds, wall", _more(ours_wall, none_wall), None),
    ]
    return [Measure(name=f"{shape.name}: {n}", unit="us", samples=s, target=target) for n, s, target in samples]


def _more(mine: list[float], base: list[float]) -> list[float]:
    return [a - b for a, b in zip(mine, base, strict=True)]
