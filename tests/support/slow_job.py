"""Four real DDP ranks on gloo, one of them slowed on purpose: the jobs that `lastgasp report` must tell apart.

    python slow_job.py --out DIR data:1:7 compute:2:7 communication:3:7 checkpoint:0:7 healthy:0:7

Each argument is one fit, CAUSE:VICTIM:SEED[:comm], all in the same four processes; its files go to
`DIR/CAUSE-VICTIM-SEED/RANK`. A step takes some 20 ms, of which each rank computes 3 on two cores that four share. Where
other jobs make steps longer, what is slow takes longer by the same measure; no disk but the slow one takes any time.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lastgasp import _fs
from lastgasp_lightning import LastGasp

WORLD = 4
CAUSES = ("data", "compute", "communication", "checkpoint", "healthy")
WIDTH, BATCH, STEPS, SAVE_EVERY = 256, 8, 80, 10
ROUNDS = 8
"""Matrix products of a forward pass; each takes some 0.2 ms."""
STEP_S = 0.04
"""A usual step of a job with a slow rank, at least."""
EXTRA, DISK = 0.5, 6.0
"""What the slow rank takes longer per step, and its disk per save, in usual steps of its own."""
DISK_S = 0.4
"""The latter at least."""


@dataclass(frozen=True)
class Fit:
    """One training. `comm`: communication marks are on (as they always are for their own cause)."""

    cause: str
    victim: int
    seed: int
    comm: bool = False

    @classmethod
    def parse(cls, text: str) -> Fit:
        """CAUSE:VICTIM:SEED[:comm]."""
        cause, victim, seed, *rest = text.split(":")
        if cause not in CAUSES or rest not in ([], ["comm"]):
            raise ValueError(f"{text!r} is not CAUSE:VICTIM:SEED[:comm], with a cause of {CAUSES}")
        return cls(cause, int(victim), int(seed), bool(rest) or cause == "communication")

    def __str__(self) -> str:
        return f"{self.cause}:{self.victim}:{self.seed}" + ":comm" * self.comm

    @property
    def buffers(self) -> bool:
        """Whether the model has buffers, which DDP broadcasts from rank 0 at the begin of each forward pass."""
        return self.seed % 4 > 1

    @property
    def task(self) -> str:
        """Name of its directory."""
        return f"{self.cause}-{self.victim}-{self.seed}"

    def slows(self, cause: str) -> bool:
        """Whether this rank is the one, and this the cause."""
        return self.cause == cause and dist.get_rank() == self.victim


class Pace:
    """How long steps take here and now."""

    def __init__(self) -> None:
        self._begins: deque[float] = deque(maxlen=20)

    def begins(self) -> None:
        """The next step."""
        self._begins.append(time.monotonic())

    @property
    def usual_s(self) -> float:
        """The median of the last ones."""
        return max(STEP_S, median([STEP_S, *(b - a for a, b in pairwise(self._begins))]))

    @property
    def extra_s(self) -> float:
        """What the slow rank takes longer in each step: as long as a step would take without."""
        return EXTRA * self.usual_s


class Items(Dataset[Tensor]):
    """Random numbers, read by a slow reader where this rank is the victim."""

    def __init__(self, fit: Fit, pace: Pace) -> None:
        self._fit, self._pace = fit, pace
        self._rows = torch.randn(STEPS * BATCH * WORLD, WIDTH)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(1e-4 + (self._pace.extra_s / BATCH if self._fit.slows("data") else 0))
        return self._rows[index]


class Work(LightningModule):
    """Some matrix products, and a metric that all ranks sum up themselves between two batches."""

    def __init__(self, fit: Fit, pace: Pace) -> None:
        super().__init__()
        self._fit, self._pace = fit, pace
        norm = nn.BatchNorm1d(WIDTH) if fit.buffers else nn.Identity()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.ReLU(), nn.Linear(WIDTH, 1))
        self._square = torch.randn(WIDTH, WIDTH) / WIDTH
        self._seen = torch.zeros(8)

    def _toil(self, seconds: float, clock: Callable[[], float] = time.thread_time) -> None:
        """Compute for this long, on the CPU's clock of this thread or another one."""
        until = clock() + seconds
        while clock() < until:
            self._square = torch.tanh(self._square @ self._square)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A share of work that varies a little from step to step."""
        self._toil(0.002 + 0.001 * float(torch.rand(())))
        if self._fit.slows("compute"):
            self._toil(self._pace.extra_s, time.monotonic)
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        """The explicit collective, in every job."""
        self._pace.begins()
        if self._fit.slows("communication"):
            time.sleep(self._pace.extra_s)
        self._seen.fill_(1)
        dist.all_reduce(self._seen)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters())


@contextmanager
def disk(slow: bool, pace: Pace) -> Iterator[None]:
    """Until the end the disk takes its time, or none, before what it was given is on it; not the machine's time."""

    def fsync(fd: int) -> None:
        """Twice a save: the checkpoint and its manifest."""
        time.sleep(max(DISK_S, DISK * pace.usual_s) / 2 if slow else 0)

    vars(_fs.DISK).update(fsync=fsync, sync_dir=lambda directory: None)
    try:
        yield
    finally:
        vars(_fs.DISK).clear()


def train(fit: Fit, out: Path, scratch: Path) -> None:
    """One fit on this rank."""
    seed_everything(fit.seed * WORLD + dist.get_rank(), verbose=False)
    folder = scratch / fit.task
    os.environ["MINDX_TASK_ID"] = fit.task
    saves = ModelCheckpoint(folder, every_n_train_steps=SAVE_EVERY, save_top_k=1)
    ours = LastGasp(folder, resume="never", marks="all" if fit.comm else True, profiling_dir=out)
    trainer = Trainer(
        accelerator="cpu", devices=WORLD, strategy="ddp", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[saves, ours],
    )  # fmt: skip
    pace = Pace()
    with disk(fit.slows("checkpoint"), pace):
        trainer.fit(Work(fit, pace), DataLoader(Items(fit, pace), batch_size=BATCH, shuffle=True))


def rank(number: int, fits: list[Fit], out: Path, scratch: Path) -> None:
    """One of the four processes."""
    names = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(TORCHELASTIC_RUN_ID="slow", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=number, world_size=WORLD)
    for fit in fits:
        train(fit, out, scratch)
        if number == 0:
            print(fit.task, flush=True)
    dist.destroy_process_group()


def main() -> int:
    """Run all fits; 1 where a rank failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("fits", nargs="+", type=Fit.parse)
    args = parser.parse_args()
    context = multiprocessing.get_context("fork")  # torch and Lightning are imported once
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [context.Process(target=rank, args=(n, args.fits, args.out, Path(scratch))) for n in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main())
