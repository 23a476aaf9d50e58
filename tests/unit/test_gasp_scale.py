"""What the controller does for a rank costs the same whatever the number of ranks: operations are counted, no times."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from lastgasp.events import Fault
from lastgasp.gasp import messages as m
from lastgasp.gasp.actions import Send
from lastgasp.gasp.attempt import Attempt
from lastgasp.gasp.machine import Machine
from lastgasp.gasp.progress import Progress
from lastgasp.topology import ReplicaGroups
from support.switch_job import hello

FEW, MANY = 64, 512
GROWTH = MANY / FEW
SLACK = 1.3


def pairs(world: int) -> ReplicaGroups:
    """Two holders for each shard."""
    return tuple((rank, rank + world // 2) for rank in range(world // 2))


class Job:
    """The machine of one, with everything that its ranks say."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.machine = Machine(
            replicas=pairs(world), world_size=world, finish_timeout=5.0, save_timeout=50.0, progress=Progress(limit=0)
        )
        for rank in range(world):
            self.machine.joined(rank, 0.0)
            self.machine.said(rank, m.Begin(step=7, durable=0, buffer_fd=-1), 0.0)

    def beat(self, now: float) -> None:
        """Every rank sends its heartbeat, and has made progress."""
        for rank in range(self.world):
            self.machine.said(rank, m.Status(step=7, durable=0, tick=int(now * 10), phase="forward"), now)

    def recover(self) -> None:
        """Rank 0 dies; the others answer, see their peers fail, and save."""
        self.machine.gone(0, "process 7 died", "killed", 1, 1.0)
        answer = m.Prepared(recovery=1, step=7, durable=0, usable=True)
        orders = []
        for rank in range(1, self.world):
            fault = Fault(kind="peer", rank=rank, cause="connection closed by peer", step=7, seen_ns=1)
            self.machine.said(rank, m.Report(fault=fault), 1.0)
            orders += self.machine.said(rank, answer, 1.0)
        saved = m.Saved(recovery=1, plan=1, path="p", nbytes=1, first_byte_ns=1)
        savers = [action.rank for action in orders if isinstance(action, Send) and isinstance(action.message, m.Save)]
        assert len(savers) == self.world // 2
        for rank in savers:
            self.machine.said(rank, saved, 2.0)
        self.machine.tick(2.5, 1, frozenset())
        assert self.machine.state == "committing"
        self.machine.said(savers[0], m.Committed(recovery=1, plan=1), 3.0)
        assert self.machine.outcome.ending == "saved"

    def idle(self) -> None:
        """A second of looks at a job that trains."""
        self.beat(1.0)
        for turn in range(50):
            assert self.machine.tick(1.0 + turn / 50, 1, frozenset()) == []


def operations(work: Callable[[], object]) -> int:
    """Bytecode instructions that `work` takes, without those of finalizers of others' garbage."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    gc.disable()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def growth(work: Callable[[int], Callable[[], object]]) -> float:
    """How much more `work` costs with many ranks than with few."""
    few, many = work(FEW), work(MANY)
    return operations(many) / operations(few)


def test_a_recovery_is_linear_in_the_ranks() -> None:
    assert growth(lambda world: Job(world).recover) <= GROWTH * SLACK


def test_a_job_that_all_ranks_are_told_to_end_is_linear_too() -> None:
    def told(world: int) -> Callable[[], None]:
        job = Job(world)

        def run() -> None:
            for rank in range(world):
                fault = Fault(kind="sigterm", rank=rank, cause="asked to stop", step=7, seen_ns=1)
                job.machine.said(rank, m.Report(fault=fault), 1.0)
                job.machine.said(rank, m.Entered(recovery=1, step=8), 1.0)
            for rank in range(world):
                job.machine.said(rank, m.Prepared(recovery=1, step=8, durable=0, usable=True, target=8), 1.0)
            assert job.machine.state == "saving"

        return run

    assert growth(told) <= GROWTH * SLACK


def test_looks_at_a_job_that_trains_cost_the_same_for_any_number_of_ranks() -> None:
    """Fifty looks and one round of heartbeats: the heartbeats grow with the ranks, the looks do not."""

    def looks(world: int) -> Callable[[], None]:
        job = Job(world)
        job.idle()

        def run() -> None:
            for turn in range(50):
                job.machine.tick(2.0 + turn / 50, 1, frozenset())

        return run

    assert growth(looks) <= SLACK


def test_looks_while_a_job_starts_or_saves_cost_the_same_for_any_number_of_ranks() -> None:
    def starting(world: int) -> Callable[[], object]:
        job = Job(world)
        return lambda: [job.machine.tick(1.0 + turn / 50, 1, frozenset()) for turn in range(50)]

    def saving(world: int) -> Callable[[], object]:
        job = Job(world)
        job.beat(1.0)
        job.machine.gone(0, "process 7 died", "killed", 1, 1.0)
        for rank in range(1, world):
            job.machine.said(rank, m.Prepared(recovery=1, step=7, durable=0, usable=True), 1.0)
        assert job.machine.state == "saving"
        return lambda: [job.machine.tick(1.0 + turn / 50, 1, frozenset()) for turn in range(50)]

    assert growth(starting) <= SLACK
    assert growth(saving) <= SLACK


def test_a_gather_that_waits_costs_nothing_per_look() -> None:
    def waiting(world: int) -> Callable[[], object]:
        attempt = Attempt.of(hello(0, world))
        for rank in range(world - 1):
            attempt.machine.joined(rank, 0.0)
            assert attempt.gather(rank, m.GatherPart(tag="start", payload=b"")) is None
        since = attempt.gathers["start"].since
        return lambda: [attempt.failed_gathers(since + 1.0) for _ in range(50)]

    assert growth(waiting) <= SLACK


@pytest.mark.parametrize("told", [3, 40])
def test_orders_name_a_few_faults_and_say_whether_all_were_told_to_stop(told: int) -> None:
    job = Job(MANY)
    for rank in range(told):
        fault = Fault(kind="sigterm", rank=rank, cause="asked to stop", step=7, seen_ns=1)
        job.machine.said(rank, m.Report(fault=fault), 1.0)
    order = job.machine._prepare_order()
    assert {fault.kind for fault in order.faults} == {"sigterm"}
    job.machine.gone(MANY - 1, "process 7 died", "killed", 1, 1.0)
    order = job.machine._prepare_order()
    assert "killed" in {fault.kind for fault in order.faults}
    assert len(order.faults) <= 17
