"""A loop over any loader that can be stopped behind each batch, and resumed as in a new process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lastgasp.pytorch import rng
from lastgasp.pytorch.loop.data_position import DataPosition

Make = Callable[[], Any]


@dataclass
class Stopped:
    """What a checkpoint has: the position, and the random state of its boundary."""

    position: bytes
    random: bytes


@dataclass
class Ran:
    """What a run got: ids of the samples of each batch; why it may not be what was due."""

    batches: list[list[float]]
    inexact: str


def seed(number: int) -> None:
    """All generators."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def ids(batch: Any) -> list[float]:
    """Of the samples in a batch: it is a tensor or a list of them, or a mapping or a tuple that holds it."""
    if isinstance(batch, dict):
        batch = batch["id"]
    if isinstance(batch, tuple | list) and not isinstance(batch[0], int | float):
        batch = batch[0]
    values: Iterable[Any] = batch.flatten().tolist() if isinstance(batch, Tensor | np.ndarray) else batch
    return [round(float(value), 5) for value in values]


@dataclass
class Loop:
    """Trains `epochs` epochs, and draws a random number in each step.

    Args:
        make: the loader, as a new process makes it.
        most: batches after which each pass is broken off.
        epoch: called with the loader at the beginning of each epoch.
    """

    make: Make
    epochs: int = 2
    most: int = 1_000
    epoch: Callable[[Any, int], None] = lambda loader, number: None

    def run(self, stop: int | None = None, start: Stopped | None = None, number: int = 3) -> Ran | Stopped:
        """From the beginning or `start`, to the end or behind the batch number `stop` (from 1) of this run."""
        seed(number)
        loader = self.make()
        recorder = rng.RngRecorder()
        position, got, inexact = DataPosition(recorder, None), list[list[float]](), ""
        if start is not None:
            position.resume(start.position, 0)
        try:
            for epoch in range(position.epoch, self.epochs):
                position.next_epoch(epoch)
                self.epoch(loader, epoch)
                one, there = position.begin(loader)
                if there and start is not None:
                    rng.restore(rng.decode(start.random))
                inexact = inexact or one.inexact
                while True:
                    position.ask(one)
                    if stop is not None and len(got) == stop:
                        return Stopped(position.record(), recorder.snapshot())
                    if one.consumed >= self.most:
                        position.end(one)
                    try:
                        batch = position.fetch(one)
                    except StopIteration:
                        break
                    finally:
                        one.asking = False
                    got.append(ids(batch))
                    torch.rand(1)
                one.inner = None
            return Ran(got, inexact)
        finally:
            position.close()

    def check(self, stops: Iterable[int], straight: Ran | None = None) -> str:
        """Stopped behind each of `stops` batches, the loop gets exactly what was due.

        Returns:
            Why it might not have been.
        """
        whole = straight or self.whole()
        reason = ""
        for stop in stops:
            stopped = self.run(stop)
            assert isinstance(stopped, Stopped), f"there are no {stop} batches"
            resumed = self.run(start=stopped, number=99)
            assert isinstance(resumed, Ran)
            assert resumed.batches == whole.batches[stop:], f"stopped behind batch {stop}"
            reason = resumed.inexact
        return reason

    def check_twice(self, first: int, second: int) -> None:
        """Stopped, resumed and stopped again."""
        whole, stopped = self.whole(), self.run(first)
        assert isinstance(stopped, Stopped)
        again = self.run(second, stopped, 98)
        assert isinstance(again, Stopped)
        resumed = self.run(start=again, number=99)
        assert isinstance(resumed, Ran)
        assert resumed.batches == whole.batches[first + second :]

    def whole(self) -> Ran:
        """Not stopped."""
        ran = self.run()
        assert isinstance(ran, Ran)
        return ran
