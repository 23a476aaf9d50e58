"""What step marks add to a step of examples/lightning_digits: everything on, with flusher and files, against nothing.

One process and one fit, so that the two share memory, caches and clock. Each epoch of a few steps is a block, with
marks or without: the recorder is opened and the loop patched at its start, and all put back after it. Blocks come in
pairs, the order within a pair changes, and a pair's difference is one sample. Of a block the median step counts.
The CPU time of the training thread is there as well: it hardly sees what else the machine does.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import random
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, Subset

from benchmarks.harness import Measure, Options
from lastgasp.steps import bits
from lastgasp.steps.recorder import RecorderOptions, StepRecorder
from lastgasp_lightning.marks import LightningMarks

EXAMPLE = Path(__file__).parent.parent / "examples/lightning_digits/train.py"
PAIRS, STEPS, BATCH, SKIP = 400, 12, 32, 2
"""Pairs of blocks, steps of a block, images of a batch, and first steps of a block that do not count."""
TARGET_PERCENT = 0.5
RESAMPLES = 4000
Step = tuple[float, float]
"""ns: wall, CPU of the training thread."""


class Toggled(Callback):
    """Marks every other epoch, and times all steps.

    Attributes:
        marked, bare: the median step of each block, in ns of wall time and of CPU time.
        ranges: how many were marked.
    """

    def __init__(self, folder: Path) -> None:
        self.marked: list[Step] = []
        self.bare: list[Step] = []
        self.ranges = 0
        self._folder = folder
        self._recorder: StepRecorder | None = None
        self._marks: LightningMarks | None = None
        self._ends: list[tuple[int, int]] = []
        self._step = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The order is that of on, off, off, on."""
        self._ends = []
        if trainer.current_epoch % 4 in (0, 3):
            options = RecorderOptions(rank=0, world_size=1, base=self._folder, task="bench", mask=bits.DEFAULT_ON)
            self._recorder = StepRecorder.open(options)
            self._marks = LightningMarks(trainer, self._recorder.marks)
            self._marks.install()

    def on_before_optimizer_step(self, trainer: Trainer, *args: object) -> None:
        """As LastGasp does."""
        if self._marks is not None:
            self._marks.update_begins()

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        """As LastGasp does; then the time."""
        self._step += 1
        if self._marks is not None:
            self._marks.step_end(self._step)
        self._ends.append((time.perf_counter_ns(), time.thread_time_ns()))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put everything back, keep the block."""
        block = self.bare
        if self._marks is not None and self._recorder is not None:
            self._marks.close()
            self._recorder.close()
            self.ranges += self._recorder.marks.head
            self._marks = self._recorder = None
            block = self.marked
        pairs = list(itertools.pairwise(self._ends[SKIP:]))
        wall, cpu = (statistics.median(b[clock] - a[clock] for a, b in pairs) for clock in (0, 1))
        block.append((wall, cpu))


def measure(options: Options) -> list[Measure]:
    """Step time without marks, and what they add, with a 95 % confidence interval of the median."""
    callback = fit(4 if options.quick else PAIRS, 8 if options.quick else STEPS, options.folder)
    pairs = list(zip(callback.marked, callback.bare, strict=True))[1:]
    return [found for clock, name in enumerate(("wall", "CPU")) for found in _report(name, clock, pairs)]


def _report(name: str, clock: int, pairs: Sequence[tuple[Step, Step]]) -> list[Measure]:
    added = [100 * (on[clock] / off[clock] - 1) for on, off in pairs]
    low, high = interval(added)
    return [
        Measure(name=f"{name}: step without marks", unit="ms", samples=[off[clock] / 1e6 for _, off in pairs]),
        Measure(name=f"{name}: marks add", unit="us", samples=[(on[clock] - off[clock]) / 1e3 for on, off in pairs]),
        Measure(name=f"{name}: marks add to a step", unit="%", samples=added, target=TARGET_PERCENT),
        Measure(name=f"{name}: 95 % interval of this median, from", unit="%", samples=[low]),
        Measure(name=f"{name}: 95 % interval of this median, to", unit="%", samples=[high], target=TARGET_PERCENT),
    ]


def fit(pairs: int, steps: int, folder: Path) -> Toggled:
    """The whole run.

    Raises:
        RuntimeError: marks were not made where they should have been.
    """
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    example, callback = load(EXAMPLE), Toggled(folder)
    data = Subset(example.digits(), range(steps * BATCH))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=2 * pairs, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(example.Digits(), DataLoader(data, batch_size=BATCH, shuffle=True))
    if callback.ranges != 5 * pairs * steps:
        raise RuntimeError(f"{callback.ranges} ranges were marked instead of {5 * pairs * steps}")
    return callback


def load(script: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interval(samples: Sequence[float], resamples: int = RESAMPLES, seed: int = 1) -> tuple[float, float]:
    """Bootstrap 95 % confidence interval of the median."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(samples, k=len(samples))) for _ in range(resamples))
    return medians[int(0.025 * resamples)], medians[int(0.975 * resamples)]
