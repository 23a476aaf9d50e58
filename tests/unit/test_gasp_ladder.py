"""Which faults are answered in place, and that all others take the usual way."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lastgasp.events import Fault, FaultKind
from lastgasp.gasp import messages as m
from lastgasp.gasp.actions import Action, AgreedAnew, Kill, RecordPhase, Remark, Send
from lastgasp.gasp.again import NEW, Again, Offer
from lastgasp.gasp.auxiliary import NoBuffers
from lastgasp.gasp.ladder import Ladder
from lastgasp.gasp.members import Outcome
from lastgasp.gasp.progress import Progress
from lastgasp.gasp.saver import Saver
from lastgasp.topology import ReplicaGroups, data_parallel

WORLD, START, STEP = 3, 4, 8
OFFER = Offer(attempt=0, incarnation=1, port=77)


class Job:
    """Three ranks that began with step 4 and have completed step 8.

    Args:
        together: of each rank, in a job whose ranks save and hand over their shards together.
        elastic: ranks that can go on with fewer; fewer: how all of them can.
    """

    def __init__(
        self,
        *,
        fewer: m.Fewer | None = None,
        recovery: str = "auto",
        offer: Offer | None = OFFER,
        replicas: Any = None,
        from_files: bool = False,
        together: tuple[tuple[int, ...], ...] = (),
        elastic: frozenset[int] = frozenset(),
    ) -> None:
        groups = replicas or data_parallel(WORLD)
        world = len({rank for group in groups for rank in group})
        self.machine = Ladder(
            replicas=groups, world_size=world, finish_timeout=5, save_timeout=50, progress=Progress(limit=20)
        )
        self.machine.offer = offer
        for rank in range(world):
            self.machine.joined(rank, 0.0)
            begin = m.Begin(step=START, durable=START, buffer_fd=-1, recovery=recovery, from_files=from_files,
                            together=together, fewer=fewer or m.Fewer(rank in elastic))  # fmt: skip
            self.machine.said(rank, begin, 0.0)
            self.machine.said(rank, m.Status(step=STEP, durable=START, tick=9, phase="forward"), 0.0)

    def die(self, rank: int, kind: FaultKind = "killed") -> list[Action]:
        return self.machine.gone(rank, "process died", kind, 1, 1.0)

    def report(self, rank: int, kind: FaultKind, *, passing: bool = True) -> list[Action]:
        fault = Fault(kind=kind, rank=rank, cause="RuntimeError: x", step=STEP, seen_ns=1)
        return self.machine.said(rank, m.Report(fault=fault, passing=passing), 1.0)

    def answer(self, rank: int, *, step: int = STEP, usable: bool = True) -> list[Action]:
        said = m.Prepared(recovery=1, step=step, durable=START, usable=usable, why="" if usable else "in its update")
        return self.machine.said(rank, said, 1.0)

    def again(self) -> Again:
        assert self.machine.again is not None, self.machine.not_in_place
        return self.machine.again


def orders(actions: list[Action]) -> dict[int, Again | None]:
    """Who is told to enter again."""
    sent = [action for action in actions if isinstance(action, Send) and isinstance(action.message, m.Release)]
    return {action.rank: action.message.again for action in sent if isinstance(action.message, m.Release)}


def test_a_dead_rank_is_replaced() -> None:
    job = Job()
    job.die(1)
    job.answer(0)
    actions = job.answer(2)
    expected = Again(incarnation=1, step=STEP, source=0, takers=(1,), lost=(1,), port=77)
    assert orders(actions) == {0: expected, 2: expected}
    outcome = job.machine.outcome
    assert (job.machine.state, outcome.ending, outcome.step, outcome.savers) == ("over", "in_place", STEP, (0, 2))


def test_a_step_is_done_again_and_a_rank_that_lost_it_takes_it_from_the_others() -> None:
    job = Job()
    job.report(0, "exception")
    job.report(1, "peer")
    job.answer(0, usable=False)
    job.answer(1)
    actions = job.answer(2)
    expected = Again(incarnation=1, step=STEP, source=1, takers=(0,), lost=(), port=77)
    assert orders(actions) == {0: expected, 1: expected, 2: expected}
    assert expected.rung == "retry"


def test_a_hung_rank_is_killed_and_replaced() -> None:
    job = Job()
    now = 1.0
    while job.machine.state == "running":
        now += 1.0
        for rank in (0, 2):
            job.machine.said(rank, m.Status(step=STEP, durable=START, tick=9, phase="backward"), now)
        job.machine.tick(now, 1, frozenset({1}))
        assert now < 60
    job.answer(0)
    actions = job.answer(2)
    assert job.again().lost == (1,)
    assert [action for action in actions if isinstance(action, Kill)] == [Kill(rank=1)]
    assert set(orders(actions)) == {0, 2}


def test_a_rank_that_has_no_room_for_a_copy_of_the_state_is_not_entered_again() -> None:
    """It can be saved nevertheless."""
    job = Job()
    job.die(1)
    job.answer(0)
    no_room = m.Prepared(recovery=1, step=STEP, durable=START, usable=True, why="no room")
    actions = job.machine.said(2, no_room, 1.0)
    assert [type(action.message) for action in actions if isinstance(action, Send)] == [m.Save]
    assert (job.machine.again, job.machine.not_in_place) == (None, "rank 2: no room")


def test_the_only_copy_of_a_step_is_saved_first() -> None:
    """Here by a rank that stands one step behind, and takes the newer one."""
    job = Job()
    job.die(1)
    job.answer(0, step=STEP - 1)
    [save] = [action for action in job.answer(2) if isinstance(action, Send)]
    assert (save.rank, type(save.message), job.machine.again) == (2, m.Save, None)
    job.machine.said(2, m.Saved(recovery=1, plan=1, path="/ckpts/8", nbytes=1, first_byte_ns=1), 2.0)
    actions = job.machine.said(2, m.Committed(recovery=1, plan=1), 3.0)
    again = Again(incarnation=1, step=STEP, source=2, takers=(0, 1), lost=(1,), port=77, saved=True)
    assert orders(actions) == {0: again, 2: again}
    assert (job.machine.outcome.ending, job.machine.outcome.path) == ("in_place", "/ckpts/8")


def test_shards_that_ranks_hand_over_themselves() -> None:
    """Thirds of six ranks: a dead one's shard is held by another. That one is the last, so it is saved first."""
    job = Job(replicas=((0, 3), (1, 4), (2, 5)), together=((0, 1, 2),))
    job.report(0, "exception")
    for rank in range(6):
        actions = job.answer(rank)
    assert (job.again().takers, set(orders(actions))) == ((), set(range(6)))
    job = Job(replicas=((0, 2, 4), (1, 3, 5)), together=((0, 1),))
    job.die(4)
    for rank in (0, 1, 2, 3, 5):
        actions = job.answer(rank)
    assert (job.again().takers, job.again().lost, set(orders(actions))) == ((4,), (4,), {0, 1, 2, 3, 5})
    job = Job(replicas=((0, 2), (1, 3)), together=((0, 1),))
    job.die(0)
    for rank in (1, 2, 3):
        actions = job.answer(rank)
    assert {action.rank for action in actions if isinstance(action, Send)} == {1, 2}
    for rank in (1, 2):
        actions = job.machine.said(rank, m.Saved(recovery=1, plan=1, path="p", nbytes=1, first_byte_ns=1), 1.0)
    actions = job.machine.said(2, m.Committed(recovery=1, plan=1), 1.0)
    assert (job.again().saved, job.again().takers, set(orders(actions))) == (True, (0,), {1, 2, 3})


def test_a_shard_that_nobody_holds_is_not_handed_over() -> None:
    """The step is on disk, though."""
    job = Job(replicas=((0, 2), (1, 3)), together=((0, 1),))
    for rank in range(4):
        job.machine.said(rank, m.Status(step=STEP, durable=STEP, tick=9, phase="forward"), 0.0)
    job.die(0)
    job.die(2)
    for rank in (1, 3):
        job.answer(rank)
    assert (job.machine.again, job.machine.not_in_place) == (None, f"not every shard of step {STEP} is held in memory")


