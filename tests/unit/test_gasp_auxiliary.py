"""What dead ranks have recorded goes into the orders, complete when they leave the state machine."""

from __future__ import annotations

from typing import TypeVar

import pytest

from lastgasp.gasp import messages as m
from lastgasp.gasp.actions import Action, Remark, Send
from lastgasp.gasp.again import Offer
from lastgasp.gasp.auxiliary import LOST_STATE
from lastgasp.gasp.going_on import Fewer
from lastgasp.gasp.ladder import Ladder
from lastgasp.gasp.machine import Machine
from lastgasp.gasp.observer import Observer
from lastgasp.gasp.progress import Progress
from lastgasp.topology import data_parallel

T = TypeVar("T", bound=m.Message)
WORLD, STEP = 3, 8


class Buffers:
    """Of ranks that have recorded their step and a state, as `auxiliary.RankBuffers`."""

    def __init__(self, newest: dict[int, int], states: dict[int, bytes]) -> None:
        self.awaited, self._newest, self.states = False, newest, states

    def exists(self, rank: int) -> bool:
        return rank in self._newest

    def newest(self, rank: int) -> int:
        return self._newest.get(rank, -1)

    def state(self, rank: int, step: int) -> bytes | None:
        return self.states.get(rank) if step == STEP else None


def job(buffers: Buffers, kind: type[Machine] = Machine, recovery: str = "") -> Machine:
    """Three ranks that train at step 7; the newest heartbeat of none has told of step 8."""
    machine = kind(
        replicas=data_parallel(WORLD), world_size=WORLD, finish_timeout=5, save_timeout=50,
        progress=Progress(limit=20), buffers=buffers,
    )  # fmt: skip
    for rank in range(WORLD):
        machine.joined(rank, 0.0, pid=100 + rank)
        machine.said(rank, m.Begin(step=6, durable=6, buffer_fd=-1, recovery=recovery), 0.0)
        machine.said(rank, m.Status(step=7, durable=6, tick=9, phase="forward"), 0.0)
    return machine


def orders(actions: list[Action], kind: type[T]) -> dict[int, T]:
    """The orders of one kind, by rank."""
    sent = [action for action in actions if isinstance(action, Send)]
    return {action.rank: action.message for action in sent if isinstance(action.message, kind)}


def remarks(actions: list[Action]) -> list[str]:
    """The texts for the incident."""
    return [action.text for action in actions if isinstance(action, Remark)]


def recover(machine: Machine) -> list[Action]:
    """Rank 1 dies, the others answer; rank 2 sends its own state along. Returns the actions of the last answer."""
    machine.gone(1, "killed", "killed", 1, 1.0)
    machine.said(0, m.Prepared(recovery=1, step=STEP, durable=6, usable=True), 1.0)
    return machine.said(2, m.Prepared(recovery=1, step=STEP, durable=6, usable=True, aux=b"two"), 1.0)


def test_ranks_are_asked_to_complete_what_a_dead_one_had_completed() -> None:
    machine = job(Buffers({1: STEP}, {}))
    prepare = orders(machine.gone(1, "killed", "killed", 1, 1.0), m.Prepare)
    assert {rank: order.target for rank, order in prepare.items()} == {0: STEP, 2: STEP}
    assert [fault.step for fault in machine.faults] == [STEP]


def test_what_a_hung_rank_had_completed_is_known_from_its_buffer_not_from_its_last_heartbeat() -> None:
    """Rank 1 was stopped before its heartbeat told of step 8; nobody else holds its shard, but its arena."""

    machine = job(Buffers({1: STEP}, {1: b"one"}))
    machine.replicas = ((0,), (1,), (2,))
    machine._hang(frozenset({1}), 1, 1.0)
    machine._decide()
    assert machine.members[1].step == STEP and [fault.step for fault in machine.faults] == [STEP]


def test_a_save_carries_the_states_of_all_ranks_and_the_record_says_what_was_lost() -> None:
    saves = recover(job(Buffers({0: STEP, 1: STEP}, {0: b"zero", 1: b"one"})))
    assert [order.aux for order in orders(saves, m.Save).values()] == [{0: b"zero", 1: b"one", 2: b"two"}]
    assert remarks(saves) == []

    lost = recover(job(Buffers({0: STEP, 1: STEP}, {0: b"zero"})))
    assert [order.aux for order in orders(lost, m.Save).values()] == [{0: b"zero", 2: b"two"}]
    assert remarks(lost) == [LOST_STATE.format(rank=1, step=STEP)]


