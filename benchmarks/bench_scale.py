"""How the controller's work grows with the ranks: cost per rank must not.

The machine alone: 1 000, 10 000 and 100 000 ranks that are only messages; two holders for each shard, one rank gone. A
recovery begins with an order to each rank; each answers; the last answer brings the plan and an order to each saver.
All that happens in one process, without sockets. Times are CPU times of this process.

Then a real controller with real connections on loopback, made by one other process: how long until all have joined
(the work of both processes), and what it takes of a core and of memory while they send a heartbeat twice a second.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import Measure, Options
from lastgasp.gasp import messages as m
from lastgasp.gasp.actions import Action
from lastgasp.gasp.machine import Machine
from lastgasp.gasp.progress import Progress
from lastgasp.gasp.serve import ControllerThread, new_token

SIZES, RUNS = (1_000, 10_000, 100_000), 5
CONNECTIONS = (250, 500, 1_000, 2_000)
WATCHED_FOR = 10.0
"""Seconds of an idle job."""
CROWD = Path(__file__).with_name("crowd.py")
ORDERS = 200.0
"""ms at 100 000 ranks."""
JOINED = 5.0
"""s for the most connections."""


def measure(options: Options) -> list[Measure]:
    """Each size in turn, then the connections."""
    sizes, runs = ((100, 1_000), 2) if options.quick else (SIZES, RUNS)
    measures: list[Measure] = []
    for ranks in sizes:
        samples = [recovery(ranks) for _ in range(runs)]
        orders, answers = [first + last for first, _, last in samples], [answer for _, answer, _ in samples]
        target = ORDERS if ranks == SIZES[-1] or options.quick else None
        measures += [
            Measure(name=f"{ranks} ranks: fault -> orders to prepare, and last answer -> orders to save", unit="ms",
                    samples=orders, target=target),
            Measure(name=f"{ranks} ranks: an answer", unit="us", samples=[1e3 * one / ranks for one in answers]),
            Measure(name=f"{ranks} ranks: a heartbeat", unit="us", samples=[heartbeat(ranks) for _ in range(runs)]),
        ]  # fmt: skip
    crowds, seconds = ((50, 100), 1.0) if options.quick else (CONNECTIONS, WATCHED_FOR)
    for ranks in crowds:
        measures += alone(ranks, seconds, JOINED if ranks == crowds[-1] else None)
    return measures


def alone(ranks: int, seconds: float, target: float | None) -> list[Measure]:
    """`connections` in a process of its own: memory that an earlier crowd has left would be used again."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(connections, (ranks, seconds, target))


def machine_of(ranks: int) -> Machine:
    """All have joined and begun."""
    replicas = tuple((rank, rank + ranks // 2) for rank in range(ranks // 2))
    made = Machine(
        replicas=replicas, world_size=ranks, finish_timeout=10.0, save_timeout=600.0, progress=Progress(limit=0)
    )
    begin = m.Begin(step=7, durable=0, buffer_fd=-1)
    for rank in range(ranks):
        made.joined(rank, 0.0)
        made.said(rank, begin, 0.0)
    return made


def recovery(ranks: int) -> tuple[float, float, float]:
    """ms: fault -> orders to prepare; all answers but the last; the last answer -> orders to save."""
    machine, answer = machine_of(ranks), m.Prepared(recovery=1, step=7, durable=0, usable=True)
    gc.collect()
    begun = time.process_time()
    asked: list[Action] = machine.gone(0, "process 7 died", "killed", 1, 1.0)
    prepared = time.process_time()
    for rank in range(1, ranks - 1):
        machine.said(rank, answer, 1.0)
    answered = time.process_time()
    ordered = machine.said(ranks - 1, answer, 1.0)
    ended = time.process_time()
    assert len(asked) == ranks and len(ordered) == ranks // 2 + 1
    return (prepared - begun) * 1e3, (answered - prepared) * 1e3, (ended - answered) * 1e3


def heartbeat(ranks: int) -> float:
    """us for each of a round of them, the looks at the deadlines in that half second included."""
    machine, status = machine_of(ranks), m.Status(step=7, durable=0, tick=5, phase="forward")
    for rank in range(ranks):
        machine.said(rank, status, 1.0)
    machine.tick(1.0, 1, frozenset())
    again = m.Status(step=7, durable=0, tick=6, phase="forward")
    gc.collect()
    begun = time.process_time()
    for rank in range(ranks):
        machine.said(rank, again, 1.5)
    for turn in range(25):
        machine.tick(1.5 + turn / 50, 1, frozenset())
    return (time.process_time() - begun) * 1e6 / ranks


def connections(ranks: int, seconds: float, target: float | None) -> list[Measure]:
    """A real controller; its ranks are in another process, on another host as they say."""
    raise_limit(4 * ranks)
    controller = ControllerThread(new_token())
    memory = resident()
    command = [sys.executable, str(CROWD), controller.endpoint.address, str(ranks)]
    crowd = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                             env=os.environ | {"LASTGASP_TOKEN": controller.endpoint.token})  # fmt: skip
    try:
        assert crowd.stdout is not None
        storm = float(crowd.stdout.readline())
        held, used, begun = resident() - memory, time.process_time(), time.monotonic()
        time.sleep(seconds)
        share = (time.process_time() - used) / (time.monotonic() - begun)
    finally:
        crowd.terminate()
        crowd.wait()
        controller.stop()
    return [
        Measure(name=f"{ranks} connections: until all have joined", unit="s", samples=[storm], target=target),
        Measure(name=f"{ranks} connections, idle: CPU of one rank", unit="us/s", samples=[share * 1e6 / ranks]),
        Measure(name=f"{ranks} connections, idle: memory of one rank", unit="kB", samples=[held / ranks / 1e3]),
    ]


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def raise_limit(descriptors: int) -> None:
    """As many as the hard limit allows, up to that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = descriptors if hard == resource.RLIM_INFINITY else min(hard, descriptors)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