def saved_by(job: Job, *savers: int, plan: int = 1) -> dict[int, Again | None]:
    """The save that was ordered is made by these, the last of which publishes it; who is told what then."""
    for rank in savers:
        job.machine.said(rank, m.Saved(recovery=1, plan=plan, path="p", nbytes=1, first_byte_ns=1), 2.0)
    return orders(job.machine.said(savers[-1], m.Committed(recovery=1, plan=plan), 3.0))


def test_a_rank_that_is_lost_while_the_only_copy_is_saved_is_replaced_as_well() -> None:
    job = Job()
    job.die(1)
    job.answer(0, step=STEP - 1)
    job.answer(2)
    job.die(0)
    again = Again(incarnation=1, step=STEP, source=2, takers=(0, 1), lost=(0, 1), port=77, saved=True)
    assert saved_by(job, 2) == {2: again}
    assert (job.machine.outcome.ending, job.machine.not_in_place) == ("in_place", "")


@pytest.mark.parametrize("second", [0, 2], ids=["saver", "other"])
def test_a_rank_that_is_lost_while_what_all_begin_with_is_written_is_replaced_as_well(second: int) -> None:
    job = Job(from_files=True)
    job.die(1)
    job.answer(0)
    job.answer(2)
    assert (job.machine.state, job.machine.outcome.savers) == ("saving", (0,))
    job.die(second)
    other = 2 - second
    again = Again(incarnation=1, step=STEP, source=-1, takers=(0, 1, 2), lost=tuple(sorted((1, second))), port=77,
                  saved=True)  # fmt: skip
    assert saved_by(job, other, plan=job.machine.plan) == {other: again}
    assert (job.machine.outcome.ending, job.machine.outcome.savers) == ("in_place", (other,))


@pytest.mark.parametrize(
    ("change", "why"),
    [({"no_process": "none is warm"}, ": none is warm"), ({}, ": a fault of that kind is not answered in place")],
    ids=["no process", "a stop"],
)
def test_what_is_lost_during_the_save_may_cost_a_restart(change: dict[str, str], why: str) -> None:
    job = Job(from_files=True)
    job.die(1)
    job.answer(0)
    job.answer(2)
    job.machine.offer = msgspec.structs.replace(OFFER, **change)
    if not change:
        job.report(2, "sigterm")
    job.die(2)
    assert saved_by(job, 0) == {0: None}
    assert job.machine.not_in_place.startswith(f"another rank was lost while the step was saved{why}")
    assert job.machine.outcome.ending == "saved"


def test_where_an_older_step_is_saved_in_the_end_the_job_restarts() -> None:
    """The only holder of the newer one may have published it, and files tell that."""
    job = Job()
    job.die(1)
    job.answer(0, step=STEP - 1)
    job.answer(2)
    job.machine.said(2, m.Saved(recovery=1, plan=1, path="p", nbytes=1, first_byte_ns=1), 2.0)
    job.die(2)
    assert saved_by(job, 0, plan=2) == {0: None}
    assert job.machine.not_in_place.endswith(f"saved: step {STEP - 1} is the newest that is left")


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (Job(recovery="retry"), "recovery=retry: no rank is replaced"),
        (Job(recovery="restart"), "recovery=restart"),
        (Job(recovery="later"), "it is not the first training of its script: no rank is replaced"),
        (Job(offer=None), "the job's launcher cannot do it (it is none of lastgasp)"),
        (Job(offer=Offer(attempt=0, incarnation=1, port=7, no_process="no warm process")), "no warm process"),
        (Job(replicas=((0, 1, 2), (2, 0, 1))), "the ranks do not all hold the same state"),
    ],
)
def test_a_dead_rank_is_not_replaced(job: Job, why: str) -> None:
    job.die(1)
    job.answer(0)
    actions = job.answer(2)
    assert (job.machine.again, job.machine.not_in_place) == (None, why)
    assert job.machine.state == "saving"
    assert [action.rank for action in actions if isinstance(action, Send)] == [0] * (len(actions) - 1)


@pytest.mark.parametrize("comes", [True, False])
def test_a_launcher_that_has_not_looked_at_its_ranks_yet_is_waited_for(comes: bool) -> None:
    """A rank may fail in the first tenth of a second of its training."""
    job = Job(offer=None)
    job.machine.offering = lambda: True
    job.die(1)
    assert job.answer(0) + job.answer(2) + job.machine.tick(1.5, 1, frozenset()) == []
    if comes:
        job.machine.offer = OFFER
    assert job.machine.tick(2.0 if comes else 3.0, 1, frozenset())
    late = "the job's launcher has not said in time whether it can do it"
    assert (job.machine.outcome.ending, job.machine.not_in_place) == (("in_place", "") if comes else ("open", late))


def test_what_can_be_done_is_no_question_where_nothing_is_entered_again() -> None:
    job = Job(offer=None, recovery="restart")
    job.machine.offering = lambda: True
    job.die(1)
    job.answer(0)
    assert job.answer(2) and job.machine.state == "saving"


@pytest.mark.parametrize(
    ("kind", "passing", "recovery", "why"),
    [
        ("exception", False, "auto", "a fault of that kind is not answered in place (exception on rank 1)"),
        ("sigterm", True, "auto", "a fault of that kind is not answered in place (sigterm on rank 1)"),
        ("interrupt", True, "auto", "a fault of that kind is not answered in place (interrupt on rank 1)"),
        ("exit", True, "auto", "a fault of that kind is not answered in place (exit on rank 1)"),
        ("exception", True, "replace", "recovery=replace: no step is tried again"),
    ],
)
def test_a_step_is_not_done_again(kind: FaultKind, passing: bool, recovery: str, why: str) -> None:
    job = Job(recovery=recovery)
    job.report(1, kind, passing=passing)
    for rank in range(WORLD):
        job.answer(rank)
    assert (job.machine.again, job.machine.not_in_place, job.machine.state) == (None, why, "saving")


def test_a_job_that_does_not_know_of_it_hears_nothing() -> None:
    job = Job(recovery="")
    job.die(1)
    job.answer(0)
    job.answer(2)
    assert (job.machine.again, job.machine.not_in_place, job.machine.state) == (None, "", "saving")


def test_what_would_take_longer_than_a_restart_is_not_tried() -> None:
    """A dead rank's new process is not waited for in vain; a step is done again, which needs none."""
    job = Job()
    job.machine.slow = "rank 0 took 95 s"
    job.die(1)
    job.answer(0)
    job.answer(2)
    assert (job.machine.again, job.machine.not_in_place, job.machine.state) == (None, "rank 0 took 95 s", "saving")
    job = Job()
    job.machine.slow = "rank 0 took 95 s"
    job.report(1, "exception")
    for rank in range(WORLD):
        job.answer(rank)
    assert job.again().rung == "retry"


def test_a_recovery_in_place_that_hung_is_not_tried_again() -> None:
    job = Job()
    job.machine.unwise = "rank 1 hung"
    job.report(1, "exception")
    for rank in range(WORLD):
        job.answer(rank)
    assert (job.machine.again, job.machine.not_in_place, job.machine.state) == (None, "rank 1 hung", "saving")


def test_one_rank_that_cannot_be_entered_again_is_enough() -> None:
    job = Job()
    job.machine.said(2, m.Begin(step=STEP, durable=START, buffer_fd=-1), 0.5)
    job.die(1)
    job.answer(0)
    job.answer(2)
    assert job.machine.not_in_place == "not every rank can be entered again"


def test_nothing_is_done_in_place_before_a_step_was_completed() -> None:
    job = Job()
    job.machine.incarnation, job.machine.began_at = 1, STEP
    job.machine.offer = Offer(attempt=0, incarnation=2, port=78)
    job.die(1)
    job.answer(0)
    job.answer(2)
    assert job.machine.not_in_place.endswith("when the fault before was answered in place")
    assert job.machine.state == "saving"  # the step that is held in memory


