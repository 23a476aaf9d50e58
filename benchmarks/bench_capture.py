"""What capturing a boundary costs per step, in us: random state, auxiliary state, Lightning's loops.

Run: python benchmarks/bench_capture.py
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from lastgasp.crash_safe_buffer import CrashSafeBuffer
from lastgasp.pytorch.aux_state import AuxRecorder
from lastgasp.pytorch.rng import RngRecorder

REPEATS, CALLS = 21, 2000


def measure(name: str, call: Callable[[], object]) -> None:
    """Print the median and the best of REPEATS rounds, us per call."""
    rounds = []
    for _ in range(REPEATS):
        begun = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        rounds.append((time.thread_time_ns() - begun) / CALLS / 1000)
    print(f"{name:48s} median {statistics.median(rounds):7.2f} us   best {min(rounds):7.2f} us")


def one_record(buffer: CrashSafeBuffer) -> None:
    """An empty record."""
    buffer.begin(1, True)
    buffer.end(8)


def bench_core() -> None:
    recorder = RngRecorder()
    buffer = CrashSafeBuffer(recorder.size)
    slots = [recorder.bind(payload) for payload in buffer.payloads]
    measure("random state (Python, numpy, torch)", lambda: recorder.capture(slots[0]))
    measure("crash-safe buffer begin + end", lambda: one_record(buffer))
    plain = AuxRecorder()
    measure("auxiliary state, no buffers", lambda: plain.capture(1, settled=True))
    for norms in (1, 50):
        module = nn.Sequential(*(nn.BatchNorm1d(64) for _ in range(norms)))
        aux = AuxRecorder(module=module)
        measure(f"auxiliary state, {norms} BatchNorm", lambda aux=aux: aux.capture(1, settled=True))  # type: ignore[misc]


def bench_lightning() -> None:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import tempfile

    from frameworks.state_rig import Run, execute

    for schedulers in ("none", "onecycle"):
        run = Run(Path(tempfile.mkdtemp()), module_args={"schedulers": schedulers})
        outcome = execute(run)
        state = outcome.harness.state
        snapshots = state._snapshots
        measure(f"Lightning snapshot, scheduler {schedulers}", lambda s=snapshots: s.take(18))  # type: ignore[misc]


if __name__ == "__main__":
    torch.set_num_threads(1)
    bench_core()
    bench_lightning()
