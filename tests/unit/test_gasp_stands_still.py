"""Where all begin again with files: ranks that are slow are waited for, and those that stand still are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lastgasp.events import Fault
from lastgasp.gasp import messages as m
from lastgasp.gasp.actions import Action, AgreedAnew, Kill, Remark
from lastgasp.gasp.again import NEW, Again, Offer
from lastgasp.gasp.attempt import Attempt
from lastgasp.gasp.controller import Controller
from lastgasp.gasp.gathers import GATHER_TIMEOUT
from lastgasp.gasp.ladder import STOPPED, Ladder
from lastgasp.gasp.progress import OUTSIDE_FLOOR
from support.switch_job import hello

WORLD, STEP, FINISH = 3, 8, 10.0
NOBODY: frozenset[int] = frozenset()
AGAIN = Again(incarnation=1, step=STEP, source=-1, takers=(0, 1, 2), lost=(1,), port=77)


class Loading:
    """Three ranks have joined the first incarnation, and have yet to begin; a clock of their own."""

    def __init__(self, again: Again = AGAIN) -> None:
        self.attempt, self.now = Attempt.of(hello(0, WORLD, incarnation=1, finish_timeout=FINISH)), 0.0
        self.attempt.enters_after(again)
        assert isinstance(self.attempt.machine, Ladder)
        self.machine = self.attempt.machine
        for rank in range(WORLD):
            self.machine.joined(rank, 0.0)

    def seconds(self, many: float, *, silent: frozenset[int] = NOBODY, stopped: frozenset[int] = NOBODY) -> bool:
        """So many go by; the others' control threads speak. Returns whether that is a fault."""
        until = self.now + many
        while self.now < until and not self.machine.faults:
            self.now += 0.5
            for rank in set(range(WORLD)) - silent:
                self.machine.said(rank, m.Status(step=0, durable=0, tick=0, phase="start"), self.now)
            self.machine.tick(self.now, 1, stopped)
        return bool(self.machine.faults)

    @property
    def hung(self) -> list[int]:
        """Who is blamed, all of whom hang."""
        assert {fault.kind for fault in self.machine.faults} == {"hang"}
        return [fault.rank for fault in self.machine.faults]


def test_who_loads_for_long_is_waited_for() -> None:
    assert not Loading().seconds(7200)


def test_a_stopped_process_is_not() -> None:
    job = Loading()
    assert not job.seconds(FINISH + STOPPED - 1, silent=frozenset({0}), stopped=frozenset({0}))
    assert job.seconds(2, silent=frozenset({0}), stopped=frozenset({0}))
    assert job.hung == [0] and job.machine.members[0].hung


def test_one_that_says_nothing_may_hold_the_gil_for_minutes() -> None:
    job = Loading()
    assert not job.seconds(OUTSIDE_FLOOR - 1, silent=frozenset({2}))
    assert job.seconds(2, silent=frozenset({2}))
    assert job.hung == [2]


def test_where_all_are_stopped_nobody_is_to_blame() -> None:
    job, every = Loading(), frozenset(range(WORLD))
    assert job.seconds(60, silent=every, stopped=every)
    assert job.hung == [0, 1, 2] and not any(member.hung for member in job.machine.members.values())


def test_who_has_begun_is_watched_as_ever() -> None:
    job = Loading()
    for rank in range(WORLD):
        begin = m.Begin(step=STEP, durable=STEP, buffer_fd=-1, recovery="auto", from_files=True)
        job.machine.said(rank, begin, 0.0)
    assert not job.seconds(200, silent=frozenset({0}), stopped=frozenset({0}))


def test_a_watcher_that_was_stopped_itself_blames_nobody() -> None:
    job = Loading()
    job.seconds(1)
    job.now += 1000
    job.machine.tick(job.now, 1, frozenset({0}))
    assert not job.machine.faults