def test_a_rank_that_does_not_come_back_is_a_fault() -> None:
    machine = Ladder(
        replicas=data_parallel(WORLD), world_size=WORLD, finish_timeout=5, save_timeout=50,
        progress=Progress(limit=20), incarnation=1, enter_by=30.0,
    )  # fmt: skip
    for rank in (0, 2):
        machine.joined(rank, 0.0)
        begin = m.Begin(step=STEP, durable=START, buffer_fd=-1, recovery="auto", entered=False)
        machine.said(rank, begin, 0.0)
    assert machine.tick(29.0, 1, frozenset()) == []
    assert machine.tick(30.0, 1, frozenset())
    assert [(fault.rank, fault.kind) for fault in machine.faults] == [(1, "hang")]
    for rank in (0, 2):
        machine.said(rank, m.Prepared(recovery=1, step=STEP, durable=START, usable=True), 31.0)
    assert (machine.state, machine.outcome.step, machine.outcome.lost) == ("saving", STEP, 0)


TWO_SHARDS = ((0, 2), (1,))


def test_who_begins_with_files_is_entered_again_once_every_shard_is_saved() -> None:
    job = Job(replicas=TWO_SHARDS, from_files=True)
    job.die(0)
    job.answer(1)
    job.answer(2)
    plan = job.machine.plan
    assert (job.machine.state, job.machine.again) == ("saving", None)
    for rank in (1, 2):
        saved = m.Saved(recovery=1, plan=plan, path="p", nbytes=1, first_byte_ns=1)
        job.machine.said(rank, saved, 2.0)
    actions = job.machine.said(2, m.Committed(recovery=1, plan=plan), 3.0)
    expected = Again(incarnation=1, step=STEP, source=-1, takers=(0, 1, 2), lost=(0,), port=77, saved=True)
    assert orders(actions) == {1: expected, 2: expected}
    assert (job.machine.outcome.ending, job.machine.outcome.savers) == ("in_place", (2, 1))


def test_who_begins_with_files_is_entered_again_at_once_where_the_step_is_on_disk() -> None:
    job = Job(from_files=True)
    for rank in range(WORLD):
        job.machine.said(rank, m.Status(step=STEP, durable=STEP, tick=10, phase="save"), 0.5)
    job.report(1, "exception")
    for rank in range(WORLD):
        said = m.Prepared(recovery=1, step=STEP, durable=STEP, usable=True)
        actions = job.machine.said(rank, said, 1.0)
    expected = Again(incarnation=1, step=STEP, source=-1, takers=(0, 1, 2), lost=(), port=77)
    assert orders(actions) == dict.fromkeys(range(WORLD), expected)


def test_a_rank_that_cannot_begin_again_with_files_costs_a_restart() -> None:
    job, why = Job(from_files=True), "a list of the script was changed"
    job.die(0)
    job.answer(1)
    job.machine.said(2, m.Prepared(recovery=1, step=STEP, durable=START, usable=True, why=why), 1.0)
    assert (job.machine.state, job.machine.not_in_place) == ("saving", f"rank 2: {why}")


def test_a_step_that_cannot_be_saved_is_not_gone_on_with_from_files() -> None:
    job = Job(replicas=TWO_SHARDS, from_files=True)
    job.die(1)
    job.answer(0)
    job.answer(2)
    assert (job.machine.again, job.machine.not_in_place) == (None, "no rank holds a common step")


class Second:
    """The incarnation after `Job`: rank 1 is replaced, the others hold the step."""

    def __init__(self, replicas: ReplicaGroups = (tuple(range(WORLD)),)) -> None:
        self.machine = Ladder(
            replicas=replicas, world_size=WORLD, finish_timeout=5, save_timeout=50,
            progress=Progress(limit=20), incarnation=1, enter_by=40.0, holders=frozenset({0, 2}),
        )  # fmt: skip

    def begin(self, rank: int) -> list[Action]:
        begin = m.Begin(step=STEP, durable=START, buffer_fd=-1, recovery="auto", entered=False)
        return self.machine.said(rank, begin, 1.0)

    def answer(self, rank: int, step: int) -> list[Action]:
        said = m.Prepared(recovery=1, step=step, durable=START, usable=True)
        return self.machine.said(rank, said, 1.0)


@pytest.mark.parametrize("joined", [True, False])
def test_a_survivor_that_has_not_said_what_it_holds_is_waited_for(joined: bool) -> None:
    job = Second()
    machine = job.machine
    machine.joined(2, 0.0)
    if joined:
        machine.joined(0, 0.0)
    machine.gone(2, "process died", "killed", 1, 1.0)
    if joined:
        job.answer(0, 0)  # before it has its step
    else:
        machine.joined(0, 1.0)
    assert machine.state == "preparing"
    assert machine.tick(30.0, 1, frozenset()) == []
    [asked] = job.begin(0)
    assert isinstance(asked, Send) and isinstance(asked.message, m.Prepare)
    assert job.answer(0, 0) == []  # has crossed
    actions = job.answer(0, STEP)
    [saved] = [action.message for action in actions if isinstance(action, Send)]
    assert isinstance(saved, m.Save) and saved.step == STEP


def test_each_shard_is_waited_for() -> None:
    """One rank has said that it holds its shard, and dies; the holder of the other shard has not come yet."""
    job = Second(((0,), (1, 2)))
    job.machine.joined(2, 0.0)
    job.begin(2)
    job.machine.joined(1, 0.0)
    job.machine.gone(1, "process died", "killed", 1, 1.0)
    job.answer(2, STEP)
    assert job.machine.state == "preparing"
    job.machine.joined(0, 2.0)
    job.begin(0)
    actions = job.answer(0, STEP)
    saves = [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, m.Save)]
    assert [save.step for save in saves] == [STEP, STEP]


def test_survivors_that_do_not_come_are_not_waited_for() -> None:
    late, dead = Second().machine, Second().machine
    for machine in (late, dead):
        machine.joined(2, 0.0)
        machine.gone(2, "process died", "killed", 1, 1.0)
    late.tick(30.0, 1, frozenset())
    assert late.state == "preparing"
    late.tick(41.0, 1, frozenset())
    dead.gone(0, "process died", "killed", 1, 2.0)
    assert (late.state, dead.state) == ("over", "over")


FEWER = Offer(attempt=0, incarnation=1, port=77, no_process="there is no warm process", least=2)
ALL = frozenset(range(WORLD))


def lose(job: Job, lost: int) -> dict[int, Again | None]:
    """One rank dies, the others answer."""
    job.die(lost)
    others = [rank for rank in range(WORLD) if rank != lost]
    job.answer(others[0])
    return orders(job.answer(others[1]))


def test_where_nobody_can_take_a_dead_ranks_place_the_others_go_on_with_new_numbers() -> None:
    job = Job(offer=FEWER, elastic=ALL)
    addresses = {0: "10.0.0.1", 1: "10.0.0.2", 2: "10.0.0.1"}
    job.machine.address = lambda rank: addresses[rank]
    told = lose(job, 1)
    again = job.again()
    assert told == {0: again, 2: again}
    assert (again.rung, again.members, again.lost, again.takers) == ("shrink", (0, 2), (1,), (1,))
    assert again.vanished == ("10.0.0.2",)
    own = again.for_rank(2)
    assert (own.rank, own.source, own.takers) == (1, 0, ())
    assert (own.environment["RANK"], own.environment["WORLD_SIZE"]) == ("1", "2")
    assert "RANK" not in again.environment
    assert job.machine.shrunk == (
        "rank 1 could not get new processes (there is no warm process): training goes on with 2 of 3 ranks"
    )


def test_where_a_new_process_would_take_too_long_the_others_go_on_and_take_it_in_later() -> None:
    """A job that may shrink restarted where its ranks had started slowly, though nobody waits for the new process."""
    job = Job(offer=msgspec.structs.replace(FEWER, no_process=""), elastic=ALL)
    job.machine.slow = "rank 0 took 95 s"
    lose(job, 1)
    assert (job.again().rung, job.again().members) == ("shrink", (0, 2))
    assert "rank 1 could not get new processes (rank 0 took 95 s): training" in job.machine.shrunk


