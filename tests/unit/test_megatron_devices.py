"""The order of things on a device's streams, with a stand-in for torch's module of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lastgasp_megatron.devices import Device


class Accelerator:
    """Writes down what is asked of it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.done = False
        self._current = "training"

    def Event(self) -> Any:
        class Event:
            def record(event) -> None:
                self.said.append(f"record on {self._current}")

            def query(event) -> bool:
                return self.done

        return Event()

    def Stream(self) -> str:
        return "own"

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.said.append(f"on {device}")
        yield

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def current_stream(self) -> Any:
        class Stream:
            def wait_event(stream, event: Any) -> None:
                self.said.append(f"{self._current} waits")

            def synchronize(stream) -> None:
                self.said.append(f"{self._current} is done")

        return Stream()


def test_a_gasp_reads_on_its_own_stream_behind_the_step() -> None:
    module = Accelerator()
    device = Device(torch.device("cuda:3"), module)
    device.mark()
    with device.reading():
        module.said.append("read")
    assert module.said == ["record on training", "on cuda:3", "own waits", "read", "own is done"]


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    device = Device(torch.device("cpu"))
    device.mark()
    with device.reading():
        pass
    device.mark_copied()
    assert device.copied()


def test_whether_the_weights_are_copied_is_asked_and_not_waited_for() -> None:
    module = Accelerator()
    device = Device(torch.device("cuda:3"), module)
    device.mark_copied()
    assert module.said == ["record on training"] and not device.copied()
    module.done = True
    assert device.copied()
