"""A stand-in for torch's module of a kind of device (`torch.cuda`): its streams are queues, which may be stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Work = Callable[[], bool]
"""Does it if it can be done now; returns whether it is done."""


class Queue:
    """Does what it is given in order, and nothing behind what is not done."""

    def __init__(self, name: str) -> None:
        self.name, self._work = name, list[Work]()

    def give(self, work: Work) -> None:
        """Queue it, and do what can be done."""
        self._work.append(work)
        self.run()

    def run(self) -> bool:
        """Do what can be done; returns whether all is."""
        while self._work and self._work[0]():
            del self._work[0]
        return not self._work

    def synchronize(self) -> None:
        """Wait for all of it."""
        assert self.run(), f"{self.name} would wait for ever"


class Event:
    """Done once the stream has come to where it was recorded."""

    def __init__(self) -> None:
        self._stream: Queue | None = None
        self._number = self._done = 0

    def record(self, stream: Queue) -> None:
        """At the end of what the stream has been given."""
        self._stream, self._number = stream, self._number + 1
        number = self._number

        def done() -> bool:
            self._done = max(self._done, number)
            return True

        stream.give(done)

    def query(self) -> bool:
        """As torch's: never recorded is done."""
        if self._stream is not None:
            self._stream.run()
        return self._done == self._number


class Accelerator:
    """`torch.cuda`, as far as `QueuedWork` uses it. `capturing`: into a graph, where torch refuses events."""

    Event, capturing = Event, False

    def __init__(self) -> None:
        self.training, self.made = Queue("the training thread's stream"), list[Queue]()
        self._current = threading.local()

    def Stream(self, device: torch.device) -> Queue:
        """A new one."""
        self.made.append(Queue(f"stream {len(self.made)} of {device}"))
        return self.made[-1]

    def current_stream(self, device: torch.device | None = None) -> Queue:
        """Of the calling thread."""
        assert not self.capturing
        found: Queue = getattr(self._current, "stream", self.training)
        return found

    def is_current_stream_capturing(self) -> bool:
        """As `torch.cuda`'s."""
        return self.capturing

    def is_initialized(self) -> bool:
        """It has been used."""
        return True

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """Nothing follows from it here."""
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """The calling thread's from now on."""
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before
