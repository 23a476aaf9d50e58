"""Recovery in place over several hosts: what the launchers of other hosts say to the controller, and hear from it."""

from __future__ import annotations

import select
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import msgspec
import pytest
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from lastgasp import exitcodes
from lastgasp.gasp import messages as m
from lastgasp.gasp.again import Again
from lastgasp.gasp.attempt import Attempt
from lastgasp.gasp.cards import WorkerCard
from lastgasp.gasp.controller import Controller
from lastgasp.gasp.ends import BROKE, kind_of_end
from lastgasp.gasp.keeper import BufferKeeper
from lastgasp.gasp.link import Link
from lastgasp.gasp.serve import ControllerThread, new_token
from lastgasp.gasp.signin import Desk, Entry
from lastgasp.launch.attempts import LaunchAttempt
from lastgasp.launch.in_place import InPlace
from lastgasp.launch.restarts import Restarts
from support.fake_controller import HELLO
from support.switch_job import hello
from support.waiting import PATIENCE, until

AGAIN = Again(incarnation=1, step=8, source=0, takers=(2,), lost=(2,), port=77, host="10.0.0.1")
AGREED = m.Agreed(attempt=0, ending="in_place", again=AGAIN)


@pytest.fixture
def thread() -> Iterator[ControllerThread]:
    """A controller without ranks."""
    found = ControllerThread(new_token())
    yield found
    found.stop()


def test_a_launcher_says_what_it_can_and_hears_what_was_agreed(thread: ControllerThread) -> None:
    end, keepers = thread.endpoint, thread._controller.keepers
    assert thread.no_process(0, 0) == ""
    assert thread.no_process(0, 1) == "1 of 1 launchers of other hosts cannot be reached"
    with closing(BufferKeeper(end.address, end.token)) as keeper:
        keeper.can_fork(m.Forks(attempt=0, cannot="no warm process"))
        until(lambda: thread.no_process(0, 1) == "another host: no warm process", "it has said that it cannot")
        keeper.can_fork(m.Forks(attempt=0, cannot=""))
        until(lambda: thread.no_process(0, 1) == "", "it has said that it can")
        assert thread.no_process(1, 1), "of another attempt"
        thread._call(lambda: keepers.agreed(AGREED))
        until(lambda: keeper.agreed == AGREED, "it was told")
    until(lambda: thread.no_process(0, 1) != "", "it has left")
    with closing(BufferKeeper(end.address, end.token)) as late:
        until(lambda: late.agreed == AGREED, "who comes later is told, too")


class Handler:
    """A rank of this host."""

    def __init__(self, runs: bool) -> None:
        self.proc = self
        self.runs, self.killed, self.pid = runs, False, id(self)

    def poll(self) -> int | None:
        return None if self.runs else -9

    def kill(self) -> None:
        self.killed = True


def second(keeper: Any, handlers: list[Handler]) -> InPlace:
    """Of the second host, with the ranks 2 and 3."""
    workers = [SimpleNamespace(global_rank=rank) for rank in (2, 3)]
    context: Any = SimpleNamespace(subprocess_handlers=dict(enumerate(handlers)))
    warm: Any = SimpleNamespace(changed="", cannot_fork="")
    group: Any = SimpleNamespace(workers=workers, group_world_size=2)
    return InPlace(LaunchAttempt(number=0, keeper=keeper), group, context, warm)


