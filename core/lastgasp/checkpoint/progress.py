"""A progress bar for long work, on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lastgasp import _clock

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from .verify import Progress

APPEARS_AFTER_S = 2.0
"""Shorter work shows nothing."""


@contextlib.contextmanager
def progress_bar(title: str, appears_after_s: float = APPEARS_AFTER_S) -> Iterator[Progress | None]:
    """Yields a callback for `verify`, or None where standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    begun = _clock.monotonic()
    bars: list[Bar] = []

    def tell(done: int, total: int) -> None:
        if not bars and _clock.monotonic() - begun >= appears_after_s:
            bars.append(_start(title, total))
        for bar in bars:
            bar.update(bar.task_ids[0], completed=done)

    try:
        yield tell
    finally:
        for bar in bars:
            bar.stop()


def _start(title: str, total: int) -> Bar:
    # Imported here: rich costs 60 ms, and most ranks have no terminal.
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(title, total=total)
    bar.start()
    return bar
