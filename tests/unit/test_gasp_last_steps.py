"""What the record says of a rank that is gone: the step that it died in, not what was last heard; and how it ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from lastgasp.config import GaspConfig
from lastgasp.crash_safe_buffer import CrashSafeBuffer
from lastgasp.errors import ControlError, NothingLoads
from lastgasp.events import Fault, Incident, decode_incident
from lastgasp.exception_origin import cause_of
from lastgasp.gasp import messages as m
from lastgasp.gasp.actions import RecordPhase
from lastgasp.gasp.again import Again, Offer
from lastgasp.gasp.incidents import Incidents
from lastgasp.gasp.keeper import BufferKeeper, states
from lastgasp.gasp.ladder import Ladder
from lastgasp.gasp.link import Link
from lastgasp.gasp.records import RecordWriter
from lastgasp.gasp.serve import ControllerThread, new_token
from lastgasp.session import Contact, Session
from lastgasp.topology import Place, data_parallel, host_identity
from support.fake_controller import TOKEN, FakeController, FakeSource
from support.switch_job import hello
from support.waiting import PATIENCE, until

T = TypeVar("T", bound=m.Message)


class Ranks:
    """Two ranks by their connections alone: what they say is said by the test."""

    def __init__(self, directory: Path, identity: str) -> None:
        self.directory, self._stack = directory, ExitStack()
        self.controller = ControllerThread(new_token())
        self._stack.callback(self.controller.stop)
        self.controller._controller._identity = identity
        end = self.controller.endpoint
        # Rank 0 is on another host: it will be late with its answer, and is not to be killed for that.
        here = {"host": host_identity(), "pid": os.getpid()}
        hellos = [hello(0, 2, directory=str(directory)), hello(1, 2, directory=str(directory), **here)]
        self.links = [self._stack.enter_context(closing(Link(end.address, end.token, one))) for one in hellos]

    def close(self) -> None:
        """End it all."""
        self._stack.close()

    def begin(self, rank: int, step: int, buffer_fd: int = -1) -> None:
        """Its training begins."""
        self.links[rank].send(m.Begin(step=step, durable=step, buffer_fd=buffer_fd))

    def heard(self, rank: int, step: int) -> None:
        """A heartbeat, and that it has arrived."""
        self.links[rank].send(m.Status(step=step, durable=0, tick=1, phase="data"))
        until(lambda: self.member_step(rank) == step, "the heartbeat to be heard")

    def member_step(self, rank: int) -> int:
        """As the controller knows."""
        attempt = self.controller._controller.attempt
        member = attempt.machine.members.get(rank) if attempt is not None else None
        return -2 if member is None else member.step

    def gone(self, rank: int) -> bool:
        """As the controller knows."""
        attempt = self.controller._controller.attempt
        return attempt is not None and bool(attempt.machine.members[rank].gone)

    def die(self, rank: int, how: str = "") -> None:
        """Its process ended; `how` as its launcher says, empty where nobody knows."""
        if how:
            self.controller.report_exit(rank, how)
        else:
            self.links[rank].close()

    def over(self, *others: int) -> Incident:
        """The record, once these have answered that they have nothing to save."""
        self.fault()
        for rank in others:
            self.links[rank].send(m.Prepared(recovery=1, step=0, durable=0, usable=True, why="", aux=b"", target=-1))
        path = self.directory / "incidents"
        until(lambda: path.is_dir() and any(path.glob("*.json")), "the record")
        [found] = path.glob("*.json")
        return decode_incident(found.read_bytes())

    def fault(self) -> Fault:
        """The first one."""
        attempt = self.controller._controller.attempt
        assert attempt is not None
        until(lambda: bool(attempt.machine.faults), "the fault to be seen")
        return attempt.machine.faults[0]


@contextmanager
def two_ranks(directory: Path, identity: str = "") -> Iterator[Ranks]:
    with closing(Ranks(directory, identity or host_identity())) as found:
        yield found


@contextmanager
def buffer_at(*steps: int) -> Iterator[CrashSafeBuffer]:
    """A buffer with the records of these steps; behind them the next step's update has begun."""
    with closing(CrashSafeBuffer(64)) as buffer:
        for step, settled in [*((step, True) for step in steps), (steps[-1] + 1, False)]:
            buffer.begin(step, settled)[:4] = b"mine"
            buffer.end(4)
        yield buffer


# -- which step ------------------------------------------------------------------------------------


def test_a_dead_ranks_step_is_that_of_its_buffer(tmp_path: Path) -> None:
    """Its last heartbeat is half a second old, which is many steps."""
    with buffer_at(12, 13) as buffer, two_ranks(tmp_path) as ranks:
        ranks.begin(1, 3, buffer.fd)
        ranks.heard(1, 11)
        ranks.die(1)
        assert ranks.fault().step == 13


