"""How long until the first save call, after a rank was killed and after a rank raised.

Four plain processes with a controller; the main threads of the peers block in C, as in a collective whose
peer is gone. The clock of a kill starts just before the signal is sent, that of an exception just before
the rank reports it. MindIO TFT was measured the same way (docs/facts/mindio_tft.md §17).
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Measure, Options

if TYPE_CHECKING:
    from support.engine_job import ToyJob

ROOT = Path(__file__).parents[1]
RANK = Path(__file__).with_name("fat_rank.py")
RANKS, RUNS = 4, 20
TFT = "MindIO TFT: {} ms (median of 5, 4 ranks, 2 busy cores)"


def measure(options: Options) -> list[Measure]:
    """20 runs of each; the victim is each rank in turn."""
    runs, ballast = (2, 10_000_000) if options.quick else (RUNS, 1_000_000_000)
    killed, fat, raised = list[float](), list[float](), list[float]()
    for run in range(runs):
        for samples, fault, nbytes in ((killed, "kill", 0), (fat, "kill", ballast), (raised, "raise", 0)):
            folder = options.folder / f"{fault}-{nbytes}-{run}"
            samples.append(once(folder, run % RANKS, fault, nbytes))
    return [
        Measure(name="SIGKILL of a rank -> first save call in a survivor", unit="ms", samples=killed,
                target=50.0, neighbour=TFT.format("10 923")),
        Measure(name=f"the same, victim holds {ballast / 1e9:g} GB", unit="ms", samples=fat, target=50.0),
        Measure(name="own exception -> first save call in a survivor", unit="ms", samples=raised,
                target=20.0, neighbour=TFT.format("2 164")),
    ]  # fmt: skip


def once(folder: Path, victim: int, fault: str, ballast: int) -> float:
    """One job of its own; milliseconds from the fault to the first save call of any survivor."""
    folder.mkdir()
    with _toy_job()(folder, world=RANKS, ballast=ballast, victim=victim) as job:
        for step in (1, 2):
            job.step(step)
        peers = [rank for rank in range(RANKS) if rank != victim]
        job.stuck(*peers)
        if fault == "kill":
            job.stuck(victim)
            begun = job.ranks[victim].signal(signal.SIGKILL)
        else:
            job.ranks[victim].tell("raise")
            begun = job.ranks[victim].wait_for("raising")["ns"]
        # One holder of the only shard saves: the first survivor.
        saved: int = job.ranks[peers[0]].wait_for("save")["ns"]
        job.ranks[peers[0]].wait_for("published")
    return (saved - begun) / 1e6


def _toy_job() -> type[ToyJob]:
    """The job of the engine's own tests, with a process that can be made big."""
    sys.path.append(str(ROOT / "tests"))
    try:
        from support import engine_job
    finally:
        sys.path.remove(str(ROOT / "tests"))
    engine_job.WORKER = RANK
    return engine_job.ToyJob