def test_who_does_not_come_to_a_gather_is_blamed_and_not_those_that_have_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Loading()
    monkeypatch.setattr("lastgasp.gasp.attempt._clock.monotonic", lambda: job.now)
    for rank in (0, 2):
        assert job.attempt.gather(rank, m.GatherPart(tag="chosen", payload=b"")) is None
    assert not job.seconds(GATHER_TIMEOUT - 1)
    assert job.seconds(2)
    assert job.hung == [1]
    assert [rank for rank, _ in job.attempt.failed_gathers(job.now)] == [0, 2]


def test_at_any_other_start_the_gather_alone_fails() -> None:
    job = Loading(Again(incarnation=1, step=STEP, source=0, takers=(1,), lost=(1,), port=77))
    job.machine.enter_by = 10 * GATHER_TIMEOUT
    for rank in (0, 2):
        assert job.attempt.gather(rank, m.GatherPart(tag="x", payload=b"")) is None
    job.attempt.gathers["x"].since = 0.0
    assert not job.seconds(GATHER_TIMEOUT + 1)


# -- before they have joined the next incarnation ----------------------------------------------------------


class Agreed:
    """All were told to begin again with files; rank 1 has a new process, and rank 2 is stopped."""

    def __init__(self, recovery: str = "auto") -> None:
        self.attempt, self.now = Attempt.of(hello(0, WORLD, finish_timeout=FINISH)), 0.0
        assert isinstance(self.attempt.machine, Ladder)
        self.machine = machine = self.attempt.machine
        machine.offer = Offer(attempt=0, incarnation=1, port=77)
        begin = m.Begin(step=0, durable=0, buffer_fd=-1, recovery=recovery, from_files=True)
        for rank in range(WORLD):
            machine.joined(rank, 0.0)
            machine.said(rank, begin, 0.0)
        machine.state, machine.again = "over", AGAIN
        for rank in range(WORLD):  # they have left the incarnation
            machine.gone(rank, "its connection closed", "killed", 1, 0.0)

    def seconds(self, many: float, stopped: int = 2) -> list[Action]:
        """So many go by, with one look in each half."""
        actions: list[Action] = []
        for _ in range(int(2 * many)):
            self.now += 0.5
            actions += self.machine.tick(self.now, 1, frozenset({stopped}))
        return actions


def test_a_survivor_that_is_stopped_on_its_way_gets_a_new_process() -> None:
    job = Agreed()
    assert job.seconds(FINISH + STOPPED) == []
    remark = Remark(text="rank 2 does not leave its training: it gets a new process")
    assert job.seconds(60) == [AgreedAnew(), Kill(rank=2), remark]
    assert job.attempt.again is not None and job.attempt.again.lost == (1, 2)
    assert [(fault.kind, fault.rank) for fault in job.machine.faults] == [("hang", 2)]


def test_one_that_was_stopped_for_a_moment_does_not() -> None:
    job = Agreed()
    for _ in range(10):
        assert job.seconds(FINISH) + job.seconds(1, stopped=1) == []


def test_a_dead_ranks_old_process_is_nobodys_business() -> None:
    assert Agreed().seconds(60, stopped=1) == []


def test_where_no_rank_may_be_replaced_the_others_end_their_wait_themselves() -> None:
    text = "rank 2 does not leave its training, and gets no new process: recovery=retry: no rank is replaced"
    assert Agreed("retry").seconds(60) == [Remark(text=text)]


# -- nobody can be waited for -------------------------------------------------------------------------------


NONE_LOST = Again(incarnation=1, step=STEP, source=0, takers=(), lost=(), port=77, members=(0, 1, 2, NEW))
FEWER = Again(incarnation=1, step=STEP, source=0, takers=(), lost=(1,), port=77, members=(0, 2))
MEMORY = Again(incarnation=1, step=STEP, source=0, takers=(1,), lost=(1,), port=77)


