"""A file system that stalls, and code that raises: what they cost, and what they must not."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lastgasp import _fs
from lastgasp.events import Fault, decode_incident
from lastgasp.gasp import controller as controller_module
from lastgasp.gasp import messages as m
from lastgasp.gasp import process_monitor as process_monitor_module
from lastgasp.gasp import records as records_module
from lastgasp.gasp import serve as serve_module
from lastgasp.gasp.guard import EVERY, Guard
from lastgasp.gasp.link import Link
from lastgasp.gasp.process_monitor import ProcessMonitor
from lastgasp.gasp.processor import Processor
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.gasp.serve import ControllerThread, new_token
from support.engine_job import held
from support.fake_controller import FakeController, FakeSource
from support.switch_job import hello, job_here
from support.waiting import until

KILLED = Fault(kind="killed", rank=1, cause="killed by SIGKILL", step=3, seen_ns=1)


@contextmanager
def stalled_disk(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Iterator[threading.Event]:
    """Every fsync below `directory` hangs until the end; the event is set once one does."""
    hangs, end = threading.Event(), threading.Event()
    sync = _fs.Disk.fsync

    def fsync(disk: _fs.Disk, fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(directory)):
            hangs.set()
            end.wait(60.0)
        sync(disk, fd)

    with monkeypatch.context() as patch:
        patch.setattr(_fs.Disk, "fsync", fsync)
        try:
            yield hangs
        finally:
            end.set()


def recover(controller: ControllerThread, directory: Path) -> None:
    """A rank is killed, the other one is asked, has nothing to save, and must be released."""
    end = controller.endpoint
    links = [Link(end.address, end.token, hello(rank, 2, directory=str(directory))) for rank in range(2)]
    try:
        for link in links:
            link.send(m.Begin(step=3, durable=3, buffer_fd=-1))
        links[1].close()
        answer_until_released(links[0])
    finally:
        for link in links:
            link.close()


def answer_until_released(link: Link) -> None:
    link._socket.settimeout(60.0)
    while True:
        for message in link.receive():
            if isinstance(message, m.Prepare):
                link.send(m.Prepared(recovery=1, step=3, durable=3, usable=True, target=message.target))
            if isinstance(message, m.Release):
                return


def test_a_disk_that_hangs_holds_up_neither_orders_nor_the_launchers_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The record hangs from the first fault to the end; another attempt runs meanwhile, and the job ends."""
    monkeypatch.setattr(controller_module, "RECORDS_LIMIT", 0.2)
    monkeypatch.setattr(records_module, "STALLED", 0.1)
    controller = ControllerThread(new_token())
    with stalled_disk(monkeypatch, tmp_path) as hangs:
        recover(controller, tmp_path)
        assert hangs.wait(60.0)
        assert controller.in_use(0) and not controller.in_use(1)
        assert controller.over_for(0) is not None
        assert controller.hold_limit() > 0
        assert not controller.progressed(0)
        assert controller.last_ending(0) == "nothing_to_save"
        end = controller.endpoint
        second = Link(end.address, end.token, hello(0, 2, attempt=1, directory=str(tmp_path)))
        second.send(m.Begin(step=3, durable=3, buffer_fd=-1))
        until(lambda: any("the job continues" in record.message for record in caplog.records), "a line about the disk")
        until(lambda: controller.in_use(1), "the next attempt")
        assert not controller.in_use(0), "its ranks are no longer reported"
        assert controller.joined(0) and controller.last_ending(0) == "nothing_to_save", "a launcher may still ask"
        second.close()
        controller.stop()
    assert any("not written, because the file system stalls" in record.message for record in caplog.records)
    until(lambda: not [t for t in threading.enumerate() if t.name == "lastgasp-records"], "the thread to end")


def test_the_orders_go_out_before_the_record_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = ControllerThread(new_token())
    with stalled_disk(monkeypatch, tmp_path):
        recover(controller, tmp_path)
        assert not list(tmp_path.glob("incidents/*.json"))
    assert controller.settle(60.0)
    controller.stop()
    (path,) = tmp_path.glob("incidents/*.json")
    assert decode_incident(path.read_bytes()).ending == "nothing_to_save"


