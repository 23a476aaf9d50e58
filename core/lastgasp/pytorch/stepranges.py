"""The ranges of a training step that every loop of PyTorch has, with events where there is a CUDA device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from lastgasp.pytorch.collectives import Collectives, CommunicationMarks, GradientBuckets
from lastgasp.pytorch.devicemarks import cuda_marks
from lastgasp.pytorch.ranges import Sink, range_of
from lastgasp.steps.bits import BIT_OF_MARK, COMM, STEP
from lastgasp.steps.marks import Mark


class Open(Protocol):
    """What is called of a range: of a `steps.marks.Mark` (two C calls) or, on a device, of a `DeviceRange`."""

    def begin(self) -> None:
        """It begins."""

    def end(self) -> None:
        """It ends."""

    def cancel(self) -> bool:
        """Forget that it began."""


class Communication(Protocol):
    """Marks of communication, which wrap something while they are on."""

    def look(self) -> None:
        """Wrap or unwrap as the switch says."""

    def close(self) -> None:
        """Put everything back. Idempotent."""


class StepRanges:
    """step, forward, backward, optimizer, dataloader, save_checkpoint, communication of one rank.

    Args:
        marks: where they go.
        device: where the model is.
        first: number of the first step.

    Attributes:
        end_step: ends `step`; takes its number.
    """

    def __init__(self, marks: Sink, device: torch.device, first: int) -> None:
        self._marks = marks
        self._device = cuda_marks(marks, device, os.environ)
        self.step, self.end_step = self._step_range(first)
        self.forward, self.backward, self.optimizer = map(self._stream, ("forward", "backward", "optimizer"))
        self.dataloader, self.save = map(self._host, ("dataloader", "save_checkpoint"))
        self._communication: list[Communication] = []
        self._followed = True
        """Communication marks were on when the switch was last looked at."""

    def _step_range(self, first: int) -> tuple[Open, Callable[[int], object]]:
        """The range, and how it ends: its number is known only then."""
        mark, bit = self._marks.define("step {}", bit=STEP, stream=True), STEP
        if self._device is not None:
            on_device = self._device.range("step", mark, bit)
            return on_device, on_device.end
        if getattr(self._marks, "live", False):
            live = range_of(self._marks, mark, bit, first=first)
            return live, live.end
        return mark, mark.end_as

    def _stream(self, name: str) -> Open:
        bit = BIT_OF_MARK[name]
        mark: Open = self._marks.define(name, bit=bit, stream=True)
        return self._device.range(name, mark, bit) if self._device is not None else mark

    def _host(self, name: str) -> Mark:
        mark: Mark = self._marks.define(name, bit=BIT_OF_MARK[name], stream=False)
        return mark

    def communicate(self, models: Iterable[Any]) -> None:
        """Follow the collectives, and the gradients of those models that are wrapped by DDP."""
        names = CommunicationMarks(self._marks)
        ddp = [model for model in models if isinstance(model, DistributedDataParallel)]
        self.follow(Collectives(names), *(GradientBuckets(names, model) for model in ddp))

    def follow(self, *communication: Communication) -> None:
        """Have these look at the switch from now on."""
        self._communication += communication
        self._followed = True
        self.look()

    def look(self) -> None:
        """Once a step, at its end: bring device times home, follow the switch of the communication marks."""
        if self._device is not None:
            self._device.settle()
        on = bool(self._marks.mask & COMM)
        if on or self._followed:
            self._followed = on
            for communication in self._communication:
                communication.look()

    @property
    def device_rows(self) -> Literal["host", "events"]:
        """The source of the times in the device rows (`StepRecorder.set_device_rows`)."""
        return "host" if self._device is None else "events"

    def close(self) -> None:
        """Unwrap; open ranges are thrown away. Idempotent."""
        while self._communication:
            self._communication.pop().close()
        for kind in (self.step, self.forward, self.backward, self.optimizer, self.dataloader):
            kind.cancel()
        if self._device is not None:
            self._device.close()
