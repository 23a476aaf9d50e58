"""A rank that marks steps, for tests that kill it: `python marks_worker.py BASE FIRST [HOW]`.

For each byte on its standard input it takes `PER_TOKEN` steps, and writes the number of each to its standard output
once it has ended; at the end of the input it ends. HOW says in which way, or where its flusher stops for ever: at
a moment of its second write of rows, which is told by the line `hold`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from lastgasp.steps import ringfile
from lastgasp.steps.marks import Marks
from lastgasp.steps.rankfiles import RankFiles
from lastgasp.steps.recorder import RecorderOptions, StepRecorder, flush_all
from lastgasp.steps.recover import recover_orphans

PER_TOKEN = 25
MOMENTS = ("before", "half", "after", "told")
"""Before the write; in a row in its middle; after it, before the ring is updated; and after that."""
ENDINGS = ("return", "close", "raise", "exit", "_exit", "fork")


def options(base: Path, *, period: float = 0.002, limit_mb: int = 5000) -> RecorderOptions:
    """Rank 0 of one, with a flusher that hardly rests."""
    return RecorderOptions(
        rank=0, world_size=1, base=base, task="task", switch_path=base / "no-switch", period=period, limit_mb=limit_mb
    )


def tell(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def hold_at(moment: str, call: int) -> None:
    """The thread that writes rows stops for ever at that moment of its `call`-th write."""
    real = RankFiles.append
    calls = iter(range(1, 1 << 30))

    def append(files: RankFiles, rows: bytes) -> None:
        now = next(calls) == call
        if now and moment == "before":
            _hold()
        if now and moment == "half":
            _hold_in_write()
        real(files, rows)
        if now and moment == "after":
            _hold()
        if now and moment == "told":
            _hold_after_telling()

    RankFiles.append = append  # type: ignore[assignment,method-assign]


held = threading.Event()


def _hold() -> None:
    tell("hold")
    held.set()
    threading.Event().wait()


def _hold_in_write() -> None:
    real = os.write

    def write(descriptor: int, data: bytes) -> int:
        real(descriptor, data[: len(data) // 2 + 17])
        _hold()
        return 0

    os.write = write  # type: ignore[assignment]


def _hold_after_telling() -> None:
    real: Callable[[Marks, int], None] = Marks.consumed

    def consumed(marks: Marks, count: int) -> None:
        real(marks, count)
        _hold()

    Marks.consumed = consumed  # type: ignore[assignment,method-assign]


def take_steps(recorder: StepRecorder, first: int, to_hold: bool) -> None:
    """As many as are asked for; with `to_hold` each token makes a write, until one is held."""
    marks = recorder.marks
    while os.read(0, 1):
        for number in range(first, first + PER_TOKEN):
            marks.step_begin(number)
            with marks.mark("dataloader"):
                pass
            with marks.mark("forward"):
                pass
            marks.step_end()
            tell(str(number))
        first += PER_TOKEN
        while to_hold and not held.is_set() and not recorder.flush(0.05):
            pass


if "MARKS_TEST_RINGS" in os.environ:
    ringfile.places = lambda: [Path(os.environ["MARKS_TEST_RINGS"])]


def main(base: str, first: str, how: str = "return") -> None:
    """Mark steps, or with FIRST `recover` recover those of others."""
    if how in MOMENTS:
        hold_at(how, 1 if first == "recover" else 2)
    if first == "recover":
        tell("ready")
        os.read(0, 1)
        recover_orphans()
        return
    # Without a period of its own an ending has only what it flushes by itself.
    recorder = StepRecorder.open(options(Path(base), period=3600.0 if how in ENDINGS else 0.002))
    take_steps(recorder, int(first), to_hold=how in MOMENTS)
    if how == "close":
        recorder.close()
    elif how == "raise":
        raise ValueError("a bug of the user's")
    elif how == "exit":
        sys.exit(3)
    elif how == "_exit":
        flush_all()
        os._exit(4)
    elif how == "fork":
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