def test_questions_of_the_launcher_wait_for_nobody_and_never_raise() -> None:
    """The loop is behind, and then it is gone."""
    controller = ControllerThread(new_token())
    with held(controller):
        assert not controller.in_use(0)
        assert (controller.over_for(0), controller.progressed(0), controller.hold_limit()) == (None, False, 0.0)
        controller.report_exit(0, "killed by SIGKILL")
    controller.stop()
    controller.report_exit(0, "killed by SIGKILL")
    assert (controller.in_use(0), controller.last_ending(0)) == (False, "")
    controller.stop()


def test_a_controller_that_cannot_be_stopped_does_not_fail_the_launcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    controller = ControllerThread(new_token())
    stop = controller._controller.stop

    async def fail() -> None:
        await stop()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(controller._controller, "stop", fail)
    controller.stop()
    assert any("could not be stopped properly" in record.message for record in caplog.records)


# -- code that raises ------------------------------------------------------------------------------


@contextmanager
def rank_that_fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeController, Processor, RankStatus]]:
    """A control thread whose adapter raises at every look; even what ends a thread."""
    status = RankStatus()
    status.step = 3

    def look() -> None:
        raise SystemExit("the adapter's graph is gone")

    status.look = look
    with FakeController() as controller:
        link = controller.link()

        def uncoordinated(fault: object) -> m.Release:
            raise AssertionError("the controller is there")

        processor = Processor(status, FakeSource(), link, uncoordinated, (0.3, 5.0), lambda outcome: None)
        try:
            yield controller, processor, status
        finally:
            processor.close(goodbye=False)


def test_an_adapter_that_raises_costs_its_state_and_not_the_control_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with rank_that_fails(monkeypatch) as (controller, processor, status):
        processor.term.install()
        controller.say(m.Prepare(recovery=1, faults=(KILLED,), target=3))
        answer = controller.hear(m.Prepared)
        assert not answer.usable
        assert answer.why == "its state could not be looked at: SystemExit: the adapter's graph is gone"
        os.kill(os.getpid(), signal.SIGTERM)
        assert controller.hear(m.Report).fault.kind == "sigterm"
        controller.say(m.Release(recovery=1, ending="gave_up", step=-1, path="", reason="nobody"))
        until(lambda: status.outcome is not None, "the release to be heard")


def test_orders_that_fail_do_not_end_the_control_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: object, plan: int) -> None:
        raise ValueError(f"no plan {plan}")

    monkeypatch.setattr("lastgasp.gasp.saver.Saver.discard", fail)
    with rank_that_fails(monkeypatch) as (controller, processor, _):
        for plan in range(3):
            controller.say(m.Discard(recovery=1, plan=plan))
        controller.say(m.Prepare(recovery=1, faults=(KILLED,), target=3))
        controller.hear(m.Prepared)
        assert processor._guard.count == 3
    said = [record.message for record in caplog.records if "the order Discard" in record.message]
    assert said == ["the order Discard failed; it continues"], "once, and not once per order"


def test_a_capture_that_cannot_be_sent_costs_the_state_and_not_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not answer counts as hung, and is killed."""
    with rank_that_fails(monkeypatch) as (controller, processor, status):
        status.look = lambda: None
        monkeypatch.setattr(processor._source, "capture", lambda step: object())
        controller.say(m.Prepare(recovery=1, faults=(KILLED,), target=3))
        answer = controller.hear(m.Prepared)
        assert not answer.usable
        assert answer.why.startswith("its answer could not be sent: ")


def test_the_controllers_deadlines_are_kept_whatever_a_look_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process may be gone between two system calls of the watch; a gather ends in time nevertheless."""

    def gone(watch: ProcessMonitor, rank: int) -> str:
        raise ProcessLookupError(3, "No such process")

    with job_here(2) as job:
        attempt = job.controller._controller.attempt
        assert attempt is not None
        attempt.over_since = time.monotonic()
        monkeypatch.setattr(ProcessMonitor, "exit_status", gone)
        monkeypatch.setattr(ProcessMonitor, "stopped", lambda watch: gone(watch, 0))
        job.controller._controller.incidents._unexplained = {1}
        until(lambda: job.controller._controller._guard.count > 3, "the looks to fail")
        assert job.ranks[0].processor.gather("x", b"", 0.0) is None
        until(lambda: "x" in attempt.gathers, "the gather to be open")
        attempt.gathers["x"].since -= 1000.0
        until(lambda: not attempt.gathers, "the gather to end")
        attempt.over_since = None
    told = [record for record in caplog.records if "a look at how ranks ended failed" in record.message]
    assert len(told) == 1


