"""Marks of a CUDA device: event pairs around a range, read later without waiting, and NVTX ranges for profilers.

A host range of asynchronous work ends before the work does. An event recorded at each end shows when the device got
there; it is asked once a step whether it has passed, and never waited for. The events' times are brought to the
host's clock by one event that was waited for at the start, and kept there by two facts: the device cannot reach an
event before the host has recorded it, nor after the host has seen it passed.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.cuda import nvtx

from lastgasp.pytorch.ranges import Range, Sink

_now = time.monotonic_ns

PENDING = 1024
"""Ranges that wait for their events. Beyond that the oldest goes out with the host's times alone."""
REBASE_NS = 1_000_000_000
"""`elapsed_time` is a float of 32 bits in ms: over a second it still tells 0.1 us apart."""
PROFILERS = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH")
"""Set by Nsight Systems and Nsight Compute in the processes that they profile."""


class Event(Protocol):
    """Of `torch.cuda.Event` what is used."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds from this one to `other`; both have passed."""

    def synchronize(self) -> None:
        """Wait for it; only once, at the start."""


class DeviceClock:
    """Turns events into times of the host's monotonic clock.

    Args:
        base: an event that the device has passed.
        at_ns: when that was.
    """

    def __init__(self, base: Event, at_ns: int) -> None:
        self._base, self._at = base, at_ns

    def time_of(self, event: Event, recorded_ns: int, passed_ns: int) -> int:
        """When the device passed `event`, which lies between `recorded_ns` and `passed_ns`.

        A time outside shows that the two clocks have drifted apart, and is put right for all that follow.
        """
        elapsed = int(self._base.elapsed_time(event) * 1e6)
        found = self._at + elapsed
        right = min(max(found, recorded_ns), passed_ns)
        self._at += right - found
        if elapsed > REBASE_NS:
            self._base, self._at = event, right
        return right


@dataclass(frozen=True, slots=True)
class _Pending:
    mark: Any
    host: tuple[int, int]
    value: int
    events: tuple[Event, Event]


class DeviceMarks:
    """The ranges of one thread on one device. `settle` is called once a step, `close` at the end.

    Args:
        marks: where finished ranges go.
        record: records a new event on the current stream.
        profiler: None, or how a range begins and ends in an attached profiler: takes the name and returns how it ends.
    """

    def __init__(
        self, marks: Sink, record: Callable[[], Event], profiler: Callable[[str], Callable[[], None]] | None = None
    ) -> None:
        self.marks, self.record, self.profiler = marks, record, profiler
        self._pending: deque[_Pending] = deque()
        base = record()
        base.synchronize()
        self._clock = DeviceClock(base, _now())

    def range(self, name: str, mark: Any, bit: int) -> DeviceRange:
        """A range with events at its ends; `name` is shown by profilers."""
        return DeviceRange(self, name, mark, bit)

    def add(self, mark: Any, host: tuple[int, int], value: int, events: tuple[Event, Event]) -> None:
        """A range ended on the host."""
        if len(self._pending) >= PENDING:
            oldest = self._pending.popleft()
            self.marks.put(oldest.mark, *oldest.host, oldest.value)
        self._pending.append(_Pending(mark, host, value, events))

    def settle(self) -> int:
        """Put the ranges that the device has passed; returns how many it has not. Never waits."""
        pending = self._pending
        while pending and pending[0].events[1].query():
            done, now = pending[0], _now()
            begin, end = (
                self._clock.time_of(event, host, now) for event, host in zip(done.events, done.host, strict=True)
            )
            pending.popleft()
            self.marks.put(done.mark, *done.host, done.value, (begin, end))
        return len(pending)

    def close(self) -> None:
        """Put everything; what the device has not passed has the host's times alone. Idempotent.

        A device that broke, and raises whatever it is asked, has not passed anything.
        """
        with contextlib.suppress(RuntimeError):
            self.settle()
        while self._pending:
            left = self._pending.popleft()
            self.marks.put(left.mark, *left.host, left.value)


class DeviceRange(Range):
    """A range with an event at each end; it goes out once the device has passed the second one."""

    __slots__ = ("_device", "_finish", "_first", "_name")

    def __init__(self, device: DeviceMarks, name: str, mark: Any, bit: int) -> None:
        super().__init__(device.marks, mark, bit)
        self._device, self._name = device, name
        self._first: Event | None = None
        self._finish: Callable[[], None] | None = None

    def begin(self) -> None:
        """Begin now, if it is switched on; what was open is dropped."""
        self.cancel()
        super().begin()
        if self.began:
            self._first = self._device.record()
            profiler = self._device.profiler
            self._finish = profiler(self._name) if profiler is not None else None

    def end(self, value: int = 0) -> None:
        """End now; without a begin nothing happens. `value` stands for `{}` in the name."""
        if self.began and self._first is not None:
            ended = _now()
            self._device.add(self._mark, (self.began, ended), value, (self._first, self._device.record()))
        self.cancel()

    def cancel(self) -> bool:
        """Forget the begin; whether there was one."""
        if self._finish is not None:
            self._finish()
        self._first = self._finish = None
        return super().cancel()


def profiled(environment: Mapping[str, str]) -> bool:
    """Whether a tool that shows NVTX ranges is attached to this process."""
    return any(environment.get(name) for name in PROFILERS)


def cuda_marks(marks: Sink, device: torch.device, environment: Mapping[str, str]) -> DeviceMarks | None:
    """The marks of a `torch.device`; None where it is not a CUDA device, so that host times are all there is."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None

    def record() -> Event:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event  # type: ignore[no-any-return]

    return DeviceMarks(marks, record, _nvtx if profiled(environment) else None)


def _nvtx(name: str) -> Callable[[], None]:
    """Begin an NVTX range; returns how it ends. Not push and pop: ranges of a loop need not nest."""
    handle = nvtx.range_start(name)
    return lambda: nvtx.range_end(handle)
