"""Marks of a device, with events that a test passes by hand. What was not run here: a real CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from lastgasp.pytorch import devicemarks
from lastgasp.pytorch.devicemarks import DeviceClock, DeviceMarks, cuda_marks, profiled
from lastgasp.pytorch.ranges import Range
from lastgasp.steps import bits
from lastgasp.steps.marks import Marks
from support.ranges import Seen, seen

MS = 1_000_000


class Event:
    """Passes the device on command; `at` in ns on the device's clock."""

    def __init__(self, at: int = 0, passed: bool = False) -> None:
        self.at, self.passed = at, passed

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, other: Event) -> float:
        assert self.passed and other.passed
        return (other.at - self.at) / 1e6

    def passes(self, at: int) -> None:
        self.at, self.passed = at, True


class Device:
    """Events in the order in which they were recorded; the first one is the clock's."""

    def __init__(self) -> None:
        self.events = list[Event]()

    def record(self) -> Event:
        self.events.append(Event())
        return self.events[-1]


@pytest.fixture
def marks() -> Iterator[Marks]:
    """Everything on."""
    marks = Marks.open(rank=0, world_size=1)
    yield marks
    marks.close(remove=True)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the host's clock, in ms."""
    time = [0]
    for module in ("devicemarks", "ranges"):
        monkeypatch.setattr(f"lastgasp.pytorch.{module}._now", lambda: time[0])

    def set_time(ms: int) -> None:
        time[0] = ms * MS

    set_time(1000)
    return set_time


def forward(marks: Marks, device: DeviceMarks) -> Range:
    return device.range("forward", marks.mark("forward"), bits.FORWARD)


def times(one: Seen) -> tuple[float, ...]:
    return tuple(ns / MS for ns in (one.begin, one.end, *one.device))


def test_a_range_goes_out_once_the_device_has_passed_it(marks: Marks, now: Callable[[int], None]) -> None:
    device = Device()
    mine = DeviceMarks(marks, device.record)
    work = forward(marks, mine)
    now(1001)
    work.begin()
    now(1002)
    work.end()
    assert mine.settle() == 1
    _, first, second = device.events
    first.passes(5 * MS)
    now(1030)
    assert (mine.settle(), seen(marks)) == (1, [])
    second.passes(25 * MS)
    assert mine.settle() == 0
    assert [times(one) for one in seen(marks)] == [(1001, 1002, 1005, 1025)]


def test_off_costs_no_event_and_a_dropped_begin_leaves_nothing(marks: Marks) -> None:
    device = Device()
    work = forward(marks, DeviceMarks(marks, device.record))
    marks.mask = bits.STEP
    work.begin()
    work.end()
    marks.mask = bits.ALL
    work.begin()
    assert work.cancel()
    assert not work.cancel()
    work.end()
    assert (len(device.events), marks.head) == (2, 0)


def test_the_devices_clock_is_kept_within_what_the_host_has_seen() -> None:
    clock = DeviceClock(Event(passed=True), at_ns=1000 * MS)
    early, late = Event(10 * MS, passed=True), Event(10 * MS, passed=True)
    assert clock.time_of(early, 1015 * MS, 1100 * MS) == 1015 * MS  # not before it was recorded: 5 ms behind
    assert clock.time_of(late, 1000 * MS, 1100 * MS) == 1015 * MS  # all that follow as well
    assert clock.time_of(late, 1000 * MS, 1012 * MS) == 1012 * MS  # not after it was seen passed
    assert clock.time_of(Event(20 * MS, passed=True), 1000 * MS, 1100 * MS) == 1022 * MS


def test_the_devices_clock_counts_from_a_recent_event() -> None:
    base = Event(passed=True)
    clock = DeviceClock(base, at_ns=0)
    far, farther = Event(2000 * MS, passed=True), Event(2001 * MS, passed=True)
    limits = 0, 1 << 62
    assert clock.time_of(far, *limits) == 2000 * MS
    base.passed = False  # no longer asked
    assert clock.time_of(farther, *limits) == 2001 * MS


def test_a_device_that_does_not_answer_leaves_host_times(marks: Marks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devicemarks, "PENDING", 3)
    device = Device()
    mine = DeviceMarks(marks, device.record)
    work = forward(marks, mine)
    for _ in range(5):
        work.begin()
        work.end()
    assert [one.device for one in seen(marks)] == [(0, 0)] * 2
    mine.close()
    mine.close()
    assert [one.device for one in seen(marks)] == [(0, 0)] * 5


@pytest.mark.parametrize("broken", ["query", "elapsed_time"])
def test_a_device_that_broke_hides_neither_its_error_nor_the_ranges(
    marks: Marks, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` follows the exception that ended training; after it every call of the device raises."""

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    device = Device()
    mine = DeviceMarks(marks, device.record)
    work = forward(marks, mine)
    for _ in range(3):
        work.begin()
        work.end()
    for event in device.events:
        event.passes(MS)
    monkeypatch.setattr(Event, broken, fail)
    mine.close()
    assert [one.device for one in seen(marks)] == [(0, 0)] * 3


def test_profilers_see_the_same_ranges(marks: Marks) -> None:
    shown = list[str]()

    def profiler(name: str) -> Callable[[], None]:
        shown.append(f"{name} begins")
        return lambda: shown.append(f"{name} ends")

    work = forward(marks, DeviceMarks(marks, Device().record, profiler))
    work.begin()
    work.end()
    work.begin()
    work.cancel()
    assert shown == ["forward begins", "forward ends"] * 2


def test_which_environments_have_a_profiler() -> None:
    assert profiled({"NSYS_PROFILING_SESSION_ID": "7"})
    assert not profiled({"NVTX_INJECTION64_PATH": ""})


def test_no_device_marks_without_a_cuda_device(marks: Marks) -> None:
    assert cuda_marks(marks, torch.device("cpu"), {}) is None
