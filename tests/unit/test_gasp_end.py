"""The clean end of a rank: never taken for a fault, however late the controller gets to hear of it."""

from __future__ import annotations

import fcntl
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lastgasp import exitcodes
from lastgasp import session as session_module
from lastgasp.config import GaspConfig
from lastgasp.errors import ControlError
from lastgasp.events import Fault
from lastgasp.gasp import leaving as leaving_module
from lastgasp.gasp import messages as m
from lastgasp.gasp import processor as processor_module
from lastgasp.gasp.again import Again
from lastgasp.gasp.link import Link
from lastgasp.gasp.operator import ended_by_all
from lastgasp.gasp.serve import ControllerThread, new_token
from lastgasp.session import Session
from lastgasp.topology import Place, data_parallel
from support.engine_job import held
from support.fake_controller import FakeController, FakeSource
from support.switch_job import JobHere, hello, job_here
from support.waiting import until

SAVED = m.Release(recovery=1, ending="gave_up", step=-1, path="", reason="nobody holds it")


NO_PROCESS = 2**30
"""Greater than any process id of Linux."""


@contextmanager
def two_links() -> Iterator[tuple[ControllerThread, list[Link]]]:
    """Two ranks by their connections alone: what they say is said by the test."""
    controller = ControllerThread(new_token())
    try:
        end = controller.endpoint
        first, second = (Link(end.address, end.token, hello(rank, 2)) for rank in range(2))
        with closing(first), closing(second):
            for link in (first, second):
                link.send(m.Begin(step=3, durable=3, buffer_fd=-1))
            controller._call(lambda: setattr(controller._controller._peers[1], "pid", NO_PROCESS))
            yield controller, [first, second]
    finally:
        controller.stop()


def faults(controller: ControllerThread) -> list[Fault]:
    """What the controller takes for a fault."""
    attempt = controller._controller.attempt
    assert attempt is not None
    return list(attempt.machine.faults)


def member(controller: ControllerThread, rank: int) -> tuple[bool, str]:
    """Whether it has said goodbye, and how it went."""
    attempt = controller._controller.attempt
    found = attempt.machine.members.get(rank) if attempt is not None else None
    return (found.left, found.gone) if found is not None else (False, "")