def test_on_another_host_its_launcher_reports_it(tmp_path: Path) -> None:
    with buffer_at(12, 13) as buffer, two_ranks(tmp_path, "another boot:1") as ranks:
        end, keepers = ranks.controller.endpoint, ranks.controller._controller.keepers
        with closing(BufferKeeper(end.address, end.token)) as keeper:
            ranks.begin(1, 3, buffer.fd)
            ranks.heard(1, 11)
            until(lambda: bool(keepers._writers and keeper._buffers), "the launcher to keep the buffer")
            ranks.die(1)
            until(lambda: ranks.fault().step == 13, "the launcher's word")


def test_a_buffer_gives_its_newest_step_first() -> None:
    with buffer_at(12, 13) as buffer:
        assert list(states(buffer.fd)) == [13, 12, 14]


def test_without_a_box_the_last_heartbeat_counts(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as ranks:
        ranks.begin(1, 3)
        ranks.heard(1, 11)
        ranks.die(1)
        assert ranks.fault().step == 11


def test_what_a_rank_said_itself_is_not_corrected(tmp_path: Path) -> None:
    with buffer_at(12, 13) as buffer, two_ranks(tmp_path) as ranks:
        ranks.begin(1, 3, buffer.fd)
        said = Fault(kind="exception", rank=1, cause="ValueError: boom", step=12, seen_ns=1)
        ranks.links[1].send(m.Report(fault=said))
        assert ranks.fault() == said
        ranks.die(1)
        until(lambda: ranks.member_step(1) == 13, "its end")
        assert ranks.fault() == said


# -- how -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "kind"), [("exited with code 1", "exit"), ("killed by SIGKILL", "killed"), ("", "killed")]
)
def test_only_a_signal_kills(tmp_path: Path, how: str, kind: str) -> None:
    with two_ranks(tmp_path) as ranks:
        ranks.begin(1, 3)
        until(lambda: ranks.member_step(1) == 3, "its beginning")
        ranks.die(1, how)
        assert ranks.fault().kind == kind