def test_a_rank_that_goes_on_and_lost_the_step_takes_it_by_the_new_numbers() -> None:
    job = Job(offer=FEWER, elastic=ALL)
    job.die(0)
    job.answer(1, usable=False)
    job.answer(2)  # the only copy: it is saved first
    assert job.machine.state == "saving"
    own = msgspec.structs.replace(job.machine._once_saved or pytest.fail("no order"), aux={0: b"a", 1: b"b", 2: b"c"})
    found = own.for_rank(1)
    assert (found.rank, found.source, found.takers, found.aux) == (0, 1, (0,), {0: b"b", 1: b"c"})


@pytest.mark.parametrize(
    ("offer", "elastic", "missing", "why"),
    [
        pytest.param({"least": 0}, ALL, 0, "there is no warm process", id="not asked for"),
        pytest.param({"least": 3}, ALL, 0, "3 are the fewest, 2 are left", id="too few"),
        pytest.param({}, frozenset({0, 1}), 0, "rank 2 does not train with an ElasticLoader", id="not elastic"),
        pytest.param({"others": 1}, ALL, 0, "all of its hosts are there", id="a restart gets it back"),
        pytest.param({"others": 1}, ALL, 1, "", id="a host is gone"),
        pytest.param({"no_process": ""}, ALL, 0, "", id="it can be replaced"),
    ],
)
def test_a_job_shrinks_only_where_it_may_and_must(
    offer: dict[str, Any], elastic: frozenset[int], missing: int, why: str
) -> None:
    job = Job(offer=msgspec.structs.replace(FEWER, **offer), elastic=elastic)
    job.machine.missing = lambda others: missing
    told = lose(job, 1)
    assert bool(told) == (not why)
    assert job.machine.not_in_place.endswith(why)
    rung = "replace" if "no_process" in offer else "shrink"
    assert why or (job.again().rung, bool(job.machine.shrunk)) == (rung, rung == "shrink")


def lose_from_files(fewer: m.Fewer) -> Job:
    """A job that begins again with files loses rank 1."""
    job = Job(offer=FEWER, from_files=True, fewer=fewer)
    lose(job, 1)
    return job


def written(job: Job) -> list[Action]:
    """Rank 0 saves and publishes the step."""
    saved = m.Saved(recovery=1, plan=1, path="/ckpts/iter", nbytes=1, first_byte_ns=1, part=b"")
    job.machine.said(0, saved, 2.0)
    return job.machine.said(0, m.Committed(recovery=1, plan=1), 3.0)


def test_who_begins_with_files_goes_on_with_fewer_once_the_step_is_saved() -> None:
    job = lose_from_files(m.Fewer(may=True, parts=6))
    assert job.machine.state == "saving"
    told = orders(written(job))
    again = job.again()
    assert told == {0: again, 2: again}
    assert (again.rung, again.members, again.source, again.saved) == ("shrink", (0, 2), -1, True)
    own = again.for_rank(2)
    assert (own.rank, own.source, own.environment["RANK"], own.environment["WORLD_SIZE"]) == (1, -1, "1", "2")


@pytest.mark.parametrize(
    ("fewer", "why"),
    [
        pytest.param(m.Fewer(may=True, parts=3), "3 micro-batches cannot be shared evenly by 2 ranks", id="uneven"),
        pytest.param(m.Fewer(why="--optimizer muon"), "--optimizer muon", id="said"),
        pytest.param(m.Fewer(), "rank 0 does not train with an ElasticLoader", id="not asked for"),
    ],
)
def test_who_cannot_share_a_step_with_fewer_restarts(fewer: m.Fewer, why: str) -> None:
    job = lose_from_files(fewer)
    assert orders(written(job)) == {0: None, 2: None}
    assert (job.machine.outcome.ending, job.machine.again, job.machine.shrunk) == ("saved", None, "")
    assert job.machine.not_in_place == (
        f"there is no warm process; the job cannot go on with fewer ranks: {why}"
    )


def test_what_a_rank_has_found_out_since_it_began_keeps_the_job_from_fewer_ranks() -> None:
    """Whoever says it; where a dead rank is replaced it does not matter."""
    for offer, rung in ((FEWER, ""), (OFFER, "replace")):
        job = Job(offer=offer, elastic=ALL)
        job.die(1)
        job.answer(0)
        said = m.Prepared(recovery=1, step=STEP, durable=START, usable=True, no_fewer="it exchanges something")
        job.machine.said(2, said, 1.0)
        assert (job.machine.again.rung if job.machine.again else "") == rung
        assert job.machine.not_in_place.endswith("" if rung else "fewer ranks: it exchanges something")


GROW = Offer(attempt=0, incarnation=1, port=77, grow=(0, NEW, 1, 2))


def stopped(job: Job, now: float = 1.0) -> dict[int, m.Prepare]:
    """Who is told to stop, by the passing of time alone."""
    return prepares(job.machine.tick(now, 1, frozenset()))


def prepares(actions: list[Action]) -> dict[int, m.Prepare]:
    """The orders to stop."""
    sent = [action for action in actions if isinstance(action, Send)]
    return {one.rank: one.message for one in sent if isinstance(one.message, m.Prepare)}


def phases(actions: list[Action]) -> list[str]:
    """What goes into the incident."""
    return [action.phase for action in actions if isinstance(action, RecordPhase)]


def test_who_waits_is_taken_in_at_the_end_of_a_step() -> None:
    job = Job(offer=GROW, elastic=ALL)
    told = stopped(job)
    assert {rank: (one.faults, one.target) for rank, one in told.items()} == dict.fromkeys(ALL, ((), -1))
    assert [*map(job.answer, (0, 1))] == [[], []]
    actions = job.answer(2)
    again = job.again()
    assert (orders(actions), phases(actions)) == (dict.fromkeys(ALL, again), ["detected", "agreed", "released"])
    assert (again.rung, again.members, again.lost, again.takers, again.step) == ("grow", (0, NEW, 1, 2), (), (), STEP)
    own = again.for_rank(1)
    assert (own.rank, own.source, own.takers, own.environment["WORLD_SIZE"]) == (2, 0, (1,), "4")
    assert (job.machine.grown, job.machine.faults) == (
        "1 of 4 ranks were missing, and have new processes: training goes on with all of them", []
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param({"elastic": frozenset({0, 1})}, "not every rank trains with an ElasticLoader", id="not elastic"),
        pytest.param({"recovery": "retry"}, "not every rank can be entered again with new ones", id="no new ranks"),
        pytest.param({"replicas": ((0,), (1, 2))}, "the ranks do not all hold the same state", id="shards"),
        pytest.param({"offer": msgspec.structs.replace(GROW, grow=(0, NEW, 1))}, "", id="of other ranks"),
        pytest.param({"offer": OFFER}, "", id="nobody waits"),
    ],
)
def test_nobody_is_stopped_where_nobody_can_be_taken_in(change: dict[str, Any], why: str) -> None:
    given: dict[str, Any] = {"offer": GROW, "elastic": ALL} | change
    job = Job(**given)
    assert (stopped(job), job.machine.not_grown) == ({}, why)


# -- by handlers: MindIO's elastic training ------------------------------------------------------------

HALVES = ((0, 2), (1, 3))
FOUR = frozenset(range(4))


def halves(
    world: int = 4, *, recovery: str = "auto", elastic: frozenset[int] = FOUR, **offer: Any
) -> Job:
    """Ranks of a job of four that each hold a half of the state, and hand it over by handlers."""
    groups = tuple(tuple(rank for rank in shard if rank < world) for shard in HALVES)
    given: dict[str, Any] = {"no_process": "none is warm", "complete": 4} | offer
    return Job(recovery=recovery, offer=msgspec.structs.replace(OFFER, **given), replicas=groups, together=((0, 1),),
               elastic=elastic)  # fmt: skip


