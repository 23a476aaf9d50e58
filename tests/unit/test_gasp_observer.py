"""The machine of a job that MindIO leads: it keeps, records, releases; and leads where MindIO does not."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
import pytest

from lastgasp.events import Fault, Incident
from lastgasp.gasp import messages as m
from lastgasp.gasp.actions import Action, Kill, RecordPhase, Send, WentOn
from lastgasp.gasp.attempt import fill_incident
from lastgasp.gasp.fewer_ranks import by_leader
from lastgasp.gasp.machine import Machine
from lastgasp.gasp.observer import IN_MINDX, PATIENCE, Observer
from lastgasp.gasp.progress import Progress

M = TypeVar("M", bound=m.Message)
SAVED = m.Saved(recovery=0, plan=4, path="/c/4", nbytes=10, first_byte_ns=5, part=b"p")


def job(world: int = 3, leader: str = "MindIO") -> Observer:
    """All ranks have joined and are at step 4."""
    replicas = (tuple(range(world)),)
    machine = Machine(replicas, world, finish_timeout=1.0, save_timeout=5.0, progress=Progress(limit=1.0))
    observer = Observer.following(machine, leader)
    for rank in range(world):
        assert observer.joined(rank, 0.0) == []
        observer.said(rank, m.Begin(step=0, durable=0, buffer_fd=-1), 0.0)
        observer.said(rank, m.Status(step=4, durable=0, tick=1, phase="data"), 0.0)
    return observer


def sent(actions: list[Action], kind: type[M]) -> dict[int, M]:
    """Messages of one kind, by rank."""
    return {a.rank: a.message for a in actions if isinstance(a, Send) and isinstance(a.message, kind)}


def test_a_death_orders_nothing() -> None:
    observer = job()
    assert observer.gone(1, "killed", "killed", 7, 1.0) == [RecordPhase(phase="detected")]
    assert observer.state == "preparing"
    assert observer.tick(1.0 + PATIENCE - 0.1, 8, frozenset()) == []


def test_what_savers_pass_on_reaches_the_publisher_and_all_are_released() -> None:
    observer = job()
    observer.gone(1, "killed", "killed", 7, 1.0)
    assert RecordPhase(phase="agreed") in observer.said(0, m.Consult(step=4), 2.0)
    observer.said(0, m.Consult(step=4, saved=SAVED), 3.0)
    assert sent(observer.said(2, m.Consult(step=4), 3.0), m.Consulted)[2].parts == {0: b"p"}
    actions = observer.said(2, m.Ended(ending="saved", step=4, path="/c/4", reason=""), 4.0)
    assert {rank: release.step for rank, release in sent(actions, m.Release).items()} == {0: 4, 2: 4}
    out = observer.outcome
    assert (out.ending, out.savers, out.nbytes, out.lost, out.first_byte_ns) == ("saved", (0,), 10, 0, 5)
    assert [(unused.rank, unused.why) for unused in out.unused] == [(1, "gone: killed"), (2, "not chosen by MindIO")]
    assert not [action for action in actions if isinstance(action, Kill)]


FEWER = m.Resize(incarnation=1, step=4, members=(0, 2))


def why_not(observer: Observer, rank: int, message: m.Resize = FEWER) -> str:
    """What the controller answers who says that these go on alone."""
    [answer] = sent(observer.said(rank, message, 2.0), m.ResizeNoted).values()
    return answer.why


def test_those_that_are_left_may_go_on_alone_where_all_say_the_same() -> None:
    observer = job(leader=IN_MINDX)
    observer.gone(1, "killed", "killed", 7, 1.0)
    assert [why_not(observer, rank) for rank in (0, 2)] == ["", ""]
    again = observer.again
    assert again is not None and (again.members, again.lost, again.rung, again.from_files) == (
        (0, 2), (1,), "shrink", False,
    )  # fmt: skip
    assert "not as (0, 2) from step 5" in why_not(observer, 2, m.Resize(incarnation=1, step=5, members=(0, 2)))
    observer.goes_on()
    assert (observer.outcome.ending, observer.outcome.step, observer.outcome.lost) == ("in_place", 4, 0)


@pytest.mark.parametrize("from_files", [False, True])
def test_the_record_says_what_all_begin_with(from_files: bool) -> None:
    observer, incident = job(leader=IN_MINDX), Incident(id="1", job="job", attempt=0, world_size=3)
    observer.said(0, m.Begin(step=0, durable=0, buffer_fd=-1, from_files=from_files), 0.0)
    observer.gone(1, "killed", "killed", 7, 1.0)
    assert [why_not(observer, rank) for rank in (0, 2)] == ["", ""]
    observer.goes_on()
    fill_incident(incident, observer)
    assert (incident.rung, incident.from_files) == ("shrink", from_files)


GROWN = m.Resize(incarnation=2, step=4, members=(0, -1, 1, 2))


def test_new_processes_are_taken_in_without_a_fault() -> None:
    observer = job(leader=IN_MINDX)
    first = observer.said(0, GROWN, 2.0)
    assert first[:2] == [RecordPhase(phase="detected"), RecordPhase(phase="agreed")]
    assert [why_not(observer, rank, GROWN) for rank in (1, 2)] == ["", ""]
    again = observer.again
    assert again is not None and (again.rung, again.lost, again.numbers) == ("grow", (), {0: 0, 1: 2, 2: 3})
    assert "not as (0, -1, 1, 2) from step 5" in why_not(observer, 1, msgspec.structs.replace(GROWN, step=5))
    observer.goes_on()
    assert (observer.outcome.ending, observer.outcome.step, observer.outcome.lost) == ("in_place", 4, 0)
    assert by_leader(IN_MINDX, again, 3).startswith(f"{IN_MINDX} takes in 1 of 4 ranks")


@pytest.mark.parametrize("members", [(0, -1, 1), (0, -1, 2, 1), (0, -1, 1, 2)])
def test_nobody_is_taken_in_without_all_others_or_with_a_fault(members: tuple[int, ...]) -> None:
    observer = job(leader=IN_MINDX)
    if members == GROWN.members:
        observer.said(0, m.Report(fault=Fault(kind="exception", rank=0, cause="x", step=4, seen_ns=1)), 1.0)
    assert "not taken in" in why_not(observer, 0, msgspec.structs.replace(GROWN, members=members))
    assert observer.again is None


def test_ranks_that_have_joined_again_can_save_before_they_train() -> None:
    """Where MindIO makes no checkpoint either."""
    observer = job(leader=IN_MINDX)
    observer.said(0, m.Begin(step=4, durable=0, buffer_fd=-1, entered=False), 0.0)
    fault = Fault(kind="peer", rank=0, cause="the others do not come", step=4, seen_ns=7)
    observer.said(0, m.Report(fault=fault), 1.0)
    actions = observer.said(0, m.Ended(ending="gave_up", step=-1, path="", reason="no checkpoint"), 2.0)
    assert set(sent(actions, m.Prepare)) == {0, 1, 2} and observer.leading


def test_a_dump_calls_it_off() -> None:
    observer = job(leader=IN_MINDX)
    observer.gone(1, "killed", "killed", 7, 1.0)
    assert why_not(observer, 0) == ""
    observer.said(0, m.Ended(ending="saved", step=4, path="/c/4", reason=""), 4.0)
    assert observer.again is None and why_not(observer, 2) == f"{IN_MINDX} does not lead any more"


@pytest.mark.parametrize(
    ("rank", "members", "why"),
    [(0, (0, 1), r"ranks \[1\] are not there"), (2, (0,), "not known why"), (0, (2, 0), "not known why")],
)
def test_who_cannot_go_on_alone_is_told_so(rank: int, members: tuple[int, ...], why: str) -> None:
    observer = job()
    observer.gone(1, "killed", "killed", 7, 1.0)
    assert re.search(why, why_not(observer, rank, m.Resize(incarnation=1, step=4, members=members)))
    assert observer.again is None


def test_without_a_fault_nobody_goes_on_alone() -> None:
    assert "not known why" in why_not(job(), 0)


def test_a_repair_in_place_asks_without_an_incident() -> None:
    observer = job()
    [answer] = observer.said(0, m.Consult(step=4), 2.0)
    assert isinstance(answer, Send) and observer.state == "running"
    observer.gone(1, "killed", "killed", 7, 3.0)
    assert sent(observer.tick(3.0 + PATIENCE, 9, frozenset()), m.Prepare)  # it has not saved for this one


def test_parts_of_another_step_are_not_passed_on() -> None:
    observer = job()
    observer.said(0, m.Consult(step=4, saved=SAVED), 3.0)
    assert sent(observer.said(1, m.Consult(step=5), 3.0), m.Consulted)[1].parts == {}


@pytest.mark.parametrize("word", ["ended", "save failed", "patience"])
def test_it_leads_where_mindio_does_not(word: str) -> None:
    observer = job()
    observer.said(0, m.Report(fault=Fault(kind="exception", rank=0, cause="x", step=4, seen_ns=1)), 1.0)
    if word == "ended":
        actions = observer.said(0, m.Ended(ending="gave_up", step=-1, path="", reason="no"), 2.0)
    elif word == "save failed":
        actions = observer.said(1, m.SaveFailed(recovery=0, plan=4, why="disk full"), 2.0)
    else:
        actions = observer.tick(1.0 + PATIENCE, 9, frozenset())
    assert set(sent(actions, m.Prepare)) == {0, 1, 2}
    for rank in range(3):
        answer = m.Prepared(recovery=observer.recovery, step=4, durable=0, usable=True)
        actions = observer.said(rank, answer, 3.0)
    saver = 2 if word == "save failed" else 1  # rank 0 raised; rank 1 could not save
    assert set(sent(actions, m.Save)) == {saver}
    assert observer.leading
    assert observer.said(0, m.Ended(ending="gave_up", step=-1, path="", reason="late"), 4.0) == []


def test_in_taskd_it_waits_for_as_long_as_it_takes() -> None:
    observer = job(leader=IN_MINDX)
    observer.gone(1, "killed", "killed", 7, 1.0)
    assert observer.tick(10_000.0, 8, frozenset()) == []


def test_a_rank_that_is_started_again_is_welcome() -> None:
    observer = job()
    observer.gone(1, "killed", "killed", 7, 1.0)
    assert observer.joined(1, 2.0) == []
    assert observer.members[1].here


def test_once_all_have_begun_again_the_fault_is_repaired_and_the_next_one_is_another() -> None:
    observer = job()
    observer.gone(1, "killed", "killed", 7, 1.0)
    observer.said(0, m.Consult(step=4), 2.0)
    observer.joined(1, 2.0)
    again = m.Begin(step=4, durable=0, buffer_fd=-1)
    assert observer.said(0, again, 3.0) == observer.said(1, again, 3.0) == []
    assert observer.said(2, again, 3.0) == [WentOn(replaced=(1,))]
    out = observer.outcome
    assert (observer.state, out.ending, out.step, out.lost) == ("running", "in_place", 4, 0)
    observer.renew()
    observer.gone(2, "killed", "killed", 7, 4.0)
    assert sent(observer.tick(4.0 + PATIENCE, 9, frozenset()), m.Prepare)  # nothing was saved for this one


def test_all_gone_silently_is_on_record() -> None:
    observer = job(world=2)
    observer.gone(1, "killed", "killed", 7, 1.0)
    actions = observer.gone(0, "exit code 2", "killed", 8, 2.0)
    assert RecordPhase(phase="released") in actions
    assert (observer.outcome.ending, observer.state) == ("gave_up", "over")
    assert "MindIO ended all ranks" in observer.outcome.reason


def test_a_hung_rank_is_killed_for_mindio_to_notice() -> None:
    """The others are stuck in the collective that it does not join."""
    observer = job()
    actions: list[Action] = []
    now = 0.0
    while not actions and now < 60:
        now += 0.5
        for rank in (0, 2):
            observer.said(rank, m.Status(step=4, durable=0, tick=2, phase="backward"), now)
        actions = observer.tick(now, 9, frozenset({1}))
    assert Kill(rank=1) in actions
    assert [(fault.kind, fault.rank) for fault in observer.faults] == [("hang", 1)]


def test_after_the_end_a_rank_that_does_not_exit_is_killed() -> None:
    observer = job()
    observer.gone(1, "killed", "killed", 7, 1.0)
    observer.said(0, m.Consult(step=4, saved=SAVED), 2.0)
    observer.said(0, m.Ended(ending="saved", step=4, path="/c/4", reason=""), 3.0)
    observer.said(0, m.Status(step=4, durable=0, tick=9, phase="data"), 3.0)
    kills: list[Action] = []
    now = 3.0
    while not kills and now < 200:
        now += 0.5
        kills = observer.tick(now, 9, frozenset({2}))
    assert kills == [Kill(rank=2)]
    assert observer.tick(now, 9, frozenset({2})) == []


def killed(rank: int) -> m.Report:
    """Its process says that the leader has another one take its place."""
    return m.Report(fault=Fault(kind="killed", rank=rank, cause="moved", step=4, seen_ns=1))


def test_who_said_that_it_is_moved_and_goes_on_itself_was_not_moved() -> None:
    """A new process of an earlier switch, which was called off, made rank 1 believe it; rank 2 is moved."""
    observer = job(leader=IN_MINDX)
    for rank in (1, 2):
        observer.said(rank, killed(rank), 1.0)
    observer.joined(2, 2.0)
    again = m.Begin(step=4, durable=0, buffer_fd=-1)
    assert observer.said(1, again, 3.0) == observer.said(2, again, 3.0) == []
    assert not observer.gives_way(1) and observer.lost == {}
    assert [fault.rank for fault in observer.faults] == [2]
    assert observer.said(0, again, 3.0) == [WentOn(replaced=(2,))]
    observer.renew()
    assert RecordPhase(phase="detected") in observer.said(1, killed(1), 4.0)  # the next one is another


def test_a_sigterm_behind_it_does_not_make_it_stay() -> None:
    """ClusterD deletes its pod before the new process joins."""
    observer = job(leader=IN_MINDX)
    observer.said(1, killed(1), 1.0)
    observer.said(1, m.Report(fault=Fault(kind="sigterm", rank=1, cause="x", step=4, seen_ns=2)), 2.0)
    assert observer.gives_way(1)