def test_how_it_ended_may_become_known_later(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as ranks:
        ranks.begin(1, 3)
        ranks.die(1)
        assert ranks.fault().kind == "killed"
        ranks.controller.report_exit(1, "exited with code 3")
        until(lambda: ranks.fault().kind == "exit", "the launcher's word")
        assert ranks.fault().cause.endswith(", exited with code 3")


# -- before training -------------------------------------------------------------------------------


def test_a_rank_that_ends_while_it_starts_leaves_a_true_record(tmp_path: Path) -> None:
    """Whatever is on disk: nobody has come so far as to know it."""
    with two_ranks(tmp_path) as ranks:
        for rank in range(2):
            ranks.links[rank].send(m.Status(step=0, durable=0, tick=1, phase="start"))
        ranks.die(1, "exited with code 1")
        record = ranks.over(0)
    assert (record.ending, record.reason) == ("nothing_to_save", "training had not begun")
    assert [(fault.kind, fault.step) for fault in record.faults] == [("exit", -1)]


def test_a_rank_that_raised_while_it_started_is_listed_once(tmp_path: Path) -> None:
    """Its process ends before the others have answered: with what it raised, and not for another reason."""
    with two_ranks(tmp_path) as ranks:
        raised = Fault(kind="exception", rank=1, cause="ValueError: no such file", step=-1, seen_ns=1)
        ranks.links[1].send(m.Report(fault=raised))
        ranks.fault()
        ranks.die(1, "exited with code 1")
        until(lambda: ranks.gone(1), "its end to be seen")
        record = ranks.over(0)
    assert [(fault.kind, fault.rank, fault.cause) for fault in record.faults] == [("exception", 1, raised.cause)]
    assert (record.ending, record.reason) == ("nothing_to_save", "training had not begun")


def test_a_mere_resume_is_no_fault_survived(tmp_path: Path) -> None:
    """The attempt before could not start, so that it held nothing; only a step that is completed is progress."""
    with closing(RecordWriter()) as writer:
        incidents = Incidents(writer)
        incidents.begin(hello(0, 1, attempt=0, directory=str(tmp_path)))
        incidents.phase(RecordPhase(phase="detected"))
        incidents.phase(RecordPhase(phase="released"))
        second = incidents.begin(hello(0, 1, attempt=1, directory=str(tmp_path)))
        for message in (m.Begin(step=7, durable=7, buffer_fd=-1), m.Status(step=7, durable=7, tick=1, phase="data")):
            second.heard_step(0, message)
            incidents.reached(7)
        assert incidents.tally.survived == 0
        second.heard_step(0, m.Status(step=8, durable=7, tick=2, phase="data"))
        incidents.reached(8)
        assert incidents.tally.survived == 1


def test_what_is_called_off_is_no_incident(tmp_path: Path) -> None:
    """All were stopped to take in others, which could not be: no record is left, and none that the next fault has."""
    with closing(RecordWriter()) as writer:
        incidents = Incidents(writer)
        attempt = incidents.begin(hello(0, 1, attempt=0, directory=str(tmp_path)))
        attempt.heard_step(0, m.Begin(step=7, durable=7, buffer_fd=-1))
        trained = attempt.trained_s
        for phase in ("detected", "agreed", "called_off"):
            incidents.phase(RecordPhase(phase=phase))
        assert (attempt.incident, attempt.over_since, attempt.trained_s) == (None, None, trained)


def test_replaced_ranks_are_counted_over_all_incarnations_of_an_attempt(tmp_path: Path) -> None:
    with closing(RecordWriter()) as writer:
        incidents, seen = Incidents(writer), []
        for attempt, incarnation, lost in ((0, 0, (1,)), (0, 1, ()), (0, 2, (0, 1)), (0, 3, ()), (1, 0, ())):
            found = incidents.begin(
                hello(0, 2, attempt=attempt, incarnation=incarnation, directory=str(tmp_path))
            )  # fmt: skip
            seen.append(found.replaced)
            assert isinstance(found.machine, Ladder)
            found.machine.again = Again(
                incarnation=incarnation + 1, step=3, source=0, takers=lost, lost=lost, port=1
            )  # fmt: skip
    assert seen == [(), (1,), (1,), (1, 0, 1), ()]


def test_before_the_first_step_nothing_is_said_to_be_on_disk(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as ranks:
        for rank in range(2):
            ranks.begin(rank, 0)
        until(lambda: (ranks.member_step(0), ranks.member_step(1)) == (0, 0), "both to begin")
        ranks.die(1)
        assert ranks.over(0).reason == "no step had been completed"


@contextmanager
def starting(directory: Path) -> Iterator[tuple[FakeController, Session]]:
    """A rank that has joined and has not begun, and who hears it."""
    place = Place(rank=1, world_size=2, replicas=data_parallel(2), attempt=0, job="job")
    with FakeController() as controller:
        session = Session(GaspConfig.resolve(directory), place, FakeSource(), Contact(controller.address, TOKEN))
        try:
            yield controller, session
        finally:
            session.close(goodbye=False)


@pytest.mark.parametrize("alike_before", [False, True])
def test_a_comparison_that_failed_concludes_nothing_where_ranks_were_alike_before(
    alike_before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank has died, or the controller: what ranks of a recovery in place hold has been compared before."""

    def lost(tag: str, payload: bytes) -> list[bytes]:
        raise ControlError("rank 0 is gone")

    with starting(tmp_path) as (_, session):
        monkeypatch.setattr(session, "gather", lost)
        assert session.compare_replicas(lambda: {"model": b"1"}, alike_before) == alike_before
        assert session.place.replicas == (data_parallel(2) if alike_before else ((0,), (1,)))


def test_what_ends_a_start_is_reported_to_the_controller(tmp_path: Path) -> None:
    with starting(tmp_path) as (controller, session):
        session.failed_to_start(RuntimeError("iter_0000007: size mismatch"), "exception")
        fault = controller.hear(m.Report).fault
        assert (fault.kind, fault.rank, fault.step) == ("exception", 1, -1)
        assert fault.cause == "RuntimeError: iter_0000007: size mismatch"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ValueError("\nbad\nand more"), "ValueError: bad"),
        (ValueError("Error(s) in loading state_dict for GPT:\n\tsize mismatch for w"),
         "ValueError: Error(s) in loading state_dict for GPT: size mismatch for w"),
        (NothingLoads("/ckpts", {"/ckpts/iter_0000010": "does not load: KeyError: rng"}),
         "NothingLoads: no checkpoint in /ckpts loads, and 1 of them verify; nothing was moved: iter_0000010: "
         "does not load: KeyError: rng"),
        (KeyError(), "KeyError"),
    ],
)  # fmt: skip
def test_a_cause_holds_what_its_first_line_announces(error: Exception, cause: str) -> None:
    assert cause_of(error).startswith(cause) and "\n" not in cause_of(error)
    assert len(cause_of(ValueError(f"{error}:" + "\nx" * 9999))) < 1000


def test_a_rank_that_could_not_start_because_of_a_peer_is_not_a_cause(tmp_path: Path) -> None:
    with starting(tmp_path) as (controller, session):
        session.failed_to_start(ControlError("rank 0 is gone"), "exception")
        assert controller.hear(m.Report).fault.kind == "peer"


def test_once_training_has_begun_nothing_is_reported(tmp_path: Path) -> None:
    with starting(tmp_path) as (controller, session):
        session.training_started(3, 3)
        session.failed_to_start(RuntimeError("later"), "exception")
        session.note("behind it")
        said = [controller.next()]
        while not isinstance(said[-1], m.Noted):
            said.append(controller.next())
        assert not [message for message in said if isinstance(message, m.Report)]


def test_a_recovery_in_place_that_has_failed_says_what_it_has_cost(tmp_path: Path) -> None:
    """Nobody was left who held the step in memory: the launcher's next attempt begins with what is on disk."""
    with closing(RecordWriter()) as writer:
        incidents = Incidents(writer)
        first = incidents.begin(hello(0, 2, attempt=0, directory=str(tmp_path)))
        assert isinstance(first.machine, Ladder)
        incidents.phase(RecordPhase(phase="detected"))
        first.machine.again = Again(incarnation=1, step=8, source=0, takers=(1,), lost=(1,), port=1)
        first.machine.outcome.ending, first.machine.outcome.step, first.machine.outcome.lost = "in_place", 8, 0
        incidents.phase(RecordPhase(phase="released"))
        incidents.begin(hello(0, 2, attempt=0, incarnation=1, directory=str(tmp_path)))
        incidents.resumed(8)
        assert first.incident is not None and first.incident.steps_lost == 0
        incidents.begin(hello(0, 2, attempt=1, directory=str(tmp_path)))
        for _ in range(2):
            incidents.resumed(5)
        assert first.incident.steps_lost == 3
        assert first.incident.notes == [
            "step 8 was held in memory alone, and went with the processes: the job went on from step 5"
        ]


def test_a_rank_that_gets_no_new_process_is_known_to_the_next_incarnation_at_once(tmp_path: Path) -> None:
    """The launcher says so before anybody has joined that; otherwise the rank would be waited for."""
    with ExitStack() as stack:
        controller = ControllerThread(new_token())
        stack.callback(controller.stop)
        end = controller.endpoint

        def joins(rank: int, incarnation: int) -> Link:
            one = hello(rank, 3, directory=str(tmp_path), incarnation=incarnation)
            link = stack.enter_context(closing(Link(end.address, end.token, one)))
            link.send(m.Begin(step=3, durable=3, buffer_fd=-1, recovery="auto", entered=not incarnation))
            return link

        links = [joins(rank, 0) for rank in range(3)]
        until(lambda: controller.may_enter_again(0) == 1, "the ranks to have begun")
        controller.offer(Offer(attempt=0, incarnation=1, port=1))
        links.pop().close()
        for link in links:
            order = heard(link, m.Prepare)
            link.send(m.Prepared(recovery=order.recovery, step=4, durable=3, usable=True))
        released = heard(links[0], m.Release)
        assert released.again is not None and released.again.lost == (2,)
        controller.report_exit(2, "could not be replaced: the script has changed")
        again = heard(joins(0, 1), m.Prepare)
        assert [(fault.rank, fault.cause) for fault in again.faults] == [
            (2, "could not be replaced: the script has changed")
        ]


def test_the_end_of_a_process_that_was_replaced_is_not_that_of_the_one_in_its_place(tmp_path: Path) -> None:
    """Its launcher may report it in the moment in which the first survivor enters again."""
    with ExitStack() as stack:
        controller = ControllerThread(new_token())
        stack.callback(controller.stop)
        end = controller.endpoint
        links = [
            stack.enter_context(closing(Link(end.address, end.token, hello(rank, 3, directory=str(tmp_path)))))
            for rank in range(3)
        ]
        for link in links:
            link.send(m.Begin(step=3, durable=3, buffer_fd=-1, recovery="auto"))
        until(lambda: controller.may_enter_again(0) == 1, "the ranks to have begun")
        controller.offer(Offer(attempt=0, incarnation=1, port=1))
        links.pop().close()
        for link in links:
            order = heard(link, m.Prepare)
            link.send(m.Prepared(recovery=order.recovery, step=4, durable=3, usable=True))
        assert heard(links[0], m.Release).again is not None

        def reports_and_enters() -> None:
            controller._controller.report_exit(2, "killed by SIGKILL", 12345)
            controller._controller._begin_attempt(hello(0, 3, directory=str(tmp_path), incarnation=1))

        controller._call(reports_and_enters)
        until(lambda: not controller._controller._tasks, "the report to have been taken")
        current, before = controller._controller.incidents.current, controller._controller.incidents.previous
        assert current is not None and current.hello.incarnation == 1 and list(current.machine.faults) == []
        assert before is not None and [fault.cause for fault in before.machine.faults] == [
            "its connection closed, killed by SIGKILL"
        ]


def heard(link: Link, kind: type[T]) -> T:
    """The next message of this kind."""
    link._socket.settimeout(PATIENCE)
    while True:
        for message in link.receive():
            if isinstance(message, kind):
                return message