def test_a_message_that_cannot_be_handled_costs_itself_and_not_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    with job_here(2) as job:
        attempt = job.controller._controller.attempt
        assert attempt is not None

        def fail(rank: int, message: m.Begin | m.Status | m.Prepared) -> None:
            raise KeyError(rank)

        monkeypatch.setattr(attempt, "heard_step", fail)
        until(lambda: job.controller._controller._guard.count > 2, "the heartbeats to fail")
        assert {row.state for row in job.table().rows} == {"running"}


def test_the_watch_of_processes_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one process's file says must not hide the death of another."""
    dead: list[int] = []
    fields = process_monitor_module._fields

    def broken(stat: int) -> list[bytes] | None:
        if stat == first:
            raise ValueError("not a number")
        return fields(stat)

    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    watch = ProcessMonitor(lambda rank, pid, evidence, at: dead.append(rank))
    try:
        watch.watch(0, os.getpid())
        first = watch._watched[0].stat
        monkeypatch.setattr(process_monitor_module, "_fields", broken)
        watch.watch(1, child)
        os.kill(child, signal.SIGKILL)
        until(lambda: dead == [1], "the death of the child")
    finally:
        os.waitpid(child, 0)
        watch.close()


def test_a_process_that_is_gone_meanwhile_is_no_error_when_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(pid: int, number: int) -> None:
        raise ProcessLookupError(3, "No such process")

    watch = ProcessMonitor(lambda rank, pid, evidence, at: None)
    watch.watch(0, os.getpid())
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", gone)
        watch.kill(0)
    watch.close()


def test_a_process_that_cannot_be_watched_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No descriptor is left: the rank is protected by its connection, and not refused."""

    def full(*args: object, **kwargs: object) -> int:
        raise OSError(24, "Too many open files")

    watch = ProcessMonitor(lambda rank, pid, evidence, at: None)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        watch.watch(0, os.getpid())
    watch.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_the_guard_says_it_now_and_then_and_how_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr("lastgasp._clock.monotonic", lambda: now[0])
    guard = Guard(logging.getLogger("lastgasp"))
    for _ in range(5):
        with guard("a look"):
            raise SystemExit(3)
    now[0] += EVERY
    with guard("a look"):
        raise OSError(5, "Input/output error")
    assert guard.count == 6
    assert [record.message for record in caplog.records] == [
        "a look failed; it continues",
        "a look failed (4 times more since this was logged last); it continues",
    ]


def test_a_controller_that_is_behind_holds_no_launcher_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines are for people, and what it must know it hears before any rank that is started behind it."""
    monkeypatch.setattr(serve_module, "WORDS_TIMEOUT", 0.05)
    controller, stuck, end = ControllerThread(new_token()), threading.Event(), threading.Event()

    def stall() -> None:
        stuck.set()
        end.wait(60.0)

    try:
        controller._loop.call_soon_threadsafe(stall)
        assert stuck.wait(60.0)
        controller.expect(3)
        assert (controller.event(3), controller.summary("done")) == ("", "")
        assert controller._controller._expected != 3
        end.set()
        until(lambda: controller._controller._expected == 3, "the attempt to be known")
    finally:
        end.set()
        controller.stop()
    controller.expect(4)  # of no use any more, and no error