def saved(job: Job, *savers: int) -> list[Action]:
    """The save that was ordered is made by these."""
    assert job.machine.state == "saving"
    for rank in savers:
        job.machine.said(rank, m.Saved(recovery=1, plan=1, path="p", nbytes=1, first_byte_ns=1), 2.0)
    return job.machine.said(savers[0], m.Committed(recovery=1, plan=1), 2.0)


@pytest.mark.parametrize(("recovery", "warm"), [("auto", False), ("retry", True), ("fewer", True)])
def test_halves_go_on_without_a_rank_once_the_step_is_saved(recovery: str, warm: bool) -> None:
    """Without a least number of ranks; and where no rank may be replaced although one could be."""
    job = halves(recovery=recovery, no_process="" if warm else "none is warm")
    job.die(3)
    for rank in (0, 1, 2):
        job.answer(rank)
    told = orders(saved(job, 0, 1))
    again = job.again()
    assert told == dict.fromkeys((0, 1, 2), again)
    assert (again.rung, again.members, again.lost, again.saved) == ("shrink", (0, 1, 2), (3,), True)
    why = "none is warm" if not warm else f"recovery={recovery}: no rank is replaced"
    assert job.machine.shrunk == f"rank 3 could not get new processes ({why}): training goes on with 3 of 4 ranks"


@pytest.mark.parametrize(
    ("lost", "change", "why"),
    [
        pytest.param(0, {}, "rank 0 is lost", id="rank 0"),
        pytest.param(3, {"host": "10.0.0.1"}, "it has several hosts", id="hosts"),
        pytest.param(3, {"elastic": frozenset({0, 1, 3})}, "none is warm", id="not asked for"),
        pytest.param(3, {"least": 4}, "4 are the fewest, 3 are left", id="too few"),
        pytest.param(3, {"elastic": frozenset(), "recovery": "retry"}, "no rank is replaced", id="retry"),
    ],
)
def test_halves_do_not_go_on_where_the_handlers_could_not(lost: int, change: dict[str, Any], why: str) -> None:
    job = halves(**change)
    job.die(lost)
    for rank in range(4):
        if rank != lost:
            job.answer(rank)
    assert job.machine.again is None and job.machine._once_saved is None
    assert job.machine.not_in_place.endswith(why)


def test_halves_do_not_go_on_where_one_that_is_left_would_need_a_repair() -> None:
    job = halves()
    job.die(3)
    job.answer(0)
    job.answer(1)
    job.answer(2, usable=False)
    assert job.machine.not_in_place.endswith("rank 2 does not hold the step")


@pytest.mark.parametrize("kind", ["killed", "exception"])
def test_fewer_halves_answer_no_fault_in_place(kind: FaultKind) -> None:
    job = halves(3)
    job.die(2) if kind == "killed" else job.report(2, kind)
    for rank in (0, 1) if kind == "killed" else (0, 1, 2):
        job.answer(rank)
    assert (job.machine.again, job.machine.state) == (None, "saving")
    assert "trains with fewer ranks" in job.machine.not_in_place


@pytest.mark.parametrize("fails", [False, True])
def test_halves_are_saved_before_missing_ranks_are_taken_in(fails: bool) -> None:
    """And taken in where that is not possible, since nothing is wrong."""
    job = halves(3, recovery="fewer", grow=(0, 1, 2, NEW))
    assert stopped(job).keys() == {0, 1, 2}
    for rank in (0, 1, 2):
        job.answer(rank)
    if fails:
        for plan in range(1, 20):
            for rank in (0, 1, 2):
                failed = m.SaveFailed(recovery=1, plan=plan, why="the disk is full")
                job.machine.said(rank, failed, 2.0)
    else:
        saved(job, 0, 1)
    again = job.again()
    assert (again.rung, again.members, again.saved) == ("grow", (0, 1, 2, NEW), not fails)
    assert ("could not be saved before" in job.machine.grown) == fails


def test_halves_take_in_all_that_are_missing_or_nobody() -> None:
    job = halves(3, grow=(0, 1, 2, NEW), complete=5)
    assert stopped(job) == {}


def grows_from_files() -> Job:
    """All have stopped, and rank 0 is to save the step."""
    job = Job(offer=GROW, from_files=True, fewer=m.Fewer(may=True, parts=12))
    stopped(job)
    for rank in range(WORLD):
        job.answer(rank)
    assert (job.machine.state, job.machine.again) == ("saving", None)
    return job


def test_who_begins_with_files_takes_in_others_once_the_step_is_saved() -> None:
    job = grows_from_files()
    told = orders(written(job))
    again = job.again()
    assert told == dict.fromkeys(ALL, again)
    assert (again.rung, again.members, again.source, again.saved) == ("grow", GROW.grow, -1, True)
    new = msgspec.structs.replace(again.for_rank(NEW), rank=1)
    assert (new.source, new.environment["RANK"], new.environment["WORLD_SIZE"]) == (-1, "1", "4")


class Disk:
    """Where ranks save; full until it is not."""

    rank, full = 0, True

    def save(self, step: int, *more: Any) -> Any:
        """Write, or fail."""
        if self.full:
            raise OSError("disk full")
        return SimpleNamespace(path="/ckpts/8", nbytes=1, first_byte_ns=1, part=b"")

    def publish(self, result: Any, parts: Any) -> str:
        """Done."""
        return ""

    def discard(self, result: Any) -> None:
        """Nothing that is good may be thrown away."""
        raise AssertionError(result)


def carried_out(job: Job, savers: dict[int, Saver], sent: list[tuple[int, Any]], actions: list[Action]) -> list[Action]:
    """Have real savers do what they are told, until nobody says anything any more. Returns all actions."""
    done = []
    while actions:
        done.append(action := actions.pop(0))
        saver = savers[action.rank] if isinstance(action, Send) else None
        order = action.message if isinstance(action, Send) else None
        if saver and isinstance(order, m.Save):
            saver.save(order)
        elif saver and isinstance(order, m.Commit):
            saver.commit(order)
        elif saver and isinstance(order, m.Discard):
            saver.discard(order.recovery, order.plan)
        while sent:
            actions += job.machine.said(*sent.pop(0), 2.0)
    return done


def test_where_that_step_cannot_be_saved_all_train_on() -> None:
    """As if nobody had waited; a later fault is answered as ever, by ranks that have failed to save before."""
    job, sent = Job(offer=GROW, from_files=True, fewer=m.Fewer(may=True, parts=12)), list[tuple[int, Any]]()
    disk: Any = Disk()

    def saver(rank: int) -> Saver:
        def send(said: m.Message) -> bool:
            sent.append((rank, said))
            return True

        return Saver(disk, send, lambda order: None)

    savers = {rank: saver(rank) for rank in range(WORLD)}
    stopped(job)
    actions = carried_out(job, savers, sent, [one for rank in range(WORLD) for one in job.answer(rank)])
    assert {rank: one.target for rank, one in prepares(actions).items()} == dict.fromkeys(ALL, m.CALLED_OFF)
    assert RecordPhase(phase="called_off") in actions
    assert "disk full" in job.machine.not_grown and (job.machine.again, job.machine.grown) == (None, "")
    assert job.machine.outcome == Outcome() and stopped(job, 3.0) == {}
    job.machine.offer, disk.full = None, False
    job.die(1)
    said = m.Prepared(recovery=2, step=STEP, durable=START, usable=True, why="")
    carried_out(job, savers, sent, [one for rank in (0, 2) for one in job.machine.said(rank, said, 4.0)])
    assert (job.machine.state, job.machine.outcome.ending) == ("over", "saved")


@pytest.mark.parametrize("silent", [False, True])
def test_where_a_rank_is_lost_in_that_save_nobody_trains_on(silent: bool) -> None:
    """By a saver that does not answer any more, without a fault that anybody has seen; or a rank that has died."""
    job, now = grows_from_files(), 1
    if not silent:
        job.die(2)
    while silent and job.machine.plan == 1:
        now += 1
        for rank in (1, 2):
            job.machine.said(rank, m.Status(step=STEP, durable=START, tick=now, phase="save"), now)
        job.machine.tick(now, 1, frozenset({0}))
    for plan, rank in itertools.product(range(1, 9), range(WORLD)):
        job.machine.said(rank, m.SaveFailed(recovery=1, plan=plan, why="OSError: disk full"), now)
    assert (job.machine.state, job.machine.outcome.ending) == ("over", "gave_up")
    assert (job.machine.grown, job.machine.shrunk) == ("", "")


