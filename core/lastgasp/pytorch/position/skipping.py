"""Throwing away what was consumed before, with a progress bar when that lasts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

_QUIET_S = 2.0


class SkipProgress:
    """`range(total)`, with a progress bar when it lasts and somebody watches."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._stack = ExitStack()

    def __enter__(self) -> Iterator[int]:
        return self._steps()

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _steps(self) -> Iterator[int]:
        begun = time.monotonic()
        bar: Any = None
        for done in range(self._total):
            if bar is None and time.monotonic() - begun > _QUIET_S and sys.stderr.isatty():
                bar = self._bar(done)
            yield done
            if bar is not None:
                bar()

    def _bar(self, done: int) -> Callable[[], None]:
        from rich.console import Console
        from rich.progress import Progress

        shown = self._stack.enter_context(Progress(console=Console(stderr=True)))
        task = shown.add_task("lastgasp: skipping consumed batches", total=self._total, completed=done)
        return lambda: shown.advance(task)
