"""mstx's ranges on lastgasp's marks: begun and ended by number, in any order and from any thread."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from lastgasp.adapter.worker import Marks, bits

from .said import once

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT, COMMUNICATION = "default", "communication"
OPEN_MAX = 10_000
"""Ranges open at once; of those that are never ended the oldest are given up."""
_NUMBERED = re.compile(r"(.*?)(-?\d{1,18})", re.DOTALL)
_STEP = re.compile(r"\s*\S*step\S*\s+(\d{1,18})", re.IGNORECASE)
"""What TaskD's reader takes for a step (docs/facts/taskd.md §7)."""
OWN = ("step", "forward", "dataloader", "save_checkpoint")
"""First words of what lastgasp's adapters mark by themselves."""


class Worker(Protocol):
    """Whose ranges they are."""

    def marks(self) -> Marks | None:
        """Where they are recorded."""

    def stepped(self, step: int) -> None:
        """A range of a step has ended."""


class Ranges:
    """`torch.npu.mstx`, `mindspore.profiler.mstx`: the functions that the guides' edits call.

    Args:
        worker: whose.
        adapted: whether an adapter of lastgasp's marks this process, so that a range of its kind would count twice.
    """

    def __init__(self, worker: Worker, adapted: Callable[[], bool]) -> None:
        self._worker, self._adapted = worker, adapted
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[Any, int, int, int | None]] = {}

    def range_start(self, message: str, stream: Any = None, domain: str = DEFAULT) -> int:
        """Begin a range.

        Args:
            message: its name; stream: with one it also has rows of the device, which hold the host's times here.

        Returns:
            Its number, for `range_end`; 0 where it is not recorded.
        """
        if not isinstance(message, str) or not isinstance(domain, str):
            once(f"a range whose name or domain is no text is not marked ({message!r}, {domain!r})")
            return 0
        step = _STEP.fullmatch(message)
        if self._adapted() and domain == DEFAULT and message.split()[:1] and message.split()[0].lower() in OWN:
            once(f"the script's own range {message!r} and its like are left out: lastgasp's adapter marks them")
            return 0
        marks = self._worker.marks()
        mark, value = (None, 0) if marks is None else _mark(marks, message, domain, stream is not None)
        if mark is None or marks is None or not marks.mask & mark.bit:
            if step is None:
                return 0
            mark = None  # off; a step counts all the same
        number = next(self._numbers)
        self._open[number] = (mark, value, time.monotonic_ns(), int(step[1]) if step is not None else None)
        if len(self._open) > OPEN_MAX:
            with contextlib.suppress(RuntimeError):  # another thread begins or ends one now
                self._open.pop(next(iter(self._open)), None)
        return number

    def range_end(self, range_id: int, domain: str = DEFAULT) -> None:
        """End it; a number that is not open is ignored, as mstx does."""
        found = self._open.pop(range_id, None) if isinstance(range_id, int) else None
        if found is None:
            return
        mark, value, begin, step = found
        if mark is not None:
            mark.put(begin, time.monotonic_ns(), value, 0, 0)
        if step is not None:
            self._worker.stepped(step)

    def mark(self, message: str, stream: Any = None, domain: str = DEFAULT) -> None:
        """An instant. There are none in lastgasp's marks: said once."""
        once("instants (mstx.mark) are not recorded by lastgasp, ranges are")

    def mstx_range(self, message: str, stream: Any = None, domain: str = DEFAULT) -> Callable[[F], F]:
        """A decorator: each call of the function is a range."""

        def decorated(function: F) -> F:
            @functools.wraps(function)
            def call(*args: Any, **options: Any) -> Any:
                number = self.range_start(message, stream, domain)
                try:
                    return function(*args, **options)
                finally:
                    self.range_end(number, domain)

            return call  # type: ignore[return-value]

        return decorated


def _mark(marks: Marks, message: str, domain: str, stream: bool) -> tuple[Any, int]:
    """The mark of this name and the number in it; None where it cannot be written as given."""
    if "{}" in message:
        once(f"the range {message!r} is not marked: lastgasp's names hold no {{}}")
        return None, 0
    numbered = _NUMBERED.fullmatch(message)
    text, value = (f"{numbered[1]}{{}}", int(numbered[2])) if numbered and _is_plain(numbered[2]) else (message, 0)
    first = message.split()[:1]
    bit = bits.COMM if domain == COMMUNICATION else bits.BIT_OF_MARK.get(first[0] if first else "", bits.STEP)
    return marks.define(text, domain=domain, bit=bit, stream=stream), value


def _is_plain(digits: str) -> bool:
    """Whether the number is written back as it was given."""
    return str(int(digits)) == digits
