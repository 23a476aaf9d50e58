"""What the parts of `bench_in_place` share that time whole jobs: the gate, the clock, and what must have happened."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lastgasp.events import decode_incident
from lastgasp.testing.faults import read_log

READY = "a restart will fork its ranks from a warm process"


@contextmanager
def gate(folder: Path, logs: str) -> Iterator[None]:
    """Let the faults of a job come (the file `go`) once its warm process is ready, by one of its logs (a pattern)."""
    over = threading.Event()
    watch = threading.Thread(target=_open, args=(folder, logs, over))
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()


def _open(folder: Path, logs: str, over: threading.Event) -> None:
    while not over.wait(0.1):
        if any(READY in path.read_text(errors="replace") for path in folder.glob(logs)):
            (folder / "go").touch()
            return


def lost_between(folder: Path, fault: int, step: int, ranks: int) -> float:
    """Seconds from a fault to the first time that the slowest rank has completed `step` behind it.

    Raises:
        RuntimeError: a rank has not come to it.
    """
    at, moments = int(str(read_log(folder / "faults")[fault]["wall_ns"])), []
    for rank in range(ranks):
        rows = [line.split() for line in (folder / f"steps-{rank}").read_text().splitlines()]
        after = [int(moment) for moment, done in rows if int(done) == step and int(moment) > at]
        if not after:
            raise RuntimeError(f"{folder.name}: rank {rank} has not completed step {step} behind fault {fault}")
        moments.append(min(after))
    return (max(moments) - at) / 1e9


def require(way: str, folder: Path, checkpoints: Path) -> None:
    """Each fault was answered by a new process in place, or by a warm restart, as `way` says.

    Raises:
        RuntimeError: one was not.
    """
    found = [decode_incident(path.read_bytes()) for path in sorted((checkpoints / "incidents").glob("*.json"))]
    wanted = ("replace", None) if way == "auto" else ("", "warm")
    if any((one.rung, one.restart or None) != wanted for one in found):
        what = [(one.rung, one.restart, one.not_in_place) for one in found]
        raise RuntimeError(f"{folder.name}: {what}")