@pytest.mark.parametrize(
    ("agreed", "undecided", "replaced"),
    [
        (None, True, False),
        (AGREED, True, True),
        (m.Agreed(attempt=0, ending="saved"), False, False),
        (m.Agreed(attempt=1, ending="in_place", again=AGAIN), True, False),
    ],
)
def test_who_has_lost_its_ranks_waits_for_the_decision(
    agreed: m.Agreed | None, undecided: bool, replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = second(SimpleNamespace(agreed=agreed, connected=True), [Handler(False), Handler(True)])
    started = list[int]()
    monkeypatch.setattr(InPlace, "_replace", lambda self, rank, again: started.append(rank))
    assert one.undecided == undecided
    assert one.replaced({2: "SIGKILL"}) == replaced
    assert not one.replaced({2: "SIGKILL"}), "once"
    assert started == [2] * replaced


def test_who_is_cut_off_does_not_wait() -> None:
    assert not second(SimpleNamespace(agreed=None, connected=False), []).undecided


@pytest.mark.parametrize("joined", [True, False])
def test_a_lost_rank_that_still_runs_is_killed(joined: bool) -> None:
    """The controller may know it, but cannot end it: it is on another host."""
    handlers = [Handler(True), Handler(True)]
    again = msgspec.structs.replace(AGAIN, pids=(handlers[0].pid,) * joined)
    agreed = m.Agreed(attempt=0, ending="in_place", again=again)
    second(SimpleNamespace(agreed=agreed, connected=True), handlers)._kill_lost()
    assert [handler.killed for handler in handlers] == [True, False]


@pytest.mark.parametrize(
    ("over", "left", "ending", "killed"),
    [
        (16.0, False, "", True),
        (14.0, False, "", False),
        (None, False, "", False),
        (16.0, True, "", False),
        (16.0, False, "saved", False),
    ],
)
def test_a_rank_that_does_not_hear_the_end_of_the_recovery_is_killed_by_its_own_launcher(
    over: float | None, left: bool, ending: str, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs, or was cut off, and the controller is on another host. A static rendezvous tells of no restart."""
    handlers = [Handler(True), Handler(True)]
    keeper = SimpleNamespace(agreed=None, can_fork=lambda forks: None, over_for=lambda attempt: over)
    one = second(keeper, handlers)
    one._context = create_autospec(SubprocessContext, instance=True, subprocess_handlers=dict(enumerate(handlers)))
    entries = {
        2: Entry(rank=2, pid=7, hold=1.0, directory="", left=left, ending=ending),
        3: Entry(rank=3, pid=8, hold=1.0, directory="", left=True),
        4: Entry(rank=4, pid=9, hold=1.0, directory=""),  # it has another number by now
    }
    monkeypatch.setattr(Desk, "entries", entries)
    one.look()
    assert [handler.killed for handler in handlers] == [killed, False]


def test_the_end_of_a_process_is_told_with_the_incarnation_that_it_was_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[m.Exited]()
    keeper = SimpleNamespace(agreed=AGREED, connected=True, exited=told.append)
    one = second(keeper, [Handler(False), Handler(True)])
    monkeypatch.setattr(InPlace, "_replace", lambda self, rank, again: None)
    monkeypatch.setattr(Desk, "entries", {2: Entry(rank=2, pid=7, hold=1.0, directory="")})
    one.report_exit(2, "killed by SIGKILL", 7)
    assert told == [m.Exited(attempt=0, incarnation=0, rank=2, how="killed by SIGKILL")], "its connection tells less"
    told.clear()
    assert one.replaced({2: "killed by SIGKILL"})
    one.report_exit(2, "exited with code 1", 8)
    assert told == [m.Exited(attempt=0, incarnation=1, rank=2, how="exited with code 1")]


@pytest.mark.parametrize(
    ("over", "pid", "runs", "vain"),
    [(1.0, 7, False, True), (None, 7, False, False), (1.0, 0, False, False), (1.0, 7, True, False)],
)
def test_a_new_process_is_not_waited_for_once_the_others_have_saved(
    over: float | None, pid: int, runs: bool, vain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for them. Once it has joined it ends by itself, as a survivor of its host does that still saves."""
    handlers = [Handler(False), Handler(True)]
    keeper = SimpleNamespace(agreed=AGREED, connected=True, over_for=lambda attempt: over)
    one = second(keeper, handlers)
    monkeypatch.setattr(InPlace, "_replace", lambda self, rank, again: None)
    assert not one.nobody_comes
    assert one.replaced({2: "SIGKILL"})
    handlers[0].runs, handlers[1].runs = True, runs
    entry = Entry(rank=2, pid=pid or handlers[0].pid, hold=1.0, directory="")
    monkeypatch.setattr(Desk, "entries", {2: entry})
    assert one.nobody_comes == vain


def test_the_end_of_a_survivor_on_its_way_is_of_the_incarnation_that_it_was_to_enter() -> None:
    """Its host may have no rank that is replaced. The others would wait for it until their deadline."""
    told = list[m.Exited]()
    one = second(SimpleNamespace(agreed=AGREED, connected=True, exited=told.append), [Handler(True), Handler(False)])
    one.report_exit(3, "killed by SIGKILL", 7)
    assert told == [m.Exited(attempt=0, incarnation=1, rank=3, how="killed by SIGKILL")]


@pytest.mark.parametrize(
    ("rank", "incarnation", "missed"),
    [(3, 1, True), (2, 1, True), (3, 0, True), (2, 0, False), (3, 2, False)],
)
def test_whose_end_the_next_incarnation_has_to_know(rank: int, incarnation: int, missed: bool) -> None:
    """A launcher that has not heard of the order counts by the one before; of that was the rank that is replaced."""
    controller: Any = Controller("token")
    controller.incidents.current = attempt = Attempt.of(hello(0, 4))
    attempt.machine.again = AGAIN  # type: ignore[attr-defined]
    controller._spawn = lambda work: work.close()
    controller._not_joining(m.Exited(attempt=0, incarnation=incarnation, rank=rank, how="x"))
    assert controller.not_replaced == ({rank: "x"} if missed else {})


def test_the_end_of_a_process_that_has_never_joined_is_told() -> None:
    """Ranks of other hosts would wait for it until their deadline; here another rank has joined, or none has."""
    told = list[m.Exited]()
    one = second(SimpleNamespace(agreed=None, connected=True, exited=told.append), [Handler(False), Handler(True)])
    one.report_exit(2, "exited with code 87", 7)
    one.report_exits({3: "exited with code 87"})
    assert told == [m.Exited(attempt=0, incarnation=0, rank=rank, how="exited with code 87") for rank in (2, 3)]


def test_the_end_of_a_process_between_two_trainings_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of its connection is none of its process there; in the middle of one it does not tell how it ended."""
    told = list[m.Exited]()
    one = second(SimpleNamespace(agreed=None, connected=True, exited=told.append), [Handler(False), Handler(True)])
    entries = {rank: Entry(rank=rank, pid=7, hold=1.0, directory="", left=rank == 2) for rank in (2, 3)}
    monkeypatch.setattr(Desk, "entries", entries)
    for rank in (2, 3):
        one.report_exit(rank, "killed by SIGKILL", 7)
    assert told == [m.Exited(attempt=0, incarnation=0, rank=rank, how="killed by SIGKILL") for rank in (2, 3)]


def test_the_record_names_the_host_of_a_dead_rank_and_how_it_ended(thread: ControllerThread) -> None:
    """Its launcher knows, and the connection of a rank on another host does not tell."""
    end, exited = thread.endpoint, m.Exited(attempt=0, incarnation=0, rank=1, how="killed by SIGKILL")
    with ExitStack() as stack:
        keeper = stack.enter_context(closing(BufferKeeper(end.address, end.token)))
        links = [stack.enter_context(closing(Link(end.address, end.token, hello(rank, 2)))) for rank in range(2)]
        for rank, link in enumerate(links):
            card = WorkerCard(rank=rank, node=f"h{rank}", pid=7 + rank, device="", versions={}, started_ns=1)
            link.send(m.Register(card=card))
            link.send(m.Begin(step=3, durable=3, buffer_fd=-1))
        attempt = thread._controller.attempt
        assert attempt is not None
        until(lambda: len(attempt.begun) == 2, "both train")
        keeper.exited(exited)
        until(lambda: bool(attempt.machine.faults), "it is seen")
        [fault] = attempt.machine.faults
        assert (fault.kind, fault.rank, fault.cause) == ("killed", 1, "on h1: killed by SIGKILL")


@pytest.mark.parametrize(
    ("how", "kind"),
    [(f"{BROKE}: timed out", "lost"), ("exited with code 3", "exit"), ("killed by SIGKILL", "killed"), ("", "killed")],
)
def test_what_kind_of_fault_an_end_is(how: str, kind: str) -> None:
    assert kind_of_end(how) == kind


def test_who_waits_for_a_rank_that_ended_between_two_trainings_is_told_at_once(thread: ControllerThread) -> None:
    end, exited = thread.endpoint, m.Exited(attempt=0, incarnation=0, rank=1, how="killed by SIGKILL")
    with closing(BufferKeeper(end.address, end.token)) as keeper:
        links = [Link(end.address, end.token, hello(rank, 2)) for rank in (0, 1)]
        with closing(links[0]) as link:
            link.send(m.GatherPart(tag="begin", payload=b""))
            links[1].send(m.Goodbye())
            attempt = thread._controller.attempt
            assert attempt is not None
            until(lambda: bool(attempt.gathers) and attempt.was_ended_by(1), "one waits, and the other has ended")
            links[1].close()
            keeper.exited(exited)
            found = list[m.FromController]()
            while not any(isinstance(one, m.Gathered) for one in found):
                assert select.select([link.fileno()], [], [], PATIENCE)[0]
                found += link.receive()
            link.send(m.Goodbye())
            until(lambda: attempt.was_ended(), "it ends, too")
    [answer] = [one for one in found if isinstance(one, m.Gathered)]
    assert answer.missing == "rank 1 is gone: killed by SIGKILL"
    assert not attempt.machine.faults


@pytest.mark.parametrize("early", [True, False])
def test_who_waits_for_such_a_rank_is_told_at_once(early: bool, thread: ControllerThread) -> None:
    """Whether it was the first, and nobody had joined yet, or others were waiting already."""
    end, exited = thread.endpoint, m.Exited(attempt=0, incarnation=0, rank=0, how="exited with code 87")
    with closing(BufferKeeper(end.address, end.token)) as keeper:
        if early:
            keeper.exited(exited)
            until(lambda: thread._controller.keepers._put_off == [exited], "the controller was told")
        with closing(Link(end.address, end.token, HELLO)) as link:
            link.send(m.GatherPart(tag="begin", payload=b""))
            if not early:
                until(lambda: bool(thread._controller.attempt.gathers), "it waits")  # type: ignore[union-attr]
                keeper.exited(exited)
            found = list[m.FromController]()
            while not any(isinstance(one, m.Gathered) for one in found):
                assert select.select([link.fileno()], [], [], PATIENCE)[0]
                found += link.receive()
        until(lambda: keeper.refused == 0, "the launchers of all hosts are told")
    [answer] = [one for one in found if isinstance(one, m.Gathered)]
    assert answer.missing == "rank 0 is gone: exited with code 87"
    assert thread.refused(0) and not thread.refused(1)


def test_a_refusal_on_the_first_host_is_told_to_all_others(thread: ControllerThread) -> None:
    """Also to those that come back after a lost connection."""
    end = thread.endpoint
    with closing(BufferKeeper(end.address, end.token)) as keeper:
        until(lambda: keeper.connected, "it is connected")
        thread.expect(3)
        thread.report_exit(0, "exited with code 1")
        thread.report_exit(0, "exited with code 87")
        until(lambda: keeper.refused == 3, "it is told")
    with closing(BufferKeeper(end.address, end.token)) as keeper:
        until(lambda: keeper.refused == 3, "it is told later")


def test_that_the_first_launcher_ends_the_job_is_told_to_all_others(thread: ControllerThread) -> None:
    """With its own code, so that no host's scheduler starts again what would end in the same way."""
    end = thread.endpoint
    with closing(BufferKeeper(end.address, end.token)) as keeper:
        until(lambda: keeper.connected, "it is connected")
        thread.end_job(exitcodes.NO_PROGRESS, "stopped: no new step")
        until(lambda: keeper.over is not None, "it is told")
        restarts = Restarts(always=True, over=keeper.over)
    restarts.ended(3, used=True, progressed=True, how=frozenset({1}))
    assert restarts.should_give_up and restarts.exit_code == exitcodes.NO_PROGRESS
    assert restarts.verdict == "the launcher of the first host has ended the job: stopped: no new step"
    with closing(BufferKeeper(end.address, end.token)) as keeper:
        until(lambda: keeper.over is not None, "it is told later")


def test_a_launcher_without_the_controller_hears_that_all_ranks_have_completed_their_training(
    thread: ControllerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own may have, while one of another host was killed before its end: that is to be restarted."""
    end = thread.endpoint
    monkeypatch.setattr(Desk, "entries", {1: Entry(rank=1, pid=7, hold=1.0, directory="", left=True)})
    with closing(BufferKeeper(end.address, end.token)) as keeper:
        here = LaunchAttempt(number=0, keeper=keeper)
        with ExitStack() as stack:
            links = [stack.enter_context(closing(Link(end.address, end.token, hello(rank, 2)))) for rank in range(2)]
            links[1].send(m.Goodbye())
            assert here.completed() == ""
            links[0].send(m.Goodbye())
            until(lambda: here.completed() == "training", "it is told")
            assert LaunchAttempt(number=1, keeper=keeper).completed() == ""
            with closing(BufferKeeper(end.address, end.token)) as late:
                until(lambda: late.completed == 0, "who comes later is told, too")
            links[0].close()
            stack.enter_context(closing(Link(end.address, end.token, hello(0, 2))))
            until(lambda: here.completed() == "", "the next training has begun")
    assert LaunchAttempt(number=0).completed() == "training", "it knows no others"


def test_a_refusal_on_another_host_is_the_end() -> None:
    """Its launcher ends with it, and another start would end in the same way."""
    restarts = Restarts(always=True, elsewhere=True)
    restarts.ended(0, used=True, progressed=False, refused=True, how=frozenset({1}))
    assert restarts.should_give_up and restarts.exit_code == exitcodes.REFUSED
    assert restarts.verdict.startswith("stopped: a rank of another host refused to start")
    assert "What its launcher has written there says why" in restarts.verdict
