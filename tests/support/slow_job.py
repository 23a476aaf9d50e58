"""Four real DDP ranks on gloo, one of them slowed on purpose: the jobs that `lastgasp report` must tell apart.

    python slow_job.py --out DIR data:1:7 compute:2:7 communication:3:7 checkpoint:0:7 healthy:0:7

Each argument is one fit, CAUSE:VICTIM:SEED[:comm], all in the same four processes; its files go to
`DIR/CAUSE-VICTIM-SEED/RANK`. A step takes some 20 ms, of which each rank computes 3 on two cores that four share.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lastgasp.pytorch.processgroups import process_groups
from lastgasp.steps import bits
from lastgasp.steps.recorder import RecorderOptions, StepRecorder
from lastgasp_lightning.boundary import reorder
from lastgasp_lightning.marks import LightningMarks

WORLD = 4
CAUSES = ("data", "compute", "communication", "checkpoint", "healthy")
WIDTH, BATCH, STEPS, SAVE_EVERY = 256, 8, 80, 10
ROUNDS = 8
"""Matrix products of a forward pass; each takes some 0.2 ms."""
EXTRA_S = 0.02
"""What the slow rank takes longer, per step."""
DISK_S = 0.4
"""What its disk takes longer, per save."""


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
    def task(self) -> str:
        """Name of its directory."""
        return f"{self.cause}-{self.victim}-{self.seed}"

    def slows(self, cause: str) -> bool:
        """Whether this rank is the one, and this the cause."""
        return self.cause == cause and dist.get_rank() == self.victim


class Items(Dataset[Tensor]):
    """Random numbers, read by a slow reader where this rank is the victim."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._rows = torch.randn(STEPS * BATCH * WORLD, WIDTH)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(1e-4 + (EXTRA_S / BATCH if self._fit.slows("data") else 0))
        return self._rows[index]


class Work(LightningModule):
    """Some matrix products, and a metric that all ranks sum up themselves between two batches."""

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self._fit = fit
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self._square = torch.randn(WIDTH, WIDTH) / WIDTH
        self._seen = torch.zeros(8)

    def _toil(self, seconds: float) -> None:
        """Compute for this long on the CPU's clock of this thread."""
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            self._square = torch.tanh(self._square @ self._square)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A share of work that varies a little from step to step."""
        self._toil(0.002 + 0.001 * float(torch.rand(())))
        if self._fit.slows("compute"):
            self._toil(EXTRA_S)
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        """The explicit collective, in every job."""
        if self._fit.slows("communication"):
            time.sleep(EXTRA_S)
        self._seen.fill_(1)
        dist.all_reduce(self._seen)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters())


class Disk(TorchCheckpointIO):
    """Writes checkpoints; slowly where this rank is the victim."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """As Lightning does, and then the disk takes its time."""
        super().save_checkpoint(checkpoint, path, storage_options)
        if self._fit.slows("checkpoint"):
            time.sleep(DISK_S)


class Marking(Callback):
    """Marks the fit, as LastGasp does, without the rest of it."""

    def __init__(self, fit: Fit, out: Path) -> None:
        self._options = RecorderOptions(
            rank=dist.get_rank(),
            world_size=WORLD,
            base=out,
            task=fit.task,
            mask=bits.ALL if fit.comm else bits.DEFAULT_ON,
            framework="lightning",
            switch_path=out / "no-switch",
        )
        self._recorder: StepRecorder
        self._marks: LightningMarks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand before ModelCheckpoint, as LastGasp does."""
        reorder(trainer, self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Patch."""
        self._recorder = StepRecorder.open(self._options)
        self._recorder.set_groups(process_groups())
        self._marks = LightningMarks(trainer, self._recorder.marks)
        self._marks.install()

    def on_before_optimizer_step(self, trainer: Trainer, *args: object) -> None:
        """The update begins."""
        self._marks.update_begins()

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        """The step ends."""
        self._marks.step_end(trainer.global_step)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put everything back, write the rest."""
        self._marks.close()
        if not self._recorder.close():
            raise OSError(f"the rows of rank {self._options.rank} could not be written")


def train(fit: Fit, out: Path, scratch: Path) -> None:
    """One fit on this rank."""
    seed_everything(fit.seed * WORLD + dist.get_rank(), verbose=False)
    saves = ModelCheckpoint(scratch / fit.task, every_n_train_steps=SAVE_EVERY, save_top_k=1)
    trainer = Trainer(
        accelerator="cpu", devices=WORLD, strategy="ddp", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Marking(fit, out), saves], plugins=[Disk(fit)],
    )  # fmt: skip
    trainer.fit(Work(fit), DataLoader(Items(fit), batch_size=BATCH, shuffle=True))


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