def test_a_save_is_ordered_once_other_hosts_have_reported() -> None:
    buffers = Buffers({0: STEP}, {0: b"zero"})
    buffers.awaited = True
    machine = job(buffers)
    assert (orders(recover(machine), m.Save), machine.state) == ({}, "saving")
    assert orders(machine.tick(1.1, 1, frozenset()), m.Save) == {}
    buffers.awaited, buffers.states = False, {0: b"zero", 1: b"one"}
    saves = orders(machine.tick(1.2, 1, frozenset()), m.Save)
    assert [order.aux for order in saves.values()] == [{0: b"zero", 1: b"one", 2: b"two"}]
    assert orders(machine.tick(1.3, 1, frozenset()), m.Save) == {}, "once"


def test_what_an_arena_holds_of_a_dead_rank_is_not_lost() -> None:
    """Every 5th step is copied: by step 8 the buffer of the dead rank has no state of step 5 any more."""

    class Arenas:
        awaited = False

        def steps(self) -> dict[int, tuple[int, ...]]:
            return dict.fromkeys(range(WORLD), (5, 0))

        def hosts(self) -> dict[int, str]:
            return dict.fromkeys(range(WORLD), "a")

        def buddies(self) -> dict[int, tuple[str, tuple[int, ...]]]:
            return {}

        def reference(self, rank: int, *, buddy: bool = False) -> m.ArenaRef:
            return m.ArenaRef(rank=rank)

    machine = job(Buffers({0: STEP, 1: STEP}, {}))
    machine.replicas, machine.arenas = ((0,), (1,), (2,)), Arenas()
    for member in machine.members.values():
        member.durable = 0
    machine.gone(1, "killed", "killed", 1, 1.0)
    for rank in (0, 2):
        saves = machine.said(rank, m.Prepared(recovery=1, step=STEP, durable=0, usable=True, arena=(5, 0)), 1.0)
    assert {order.step for order in orders(saves, m.Save).values()} == {5}
    assert [ref.rank for order in orders(saves, m.Save).values() for ref in order.arenas] == [0, 1, 2]
    assert remarks(saves) == []


def test_a_plan_that_became_void_before_its_order_was_sent_is_never_ordered() -> None:
    buffers = Buffers({}, {})
    buffers.awaited = True
    machine = job(buffers)
    recover(machine)
    first = machine.outcome.savers[0]
    machine.gone(first, "killed", "killed", 2, 1.1)
    buffers.awaited = False
    saves = orders(machine.tick(1.2, 1, frozenset()), m.Save)
    assert {rank: order.plan for rank, order in saves.items()} == {2 - first: 2}


@pytest.mark.parametrize("recorded", [True, False])
def test_ranks_that_enter_again_get_the_states_and_the_processes(recorded: bool) -> None:
    machine = job(Buffers({1: STEP}, {1: b"one"} if recorded else {}), Ladder, recovery="auto")
    assert isinstance(machine, Ladder)
    machine.offer = Offer(attempt=0, incarnation=1, port=77)
    actions = recover(machine)
    found = [release.again for release in orders(actions, m.Release).values()]
    expected = {1: b"one", 2: b"two"} if recorded else {2: b"two"}
    assert [(again.aux, again.pids) for again in found if again is not None] == [(expected, (100, 101, 102))] * 2
    assert len(remarks(actions)) == (not recorded)


def test_another_leader_that_asks_is_answered_with_the_states() -> None:
    machine = Observer.following(job(Buffers({1: STEP}, {1: b"one"})), "MindIO")
    machine.gone(1, "killed", "killed", 1, 1.0)
    answer = orders(machine.said(0, m.Consult(step=STEP), 2.0), m.Consulted)
    assert answer == {0: m.Consulted(step=STEP, aux={1: b"one"}, parts={})}


def test_where_each_micro_batch_is_seeded_no_random_state_is_lost() -> None:
    """With an ElasticLoader."""
    machine = job(Buffers({0: STEP, 1: STEP}, {0: b"zero"}))
    for rank in range(WORLD):
        machine.members[rank].begins(m.Begin(step=6, durable=6, buffer_fd=-1, fewer=Fewer(may=True)))
        machine.said(rank, m.Status(step=7, durable=6, tick=10, phase="forward"), 0.0)
    saves = recover(machine)
    assert [order.aux for order in orders(saves, m.Save).values()] == [{0: b"zero", 2: b"two"}]
    assert remarks(saves) == []