def test_a_rank_that_dies_while_the_step_is_saved_for_others_restarts_the_job() -> None:
    job = grows_from_files()
    job.die(2)
    assert orders(written(job)) == {0: None, 1: None}
    assert (job.machine.outcome.ending, job.machine.again) == ("saved", None)


def test_ranks_that_cannot_share_a_step_wait_for_more() -> None:
    job = Job(offer=GROW, from_files=True, fewer=m.Fewer(may=True, parts=9))
    assert (stopped(job), job.machine.not_grown) == ({}, "")


def test_before_a_step_is_complete_nobody_is_stopped() -> None:
    job = Job(offer=GROW, elastic=ALL)
    job.machine.members[1].step = START
    assert (stopped(job), job.machine.not_grown) == ({}, "")
    job.machine.members[1].step = START + 1
    assert len(stopped(job)) == WORLD


def test_a_hang_is_seen_while_ranks_wait_to_be_taken_in() -> None:
    """Nobody comes to the end of the step, and each attempt to take them in is called off."""
    job, now = Job(offer=None, elastic=ALL), 1.0
    job.machine.progress.limit = 90.0
    while not job.machine.faults and now < 600:
        now += 0.5
        for rank in ALL:
            job.machine.said(rank, m.Status(step=STEP, durable=START, tick=9, phase="backward"), now)
        job.machine.offer = GROW if now > 3 else None
        job.machine.tick(now, 1, frozenset())
    assert {(one.kind, one.rank) for one in job.machine.faults} == {("hang", rank) for rank in ALL}
    assert (job.machine.state, job.machine.grown) == ("preparing", "") and now < 100


@pytest.mark.parametrize("trouble", ["no room", "late", "left", "no step"])
def test_where_it_is_not_to_be_all_train_on(trouble: str) -> None:
    """Nothing goes into an incident, no process is harmed, and the next fault is answered as ever."""
    job = Job(offer=None, elastic=ALL)
    assert stopped(job, 0.5) == {}
    job.machine.offer = GROW
    stopped(job)
    job.answer(0, usable=trouble != "no step")
    job.answer(1, usable=trouble != "no step")
    if trouble == "late":
        assert job.machine.tick(20.0, 1, frozenset()) == [], "it has half a minute to come to the end of its step"
        actions = job.machine.tick(37.0, 1, frozenset())
        assert (stopped(job, 38.0), job.machine.not_grown) == ({}, "")
        assert job.machine._waiting(98.0) == GROW.grow, "once more, after a while"
    elif trouble == "left":
        actions = job.machine.said(2, m.Goodbye(), 2.0)
    else:
        said = m.Prepared(recovery=1, step=STEP, durable=START, usable=trouble == "no room", why="no room")
        actions = job.machine.said(2, said, 2.0)
    still = ALL - {2} if trouble == "left" else ALL
    assert {rank: one.target for rank, one in prepares(actions).items()} == dict.fromkeys(still, m.CALLED_OFF)
    assert (len(actions), job.machine.state, job.machine.again) == (len(still), "running", None)
    assert job.answer(2) == [], "an answer that comes now is to nothing"
    assert {one.recovery for one in prepares(job.die(1)).values()} == {2}


def test_where_steps_are_long_there_is_as_much_time_as_two_of_them_take() -> None:
    job = Job(offer=GROW, elastic=ALL)
    job.machine.save_timeout = job.machine.progress.limit = 600
    for number, now in enumerate((30.0, 60.0), 1):
        job.machine.said(0, m.Status(step=STEP + number, durable=START, tick=9 + number, phase="forward"), now)
    assert job.machine.progress.step_takes == 30.0
    assert set(stopped(job, 61.0)) == ALL
    assert job.machine.tick(125.0, 1, frozenset()) == []
    assert job.machine.tick(126.5, 1, frozenset()) != []
    job.machine.save_timeout = 1.0
    assert set(stopped(job, 187.0)) == ALL
    assert {one.target for one in prepares(job.machine.tick(194.5, 1, frozenset())).values()} == {m.CALLED_OFF}


def test_a_fault_while_all_are_stopped_is_answered_as_ever() -> None:
    job = Job(offer=GROW, elastic=ALL)
    stopped(job)
    job.answer(0)
    actions = job.die(1)
    assert phases(actions) == ["detected"]
    assert {rank: len(one.faults) for rank, one in prepares(actions).items()} == {0: 1, 2: 1}
    job.answer(0)
    job.answer(2)
    assert (job.again().rung, job.again().members, job.machine.grown) == ("replace", (), "")


class Kept:
    """What launchers know of arenas; implements `arena_decision.ArenaLook`."""

    awaited = False

    def __init__(self, steps: dict[int, tuple[int, ...]], hosts: str = "aaa") -> None:
        self._steps, self._hosts = steps, hosts

    def steps(self) -> dict[int, tuple[int, ...]]:
        return self._steps

    def hosts(self) -> dict[int, str]:
        return {rank: self._hosts[rank] for rank in self._steps}

    def buddies(self) -> dict[int, tuple[str, tuple[int, ...]]]:
        return {}

    def reference(self, rank: int, *, buddy: bool = False) -> m.ArenaRef:
        return m.ArenaRef(rank=rank, pid=7, fd=rank, identity=b"id")


ALONE = ((0,), (1,), (2,))


def in_parts(steps: dict[int, tuple[int, ...]], **more: Any) -> Job:
    """Each rank alone holds a part, and these steps are in the arenas."""
    job = Job(replicas=ALONE, **more)
    job.machine.arenas = Kept(steps)
    return job


def says(job: Job, rank: int, arena: tuple[int, ...], *, step: int = STEP, why: str = "") -> list[Action]:
    said = m.Prepared(recovery=1, step=step, durable=START, usable=True, why=why, arena=arena)
    return job.machine.said(rank, said, 1.0)


def test_a_dead_rank_without_replicas_is_replaced_from_its_arena() -> None:
    """The survivors keep what they have: one in its live state, the other, which is a step ahead, in its arena."""
    job = in_parts(dict.fromkeys(range(WORLD), (STEP, STEP - 1)))
    job.die(1)
    says(job, 0, (STEP, STEP - 1))
    says(job, 2, (STEP + 1, STEP), step=STEP + 1)
    again = job.again()
    assert (again.step, again.takers, again.lost, again.rung) == (STEP, (1,), (1,), "replace")
    assert again.arenas == (m.ArenaRef(rank=1, pid=7, fd=1, identity=b"id"),)
    assert (job.machine.outcome.lost, again.saved) == (0, False)


def test_where_no_rank_is_dead_arenas_may_be_older_than_the_live_states() -> None:
    job = in_parts(dict.fromkeys(range(WORLD), (5,)))
    job.report(1, "exception")
    for rank in range(WORLD):
        says(job, rank, (5,))
    again = job.again()
    assert (again.step, again.arenas, again.rung) == (STEP, (), "retry")


def test_steps_that_a_dead_ranks_arena_lacks_are_noted() -> None:
    job = in_parts(dict.fromkeys(range(WORLD), (5,)))
    job.die(1)
    says(job, 0, (5,))
    actions = says(job, 2, (5,))
    assert (job.again().step, job.machine.outcome.lost) == (5, 3)
    [note] = [action.text for action in actions if isinstance(action, Remark)]
    assert note.startswith("all ranks go back to step 5") and note.endswith(": 3 completed steps are done again")


