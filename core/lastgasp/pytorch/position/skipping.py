"""Throwing away what was consumed before, with a progress bar when that lasts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from lastgasp.pytorch.rng import RngRecorder

_QUIET_S = 2.0


class SkipProgress:
    """`range(total)`, with a progress bar when it lasts and somebody watches.

    Attributes:
        in_turn: what was drawn after the first batch has drawn from the random state of the process.
    """

    def __init__(self, total: int, recorder: RngRecorder) -> None:
        self._total, self._recorder = total, recorder
        self.in_turn = False
        self._stack = ExitStack()

    def __enter__(self) -> SkipProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __iter__(self) -> Iterator[int]:
        begun = time.monotonic()
        bar: Any = None
        first = b""
        for done in range(self._total):
            if bar is None and time.monotonic() - begun > _QUIET_S and sys.stderr.isatty():
                bar = self._bar(done)
            yield done
            if not done:
                first = self._recorder.snapshot()
            if bar is not None:
                bar()
        self.in_turn = self._total > 1 and self._recorder.snapshot() != first

    def _bar(self, done: int) -> Callable[[], None]:
        from rich.console import Console
        from rich.progress import Progress

        shown = self._stack.enter_context(Progress(console=Console(stderr=True)))
        task = shown.add_task("lastgasp: skipping consumed batches", total=self._total, completed=done)
        return lambda: shown.advance(task)
