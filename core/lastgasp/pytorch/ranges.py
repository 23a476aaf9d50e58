"""Ranges of training as an adapter follows them from a loop's hooks, which only say afterwards what a range was."""

from __future__ import annotations

import time
from typing import Any, Protocol

_now = time.monotonic_ns


class Sink(Protocol):
    """What is needed of `lastgasp.steps.marks.Marks`. The mask is read, ranges are put, on the hot path."""

    @property
    def mask(self) -> int:
        """The kinds that are on (`steps.bits`)."""

    def define(self, text: str, *, domain: str = "default", bit: int, stream: bool) -> Any:
        """The mark of this name; the same object each time."""

    def put(self, mark: Any, begin_ns: int, end_ns: int, value: int = 0, device: tuple[int, int] = (0, 0)) -> bool:
        """Record a finished range, monotonic ns; False where the ring was full."""


class Range:
    """One kind of range, at most one of it open, for one thread; its name may depend on how it ended.

    Args:
        marks: where it goes.
        mark: what it is called (`Sink.define`).
        bit: which bit of the mask switches it; looked at when it begins.
    """

    __slots__ = ("_bit", "_mark", "_marks", "began")

    def __init__(self, marks: Sink, mark: Any, bit: int) -> None:
        self._marks, self._mark, self._bit = marks, mark, bit
        self.began = 0
        """When, monotonic ns; 0: not open."""

    def begin(self) -> None:
        """Begin now, if it is switched on; what was open is dropped."""
        self.began = _now() if self._marks.mask & self._bit else 0

    def end(self, value: int = 0) -> None:
        """End now; without a begin nothing happens. `value` stands for `{}` in the name."""
        if self.began:
            self._marks.put(self._mark, self.began, _now(), value)
            self.began = 0

    def cancel(self) -> bool:
        """Forget the begin; whether there was one."""
        began, self.began = self.began, 0
        return began > 0


class LiveRange(Range):
    """The same for marks that cannot be told of a range afterwards (mstx): it is begun and ended as it happens.

    What stands for `{}` in the name must be known when it begins: one more than at the last end.
    """

    __slots__ = ("expected",)

    def __init__(self, marks: Sink, mark: Any, bit: int) -> None:
        super().__init__(marks, mark, bit)
        self.expected = 1

    def begin(self) -> None:
        """Begin now; what was open is ended."""
        if self.began:
            self._mark.end()
        self.began, self._mark.value = _now(), self.expected
        self._mark.begin()

    def end(self, value: int = 0) -> None:
        """End now; without a begin nothing happens."""
        self.expected = value + 1
        if self.began:
            self._mark.end()
            self.began = 0

    def cancel(self) -> bool:
        """End it; whether it was open."""
        was = super().cancel()
        if was:
            self._mark.end()
        return was


def range_of(marks: Sink, mark: Any, bit: int, first: int = 1) -> Range:
    """The range that suits the marks.

    Args:
        marks, mark, bit: as `Range` has them; marks whose attribute `live` is true are told as it happens.
        first: what the first one will end with, as far as known.
    """
    if not getattr(marks, "live", False):
        return Range(marks, mark, bit)
    found = LiveRange(marks, mark, bit)
    found.expected = first
    return found