@pytest.mark.parametrize(
    ("steps", "why", "reason"),
    [
        ({0: (STEP,), 1: (), 2: (STEP,)}, "", "no rank holds a common step"),
        ({0: (STEP,), 1: (STEP,), 2: (STEP,)}, "its arena is not filled", "rank 0: its arena is not filled"),
        ({0: (STEP,), 2: (STEP,)}, "", "no rank holds a common step"),
    ],
)
def test_what_no_arena_holds_is_not_begun_with(steps: dict[int, tuple[int, ...]], why: str, reason: str) -> None:
    job = in_parts(steps)
    job.die(1)
    says(job, 0, (STEP,), why=why)
    says(job, 2, (STEP,))
    assert (job.machine.again, job.machine.not_in_place) == (None, reason)


class Recorded(NoBuffers):
    """What ranks have recorded of their auxiliary states."""

    def exists(self, rank: int) -> bool:
        return True

    def state(self, rank: int, step: int) -> bytes | None:
        return b"%d of %d" % (rank, step) if rank else None


@pytest.mark.parametrize(("dead", "aux", "notes"), [(1, {1: b"1 of 8"}, 0), (0, {}, 1)])
def test_a_live_replica_that_has_gone_further_gives_what_a_dead_ranks_arena_lacks(
    dead: int, aux: dict[int, bytes], notes: int
) -> None:
    """But not its auxiliary state: each has its own."""
    job = Job(replicas=((0, 1), (2,)))
    other = 1 - dead
    job.machine.arenas = Kept({other: (STEP,), dead: (STEP - 1,), 2: (STEP,)})
    job.machine.buffers = Recorded()
    job.die(dead)
    says(job, other, (STEP,))
    actions = says(job, 2, (STEP,))
    again = job.again()
    assert (again.step, again.lost, again.arenas) == (STEP, (dead,), (job.machine.arenas.reference(other),))
    assert [one.aux for one in orders(actions).values() if one is not None] == [aux, aux]
    remarks = [action.text for action in actions if isinstance(action, Remark)]
    assert (len(remarks), job.machine.outcome.lost) == (notes, 0)
    assert all("the random state of rank 0" in text for text in remarks)


def test_a_replica_of_another_host_is_saved_and_the_job_restarts() -> None:
    job = Job(replicas=((0, 1), (2,)))
    job.machine.arenas = Kept({0: (STEP,), 1: (STEP - 1,), 2: (STEP,)}, "abb")
    job.die(1)
    says(job, 0, (STEP,))
    says(job, 2, (STEP,))
    assert job.machine.not_in_place == f"the arena of rank 1 does not hold step {STEP}: it holds {STEP - 1}"
    assert job.machine.state == "saving"


@pytest.mark.parametrize(("steps", "lost"), [((STEP, STEP - 1), 0), ((STEP - 2,), 2)])
def test_an_arena_that_nobody_is_left_to_write_is_begun_with_all_the_same(steps: tuple[int, ...], lost: int) -> None:
    """The only rank of its host is dead."""
    job = in_parts(dict.fromkeys(range(WORLD), steps))
    job.machine.arenas = Kept(dict.fromkeys(range(WORLD), steps), "aba")
    job.die(1)
    says(job, 0, steps)
    says(job, 2, steps)
    assert (job.again().step, job.again().rung, job.machine.outcome.lost) == (STEP - lost, "replace", lost)


def test_where_all_are_dead_nobody_begins_again() -> None:
    job = in_parts(dict.fromkeys(range(WORLD), (STEP, STEP - 1)))
    for rank in range(WORLD):
        job.die(rank)
    assert job.machine.again is None and job.machine.outcome.ending == "gave_up"


def test_a_new_process_that_has_not_begun_neither_writes_nor_hides_the_arena_that_it_is_to_take() -> None:
    job = in_parts(dict.fromkeys(range(WORLD), (STEP, STEP - 1)))
    job.machine.incarnation, job.machine.began_at, job.machine.holders = 1, STEP, frozenset({0, 2})
    job.machine.members[1].begun = False
    job.report(0, "exception")
    for rank in (0, 2):
        says(job, rank, (STEP,))
    actions = job.machine.said(1, m.Prepared(recovery=1, step=0, durable=0, usable=True, why=""), 1.0)
    saves = {each.rank: each.message for each in actions if isinstance(each, Send) and isinstance(each.message, m.Save)}
    assert [ref.rank for save in saves.values() for ref in save.arenas if ref.rank == 1] == [1]
    assert 1 not in saves and {save.step for save in saves.values()} == {STEP}


# -- ranks that are late -------------------------------------------------------------------------------

NEXT = Offer(attempt=0, incarnation=2, port=78)


class Late(Second):
    """The same; `come` have joined with the step, and the time of all others is over."""

    def __init__(self, *come: int, recovery: str = "auto", offer: Offer = NEXT, holders: frozenset[int] = ALL) -> None:
        super().__init__()
        self.machine.offer, self.machine.holders = offer, holders
        for rank in come:
            self.machine.joined(rank, 0.0)
            begin = m.Begin(step=STEP, durable=START, buffer_fd=-1, recovery=recovery, entered=False)
            self.machine.said(rank, begin, 1.0)

    def over(self) -> list[Action]:
        """They answer."""
        actions = self.machine.tick(41.0, 1, frozenset())
        for rank in sorted(self.machine._here):
            actions += self.answer(rank, STEP)
        return actions


def test_a_survivor_that_does_not_leave_its_training_is_replaced() -> None:
    job = Late(0, 1)
    actions = job.over()
    assert [(fault.kind, fault.rank) for fault in job.machine.faults] == [("hang", 2)]
    again = Again(incarnation=2, step=STEP, source=0, takers=(2,), lost=(2,), port=78)
    assert orders(actions) == {0: again, 1: again}
    assert (again.rung, [one for one in actions if isinstance(one, Kill)]) == ("replace", [])  # its launcher kills it


def test_a_new_process_that_waits_for_it_is_replaced_as_well() -> None:
    """It has not joined, and is not to blame. Where one rank alone is left that holds the step, that is saved first."""
    job = Late(0, holders=frozenset({0, 2}))
    job.over()
    assert [fault.rank for fault in job.machine.faults] == [2]
    assert (job.machine.state, job.machine.again) == ("saving", None)
    job.machine.said(0, m.Saved(recovery=1, plan=1, path="/ckpts/8", nbytes=1, first_byte_ns=1), 42.0)
    again = Again(incarnation=2, step=STEP, source=0, takers=(1, 2), lost=(1, 2), port=78, saved=True)
    assert orders(job.machine.said(0, m.Committed(recovery=1, plan=1), 43.0)) == {0: again}


def test_who_waits_for_a_survivor_that_has_not_joined_is_not_what_hangs() -> None:
    """Even where `hang_timeout` is shorter than what all have to come."""
    job = Late(0, 1)
    for now in range(1, 40):
        job.machine.said(0, m.Status(step=STEP, durable=START, tick=9, phase="data"), float(now))
        job.machine.said(1, m.Status(step=STEP, durable=START, tick=9, phase="backward"), float(now))
        assert job.machine.tick(float(now), 1, frozenset()) == []
    job.over()
    assert [(fault.kind, fault.rank) for fault in job.machine.faults] == [("hang", 2)]
    assert job.machine.again is not None and job.machine.again.lost == (2,)


SECOND = "no step was completed since training began, when the fault before was answered in place"
HUNG = "a fault of that kind is not answered in place (hang on rank {})"


@pytest.mark.parametrize(
    ("job", "why"),
    [
        pytest.param(Late(0, 1, recovery="retry"), "recovery=retry: no rank is replaced", id="retry"),
        pytest.param(Late(0, 1, recovery="later"), "it is not the first training of its script: no rank is replaced",
                     id="later"),
        pytest.param(Late(0, 1, offer=msgspec.structs.replace(NEXT, no_process="none is warm", least=1)),
                     "none is warm", id="no process"),
        pytest.param(Late(0, 1, 2), HUNG.format(0), id="all have joined"),
        pytest.param(Late(0, 2, holders=frozenset({0, 2})), SECOND, id="a new process, which would be late again"),
    ],
)  # fmt: skip
def test_where_no_rank_may_be_replaced_a_late_one_costs_a_restart(job: Late, why: str) -> None:
    job.over()
    assert (job.machine.state, job.machine.again, job.machine.not_in_place) == ("saving", None, why)