def unsent(link: Link) -> int:
    """Bytes that have not arrived in the controller's socket."""
    return int.from_bytes(fcntl.ioctl(link.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def arrived(link: Link) -> None:
    """What was sent is in the controller's socket: the kernel may pace small messages."""
    until(lambda: unsent(link) == 0, "the kernel to deliver it all")


def saw_death(controller: ControllerThread, at_ns: int) -> None:
    """The watch sees that rank 1's process has died."""
    controller._controller._saw_death(1, NO_PROCESS, "process 7 died", at_ns)


def test_a_goodbye_that_is_still_in_the_socket_counts_before_the_death_behind_it() -> None:
    """The watch of processes sees the end first: its word is in the queue before the loop reads the socket."""
    with two_links() as (controller, links):
        until(lambda: member(controller, 1) == (False, ""), "rank 1 to be known")
        with held(controller):
            links[1].send(m.Goodbye())
            arrived(links[1])
            saw_death(controller, time.time_ns())
        until(lambda: member(controller, 1)[0], "the goodbye to be heard")
        links[1].close()
        links[0].send(m.Goodbye())
        until(lambda: member(controller, 0)[0], "rank 0 to end")
        assert faults(controller) == []


def test_what_a_rank_raised_counts_before_its_death() -> None:
    """Else the record says that it was killed."""
    fault = Fault(kind="exception", rank=1, cause="ValueError: boom", step=3, seen_ns=1)
    with two_links() as (controller, links):
        with held(controller):
            for _ in range(300):
                links[1].send(m.Status(step=3, durable=3, tick=1, phase="data"))
            links[1].send(m.Report(fault=fault))
            arrived(links[1])
            saw_death(controller, time.time_ns())
        until(lambda: len(faults(controller)) == 2, "both to be known")
        first = faults(controller)[0]
        assert (first.kind, first.cause) == ("exception", "ValueError: boom")


def test_the_launchers_word_waits_for_the_goodbye_as_well() -> None:
    with two_links() as (controller, links):
        with held(controller):
            links[1].send(m.Goodbye())
            arrived(links[1])
            controller.report_exit(1, "exited with code 1")
        until(lambda: member(controller, 1)[0], "the goodbye to be heard")
        controller.report_exit(1, "exited with code 1")
        links[0].send(m.Goodbye())
        until(lambda: member(controller, 0)[0], "rank 0 to end")
        assert faults(controller) == []


def meets(controller: ControllerThread, link: Link, rank: int) -> None:
    """This rank takes part in a gather, and the controller knows."""
    link.send(m.GatherPart(tag="x", payload=bytes([rank])))
    attempt = controller._controller.attempt
    assert attempt is not None
    until(lambda: "x" not in attempt.gathers or rank in attempt.gathers["x"].parts, "the part to arrive")


def hears(link: Link) -> m.Gathered:
    """What comes of the gather."""
    while True:
        for message in link.receive():
            if isinstance(message, m.Gathered):
                return message


def leaves(controller: ControllerThread, link: Link, rank: int) -> None:
    """It says goodbye and closes its connection, and the controller knows."""
    link.send(m.Goodbye())
    until(lambda: member(controller, rank)[0], "the goodbye to be heard")
    link.close()
    until(lambda: controller._controller._peers[rank].writer is None, "the connection to end")


def test_what_waits_in_a_later_training_waits_for_a_rank_that_has_ended_the_earlier_one() -> None:
    with two_links() as (controller, links):
        end = controller.endpoint
        leaves(controller, links[1], 1)
        with closing(Link(end.address, end.token, hello(1, 2))) as ahead:
            meets(controller, ahead, 1)
            leaves(controller, links[0], 0)
            with closing(Link(end.address, end.token, hello(0, 2))) as behind:
                meets(controller, behind, 0)
                assert [hears(link).parts for link in (ahead, behind)] == [(b"\0", b"\1")] * 2
                assert controller._controller.attempt is not None and controller._controller.attempt.training == 1
                for rank, link in ((1, ahead), (0, behind)):
                    leaves(controller, link, rank)


def raises(link: Link, rank: int) -> None:
    """Of its own."""
    link.send(m.Report(fault=Fault(kind="exception", rank=rank, cause="Diverged: nan", step=3, seen_ns=1)))


def answers(link: Link) -> None:
    """What it holds; nobody has completed a step."""
    link.send(m.Prepared(recovery=1, step=3, durable=3, usable=True))


@pytest.mark.parametrize("directory", ["", "/another"])
def test_a_script_that_handles_what_all_ranks_raise_comes_to_its_next_training(directory: str) -> None:
    with two_links() as (controller, links), ExitStack() as stack:
        end, more = controller.endpoint, {"directory": directory} if directory else {}
        first = controller._controller.attempt
        assert first is not None
        raises(links[0], 0)
        for link in links:
            answers(link)
        until(lambda: first.machine.state == "over", "the end of the recovery")
        links[0].close()
        both = list[Link]()

        def joins(rank: int) -> None:
            both.append(stack.enter_context(closing(Link(end.address, end.token, hello(rank, 2, **more)))))

        early = threading.Thread(target=joins, args=(0,))  # rank 1 may be about to raise the same
        early.start()
        early.join(0.5)
        assert early.is_alive() and controller._controller.attempt is first
        raises(links[1], 1)
        early.join(60.0)
        joins(1)
        second = controller._controller.attempt
        assert second is not None and second is not first and second.training == 1
        for rank, link in enumerate(both):
            meets(controller, link, rank)
        assert [len(hears(link).parts) for link in both] == [2, 2]
        assert second.machine.state == "running" and controller.over_for(0) is None
        for rank, link in enumerate(both):
            leaves(controller, link, rank)


@pytest.mark.parametrize("directory", ["", "/another"])
def test_a_script_that_handles_what_one_rank_raises_does_not(directory: str) -> None:
    """The others were told to end their training, and have ended."""
    with two_links() as (controller, links):
        end, more = controller.endpoint, {"directory": directory} if directory else {}
        raises(links[0], 0)
        for link in links:
            answers(link)
        first = controller._controller.attempt
        assert first is not None
        until(lambda: first.machine.state == "over", "the end of the recovery")
        saw_death(controller, 123)
        until(lambda: bool(first.machine.members[1].gone), "rank 1 to end")
        with pytest.raises(ControlError, match=r"Diverged: nan.* ended the training of all ranks"):
            Link(end.address, end.token, hello(0, 2, **more))


def test_what_waits_for_a_rank_whose_process_dies_behind_its_training_waits_no_longer() -> None:
    with two_links() as (controller, links):
        meets(controller, links[0], 0)
        leaves(controller, links[1], 1)
        saw_death(controller, 123)
        assert hears(links[0]).missing == "rank 1 is gone: process 7 died"
        leaves(controller, links[0], 0)


def test_a_death_without_a_goodbye_is_a_fault_while_the_connection_is_open() -> None:
    """Freeing the memory of a killed process takes a while, and only then its connection ends."""
    with two_links() as (controller, _):
        saw_death(controller, 123)
        until(lambda: bool(faults(controller)), "the fault to be seen")
        assert [(fault.rank, fault.cause, fault.seen_ns) for fault in faults(controller)] == [
            (1, "process 7 died", 123)
        ]


def goodbye_of(job: JobHere, rank: int) -> threading.Thread:
    thread = threading.Thread(target=job.ranks[rank].processor.goodbye)
    thread.start()
    return thread


def test_closing_returns_only_when_the_controller_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_module, "FAREWELL", 60.0)
    with job_here(2) as job:
        with held(job.controller):
            leaving = goodbye_of(job, 1)
            leaving.join(0.3)
            assert leaving.is_alive()
        leaving.join(60.0)
        assert not leaving.is_alive()
        assert member(job.controller, 1) == (True, "")


def test_a_controller_that_does_not_answer_is_waited_for_in_bounds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processor_module, "FAREWELL", 0.2)
    with FakeController() as controller:
        place = Place(rank=1, world_size=2, replicas=((0, 1),), attempt=0, job="job")
        config = GaspConfig.resolve(Path("/nowhere"))
        session = Session(config, place, FakeSource(), session_module.Contact(controller.address, "t" * 64))
        session.close()
    assert any("has not confirmed" in record.message for record in caplog.records)


