"""What step marks add to a step of examples/lightning_digits: everything on, with flusher and files, against nothing.

One process and one fit, so that the two share memory, caches and clock. Each epoch of a few steps is a block, with
marks or without: the recorder is opened and the loop patched at its start, and all put back after it. Blocks come in
pairs, the order within a pair changes, and a pair's difference is one sample. Of a block the mean step counts, so
that the flusher's turns are in it.
The CPU time of the training thread is there as well: it hardly sees what else the machine does.
"""

from __future__ import annotations

import importlib.util
import logging
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from benchmarks.harness import Measure, Options, interval
from lastgasp.steps import bits
from lastgasp.steps.recorder import RecorderOptions, StepRecorder
from lastgasp_lightning.marks import LightningMarks

EXAMPLE = Path(__file__).parent.parent / "examples/lightning_digits/train.py"
PAIRS, STEPS, BATCH, SKIP = 400, 12, 32, 2
"""Pairs of blocks, steps of a block, images of a batch, and first steps of a block that do not count."""
BARE_PAIRS, BARE_STEPS = 400, 40
TARGET_PERCENT = 0.5
PART = "what marks add to a bare step, as part of the example's"
Step = tuple[float, float]
"""ns: wall, CPU of the training thread."""
Pair = tuple[Step, Step]
"""A block with marks, and the one beside it without."""


class Toggled(Callback):
    """Marks every other epoch, and times all steps.

    Attributes:
        marked, bare: the mean step of each block, in ns of wall time and of CPU time.
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
        first, last, steps = self._ends[SKIP], self._ends[-1], len(self._ends) - SKIP - 1
        block.append(((last[0] - first[0]) / steps, (last[1] - first[1]) / steps))


class Bare(LightningModule):
    """A model so small that a step is almost only Lightning: there the marks' own time can be told from noise."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean of the outputs."""
        loss: Tensor = self.net(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def measure(options: Options) -> list[Measure]:
    """Step time without marks, and what they add, with a 95 % confidence interval of the median."""
    quick, example = options.quick, load(EXAMPLE)
    pairs, steps = (4, 8) if quick else (PAIRS, STEPS)
    images = Subset(example.digits(), range(steps * BATCH))
    blocks = fit(example.Digits(), images, (pairs, steps), options.folder / "example")
    found = [one for clock, name in enumerate(("wall", "CPU")) for one in _report(name, clock, blocks)]
    pairs, steps = (4, 8) if quick else (BARE_PAIRS, BARE_STEPS)
    ones = TensorDataset(torch.ones(steps * BATCH, 4))
    bare = fit(Bare(), ones, (pairs, steps), options.folder / "bare")
    return [*found, *_of_bare(bare, statistics.median(off[0] for _, off in blocks))]


def _report(name: str, clock: int, pairs: Sequence[Pair]) -> list[Measure]:
    added = [100 * (on[clock] / off[clock] - 1) for on, off in pairs]
    low, high = interval(added)
    return [
        Measure(name=f"example: step without marks, {name}", unit="ms", samples=[off[clock] / 1e6 for _, off in pairs]),
        Measure(name=f"example: marks add to a step, {name}", unit="%", samples=added, target=TARGET_PERCENT),
        Measure(name=f"95 % interval of that, {name}, from", unit="%", samples=[low]),
        Measure(name=f"95 % interval of that, {name}, to", unit="%", samples=[high], target=TARGET_PERCENT),
    ]


def _of_bare(pairs: Sequence[Pair], step: float) -> list[Measure]:
    """What they add to a bare step, and what part that is of the example's step (ns)."""
    added = [(on[0] - off[0]) / 1e3 for on, off in pairs]
    low, high = interval(added)
    share = [100 * 1e3 * us / step for us in added]
    return [
        Measure(name="bare model: step without marks", unit="us", samples=[off[0] / 1e3 for _, off in pairs]),
        Measure(name="bare model: marks add", unit="us", samples=added),
        Measure(name="95 % interval of what they add to a bare step, from", unit="us", samples=[low]),
        Measure(name="95 % interval of what they add to a bare step, to", unit="us", samples=[high]),
        Measure(name=PART, unit="%", samples=share, target=TARGET_PERCENT),
    ]


def fit(model: LightningModule, data: Any, shape: tuple[int, int], folder: Path) -> list[Pair]:
    """The whole run: so many pairs of blocks of so many steps; the first pair does not count.

    Raises:
        RuntimeError: marks were not made where they should have been.
    """
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    pairs, steps = shape
    callback = Toggled(folder)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=2 * pairs, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=BATCH, shuffle=True))
    if callback.ranges != 5 * pairs * steps:
        raise RuntimeError(f"{callback.ranges} ranges were marked instead of {5 * pairs * steps}")
    return list(zip(callback.marked, callback.bare, strict=True))[1:]


def load(script: Path) -> ModuleType:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