@pytest.mark.parametrize(
    ("again", "ended", "vain"),
    [
        (MEMORY, {0, 2}, True),
        (MEMORY, {0}, False),
        (MEMORY, {1}, False),
        (AGAIN, {0}, True),
        (AGAIN, {1}, True),
        (AGAIN, set[int](), False),
        (FEWER, {1}, False),
        (FEWER, {0, 1}, True),
        (NONE_LOST, {0, 1, 2}, True),
    ],
)
def test_whether_new_processes_wait_in_vain(again: Again, ended: set[int], vain: bool) -> None:
    """Those that hold the step join without them, and what is known of the dead is a fault of that incarnation."""
    assert again.in_vain(WORLD, ended) == vain


@pytest.mark.parametrize(("rank", "pid", "told"), [(0, 10, True), (1, 11, False), (1, 21, True), (1, 0, True)])
def test_the_end_of_a_new_process_is_not_taken_for_that_of_the_one_before(rank: int, pid: int, told: bool) -> None:
    """It may end before any survivor has joined."""
    controller: Any = Controller("token")
    again = msgspec.structs.replace(MEMORY, pids=(10, 11, 12))
    controller.incidents.current = SimpleNamespace(again=again)
    causes = list[Any]()
    controller._spawn = lambda work: causes.append(work.close())
    controller.report_exit(rank, "x", pid)
    assert controller.not_replaced == ({rank: "x"} if told else {})
    assert len(causes) == (pid != 21), "how it ended is not how its predecessor did"


# -- a new process that ends before the controller knows it --------------------------------------------------


def entered(job: Ladder, rank: int) -> None:
    """It has joined with the step."""
    job.joined(rank, 0.0)
    job.said(rank, m.Begin(step=STEP, durable=0, buffer_fd=-1, recovery="auto", entered=False), 0.0)


@pytest.mark.parametrize("told", [True, False])
def test_how_a_process_has_ended_that_the_others_miss_is_waited_for(told: bool) -> None:
    """They hear of it by their collectives, before its launcher has seen it."""
    attempt = Attempt.of(hello(0, WORLD, incarnation=1, finish_timeout=FINISH))
    attempt.enters_after(MEMORY)
    machine = attempt.machine
    assert isinstance(machine, Ladder)
    machine.offer = Offer(attempt=0, incarnation=2, port=78)
    for rank in (0, 2):
        entered(machine, rank)
    for rank in (0, 2):
        peer = Fault(kind="peer", rank=rank, cause="Connection closed by peer", step=STEP, seen_ns=1)
        machine.said(rank, m.Report(fault=peer), 1.0)
        machine.said(rank, m.Prepared(recovery=1, step=STEP, durable=0, usable=True), 1.0)
    assert machine.state == "preparing"
    if told:
        machine.gone(1, "killed by SIGKILL", "killed", 1, 1.2)
        again = Again(incarnation=2, step=STEP, source=0, takers=(1,), lost=(1,), port=78)
        assert machine.again == again
    else:
        machine.tick(4.0, 1, frozenset())
        assert (machine.again, machine.state) == (None, "saving")


def test_who_has_joined_with_the_step_and_has_yet_to_say_so_is_waited_for() -> None:
    """Before that it is not known whether it can be entered again."""
    attempt = Attempt.of(hello(0, WORLD, incarnation=1, finish_timeout=FINISH))
    attempt.enters_after(MEMORY)
    machine = attempt.machine
    assert isinstance(machine, Ladder)
    machine.offer, machine.holders = Offer(attempt=0, incarnation=2, port=78), frozenset(range(WORLD))
    entered(machine, 0)
    machine.joined(2, 0.0)
    machine.gone(1, "killed by SIGKILL", "killed", 1, 1.0)
    machine.said(0, m.Prepared(recovery=1, step=STEP, durable=0, usable=True), 1.0)
    machine.said(2, m.Prepared(recovery=1, step=0, durable=0, usable=True), 1.0)
    assert (machine.state, machine.again) == ("preparing", None)
    machine.said(2, m.Begin(step=STEP, durable=0, buffer_fd=-1, recovery="auto", entered=False), 2.0)
    machine.said(2, m.Prepared(recovery=1, step=STEP, durable=0, usable=True), 2.0)
    assert machine.again is not None and machine.again.lost == (1,), machine.not_in_place
