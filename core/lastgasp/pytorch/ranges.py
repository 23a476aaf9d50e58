"""Ranges of training as an adapter follows them from a loop's hooks, which tell only afterwards what a range was."""

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

    def put(
        self, mark: Any, begin_ns: int, end_ns: int, value: int = 0, device: tuple[int, int] = (0, 0)
    ) -> bool:
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