@pytest.mark.parametrize("trouble", ["dies", "entered", "unwise", "comes", "raises"])
def test_a_rank_that_is_late_and_another_trouble_cost_a_restart(trouble: str) -> None:
    job = Late(0, 1)
    machine = job.machine
    if trouble == "entered":
        machine.said(1, m.Begin(step=STEP, durable=START, buffer_fd=-1, recovery="auto"), 2.0)
    machine.unwise = "one hung before" if trouble == "unwise" else ""
    machine.tick(41.0, 1, frozenset())
    if trouble == "dies":
        machine.gone(1, "process died", "killed", 1, 41.0)
    elif trouble == "comes":
        machine.joined(2, 41.0)
        job.begin(2)
    elif trouble == "raises":
        fault = Fault(kind="exception", rank=1, cause="RuntimeError: x", step=STEP, seen_ns=1)
        machine.said(1, m.Report(fault=fault, passing=True), 41.0)
    for rank in sorted(machine._here):
        job.answer(rank, STEP)
    assert (machine.again, machine.state) == (None, "saving")
    assert machine.not_in_place == {"unwise": "one hung before", "comes": HUNG.format(2)}.get(trouble, SECOND)
    assert machine.outcome.step == STEP


@pytest.mark.parametrize("held", [STEP, STEP - 1])
def test_one_that_is_late_and_has_a_part_of_its_own_leaves_it_in_its_arena(held: int) -> None:
    """If that does not hold the step, the others save what they hold together."""
    job = Late(0, 1)
    job.machine.replicas = tuple((rank,) for rank in range(WORLD))
    job.machine.arenas = Kept({0: (STEP,), 1: (STEP,), 2: (held,)})
    job.machine.tick(41.0, 1, frozenset())
    for rank in (0, 1):
        said = m.Prepared(recovery=1, step=STEP, durable=START, usable=True, arena=(STEP,))
        job.machine.said(rank, said, 42.0)
    again = job.machine.again
    assert (again is not None) == (held == STEP), job.machine.not_in_place
    if again is not None:
        assert (again.lost, [one.rank for one in again.arenas or ()]) == ((2,), [2])


# -- ranks that are killed before there is a new step ----------------------------------------------------


class Unrecorded(NoBuffers):
    """Buffers in which there is no step yet."""

    def exists(self, rank: int) -> bool:
        return True


def killed_again(job: Late, rank: int) -> list[Action]:
    """After they have entered; the others answer."""
    for each in sorted(job.machine._here):
        entered = m.Begin(step=STEP, durable=START, buffer_fd=-1, recovery="auto")
        job.machine.said(each, entered, 1.5)
    actions = job.machine.gone(rank, "process died", "killed", 1, 2.0)
    for each in sorted(job.machine._here):
        actions += job.answer(each, STEP)
    return actions


@pytest.mark.parametrize("in_vain", [False, True])
def test_a_rank_that_is_killed_before_there_is_a_new_step_is_replaced_once(in_vain: bool) -> None:
    job = Late(0, 1, 2)
    job.machine.in_vain, job.machine.buffers = in_vain, Unrecorded()
    actions = killed_again(job, 1)
    again = Again(incarnation=2, step=STEP, source=0, takers=(1,), lost=(1,), port=78)
    assert orders(actions) == ({} if in_vain else {0: again, 2: again})
    assert job.machine.not_in_place == (SECOND if in_vain else "")
    told = [one for one in actions if isinstance(one, Remark)]
    assert in_vain or not told, "what all begin with has its random state"


def test_survivors_that_have_yet_to_come_are_waited_for_when_one_is_killed_meanwhile() -> None:
    """They would count as lost. The new process is not waited for: it comes when all are there."""
    job = Late(0, 1, holders=frozenset({0, 1, 3}))
    job.machine.world_size, job.machine.replicas = 4, ((0, 1, 2, 3),)
    assert orders(killed_again(job, 1)) == {}
    assert job.machine.tick(20.0, 1, frozenset()) == []
    job.machine.joined(3, 20.0)
    job.machine.said(3, m.Begin(step=STEP, durable=START, buffer_fd=-1, recovery="auto", entered=False), 20.0)
    told = orders(job.answer(3, STEP))
    assert set(told) == {0, 3} and job.machine.again is not None
    assert job.machine.again.lost == (1, 2)


def test_one_that_never_comes_is_replaced_as_well() -> None:
    job = Late(0, 1, holders=frozenset({0, 1, 3}))
    job.machine.world_size, job.machine.replicas = 4, ((0, 1, 2, 3),)
    killed_again(job, 1)
    job.machine.tick(7.0 + 2.0, 1, frozenset())  # the deadline of answers
    actions = job.machine.tick(41.0, 1, frozenset())
    assert orders(actions) == {} and job.machine.state == "saving"  # the only copy
    assert job.machine._once_saved is not None and job.machine._once_saved.lost == (1, 2, 3)


def test_where_all_are_killed_nobody_enters_again() -> None:
    job = Late(0, 1, 2)
    job.machine.arenas = Kept(dict.fromkeys(range(WORLD), (STEP,)))
    for rank in range(WORLD):
        job.machine.gone(rank, "process died", "killed", 1, 2.0)
    assert (job.machine.again, job.machine.state) == (None, "over")


@pytest.mark.parametrize("came", [WORLD, WORLD - 1])
def test_who_begins_with_files_does_so_once_more_if_all_had_come(came: int) -> None:
    job = Job(from_files=True, offer=NEXT)
    machine = job.machine
    machine.incarnation, machine.began_at = 1, STEP
    for rank in range(WORLD):
        machine.said(rank, m.Status(step=STEP, durable=STEP, tick=10, phase="save"), 0.5)
    if came < WORLD:
        del machine.members[2]
        machine._here.discard(2)
    job.die(1)
    for rank in sorted(machine._here):
        machine.said(rank, m.Prepared(recovery=1, step=STEP, durable=STEP, usable=True), 1.0)
    again = Again(incarnation=2, step=STEP, source=-1, takers=(0, 1, 2), lost=(1,), port=78)
    assert machine.again == (again if came == WORLD else None)


# -- ranks that stay in a training that begins again with files -------------------------------------------


def stays(job: Job, rank: int) -> list[Action]:
    """It says so, once the order to enter again has come."""
    for each in range(WORLD):
        job.machine.said(each, m.Status(step=STEP, durable=STEP, tick=10, phase="save"), 0.5)
    job.report(1, "exception")
    for each in range(WORLD):
        job.machine.said(each, m.Prepared(recovery=1, step=STEP, durable=STEP, usable=True), 1.0)
    return job.report(rank, "hang", passing=False)


def test_a_rank_that_stays_where_all_begin_with_files_gets_a_new_process() -> None:
    job = Job(from_files=True)
    actions = stays(job, 2)
    remark = Remark(text="rank 2 does not leave its training: it gets a new process")
    assert actions == [AgreedAnew(), Kill(rank=2), remark]
    assert job.again() == Again(incarnation=1, step=STEP, source=-1, takers=(0, 1, 2), lost=(2,), port=77)
    assert (job.again().rung, job.machine.stayed) == ("replace", (2,))
    assert job.report(2, "hang") == []
    assert job.report(0, "hang") == [AgreedAnew(), Kill(rank=0), Remark(text=remark.text.replace("2", "0"))]
    assert job.again().lost == (0, 2)


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (Job(from_files=True, recovery="retry"), "recovery=retry: no rank is replaced"),
        (Job(from_files=True, offer=msgspec.structs.replace(OFFER, no_process="none is warm")), "none is warm"),
        (Job(), ""),
    ],
    ids=["retry", "no process", "from memory"],
)
def test_where_it_can_get_none_it_ends_by_itself(job: Job, why: str) -> None:
    text = f"rank 2 does not leave its training, and gets no new process: {why}"
    assert stays(job, 2) == ([Remark(text=text)] if why else [])
    assert job.again().lost == ()