# -- the process that goes on ----------------------------------------------------------------------


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Codes with which the session has ended this process."""
    codes: list[int] = []
    monkeypatch.setattr(leaving_module, "leave_now", codes.append)
    return codes


def lone_session(tmp_path: Path, patience: float = 60.0) -> Session:
    """One rank on its own. `patience`: seconds after a recovery until its process is ended."""
    place = Place(rank=0, world_size=1, replicas=data_parallel(1), attempt=0, job="job")
    session = Session(GaspConfig.resolve(tmp_path), place, FakeSource(), None)
    session._patience = patience
    return session


def test_a_rank_that_is_closed_is_not_ended_by_a_recovery_from_before(tmp_path: Path, ended: list[int]) -> None:
    session = lone_session(tmp_path)
    session._schedule_leaving(SAVED)
    session.close()
    assert session._leaving._timer is not None
    session._leaving._timer.join(60.0)
    session._leaving._leave(lambda: 85)  # the timer's thread may have been on its way
    assert ended == []


def test_a_rank_that_is_closed_is_not_ended_by_a_recovery_that_comes_after(tmp_path: Path, ended: list[int]) -> None:
    session = lone_session(tmp_path)
    session.close()
    session._schedule_leaving(SAVED)
    assert session._leaving._timer is None
    assert ended == []


def test_a_rank_that_comes_to_another_training_has_handled_what_it_raised(tmp_path: Path, ended: list[int]) -> None:
    session = lone_session(tmp_path)
    session.place = replace(session.place, world_size=2)
    session.training_started(3, 3)
    session.fault("exception", "Diverged: nan")
    session.close(goodbye=False)
    timer = session._leaving._timer
    assert timer is not None and timer.interval == session_module.OWN_FAULT_GRACE
    later = lone_session(tmp_path)
    timer.join(60.0)
    later.close()
    assert ended == []


def test_a_rank_is_not_ended_for_what_all_have_raised(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script may have handled that, and take its time before the next training, or come to none."""
    monkeypatch.setattr(leaving_module.Leaving, "_raised", None)
    place = Place(rank=0, world_size=2, replicas=((0, 1),), attempt=0, job="job")
    with two_links() as (controller, links), ExitStack() as stack:
        first, end = controller._controller.attempt, controller.endpoint
        assert first is not None
        leaving = leaving_module.Leaving(partial(ended_by_all, end.address, end.token, place))
        leaving.raised()
        raises(links[0], 0)
        for link in links:
            answers(link)
        until(lambda: first.machine.state == "over", "the end of the recovery")
        links[0].close()
        leaving._leave(lambda: 85)
        assert ended.pop() == 85, "rank 1 has not raised"
        raises(links[1], 1)
        until(lambda: first.machine.members[1].fault is not None, "the other one to raise")
        leaving._leave(lambda: 85)
        leaving._stays = False
        later = stack.enter_context(closing(Link(end.address, end.token, hello(1, 2))))
        assert controller._controller.attempt is not first
        leaving._leave(lambda: 85)  # the other one trains again
        assert ended == [] and leaving._stays
        leaves(controller, later, 1)
        monkeypatch.setattr(leaving_module.Leaving, "_raised", None)
        leaving._stays = False
        leaving._leave(lambda: 85)
        assert ended == [85], "it has not raised itself"


def test_a_rank_whose_training_failed_is_still_ended(tmp_path: Path, ended: list[int]) -> None:
    session = lone_session(tmp_path, patience=0.2)
    session._schedule_leaving(SAVED)
    session.close(goodbye=False)
    until(lambda: ended == [85], "the end of the process")


@pytest.mark.parametrize("from_files", [True, False])
def test_who_does_not_leave_its_training_says_so_before_it_ends_where_others_begin_with_files(
    from_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed then, where it gets a new process; else, and where the others need its memory, it ends itself."""
    said = list[m.Message]()

    def tell(message: m.Message) -> bool:
        said.append(message)
        return True

    monkeypatch.setattr(leaving_module, "TOLD", 0.001)
    again = Again(incarnation=1, step=3, source=-1 if from_files else 0, takers=(0,), lost=(), port=1, saved=True)
    with closing(lone_session(tmp_path)) as session:
        monkeypatch.setattr(session._processor, "tell", tell)
        assert session._stuck(again) == exitcodes.SAVED
    faults = [(one.fault.kind, one.fault.rank) for one in said if isinstance(one, m.Report)]
    assert faults == ([("hang", 0)] if from_files else [])
    assert [one.text for one in said if isinstance(one, m.Noted)] == [leaving_module.STAYS.format(rank=0)]
