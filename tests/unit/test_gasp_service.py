"""What the controller does for operators: the table of ranks, the switch, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgasp.errors import AuthenticationError, ControlError, DeadlineExceeded, VersionMismatch
from lastgasp.gasp import link as link_module
from lastgasp.gasp import messages as m
from lastgasp.gasp import operator as operator_module
from lastgasp.gasp import service
from lastgasp.gasp.link import Busy, Link
from lastgasp.gasp.operator import OperatorLink
from lastgasp.gasp.serve import ControllerThread
from lastgasp.gasp.service import wrong_switch
from lastgasp.steps import bits
from lastgasp.steps.bits import ALL, COMM, DEFAULT_ON, STEP
from support.fake_controller import STARTED_S, FakeController
from support.switch_job import JobHere, hello, job_here
from support.waiting import until

# -- the table -------------------------------------------------------------------------------------


def test_a_job_whose_ranks_have_not_come_yet() -> None:
    before = int(time.time())
    with job_here(2, joined=0) as job:
        table = job.table()
    assert (table.job, table.directory, table.world_size, table.rows) == ("", "", 0, ())
    assert table.state == "waiting"
    assert before <= table.started_s <= time.time()


def test_each_rank_is_shown_with_its_card_and_its_last_heartbeat() -> None:
    with job_here(3, joined=2) as job:
        job.ranks[1].status.step_completed(7)
        job.ranks[1].status.progress("data")
        job.ranks[1].mask = COMM
        job.ranks[1].processor.beat_now()
        table = job.until(lambda t: t.rows[1].step == 7 and t.rows[0].marks is not None)
    assert (table.job, table.directory, table.world_size, table.state) == ("job", "/nowhere", 3, "running")
    first, second, third = table.rows
    assert [row.state for row in table.rows] == ["running", "running", "awaited"]
    assert (third.card, third.marks, third.heard_s) == (None, None, None)
    assert first.card is not None
    assert (first.card.rank, first.card.node, first.card.pid) == (0, socket.gethostname(), os.getpid())
    assert (first.card.device, first.card.versions["torch"]) == ("cpu", "2.13.0")
    assert {"lastgasp", "python"} < set(first.card.versions)
    assert (first.marks, second.marks, second.phase) == (DEFAULT_ON, COMM, "data")
    assert first.heard_s is not None and 0 <= first.heard_s < 20


def test_who_has_left_and_who_is_dead() -> None:
    with job_here(3) as job:
        job.ranks[0].processor.close(goodbye=True)
        job.ranks[1].processor.close(goodbye=False)
        table = job.until(lambda t: (t.rows[0].state, t.rows[1].state) == ("left", "dead"))
        assert "its connection closed" in table.rows[1].why
        assert table.rows[0].card is not None, "who has left is still known"
        assert table.state == "recovering" or table.state == "over"


def test_a_job_whose_ranks_have_all_left_has_ended() -> None:
    with job_here(2) as job:
        for rank in job.ranks:
            rank.processor.close(goodbye=True)
        assert job.until(lambda t: t.state == "ended").rows[1].state == "left"


def test_the_next_attempt_begins_with_an_empty_table() -> None:
    with job_here(2) as job:
        job.until(lambda t: t.rows[1].card is not None)
        with closing(Link(job.address, job.token, hello(0, 2, attempt=1))):
            table = job.table()
        assert (table.attempt, [row.state for row in table.rows]) == (1, ["running", "awaited"])
        assert table.rows[0].card is None
        job.until(lambda t: t.rows[0].state == "dead")


def test_a_rank_of_the_attempt_before_does_not_speak_for_that_of_this_one() -> None:
    with job_here(2) as job, closing(Link(job.address, job.token, hello(0, 2, attempt=1))):
        old = job.ranks[0].link
        with contextlib.suppress(OSError):
            old.send(m.Status(step=99, durable=99, tick=1, phase="data"))
            old.send(m.Goodbye())
        until(lambda: not job.ranks[0].processor.led)
        assert (job.table().rows[0].state, job.table().rows[0].step) == ("running", None)


def test_a_rank_learns_when_its_controller_started() -> None:
    with job_here(1, joined=0) as job, closing(Link(job.address, job.token, hello(0, 1))) as link:
        assert link.started_s == job.table().started_s
    with FakeController() as controller, closing(controller.link()) as link:
        assert link.started_s == STARTED_S


# -- the switch ------------------------------------------------------------------------------------


def test_each_rank_acknowledges_with_what_is_on_there_now() -> None:
    with job_here(3) as job, job.operator() as link:
        job.ranks[1].mask = 0
        done = link.switch(None, COMM, STEP, wait=60.0)
        assert [(one.rank, one.mask, one.why) for one in done.results] == [
            (0, ALL & ~STEP, ""),
            (1, COMM, ""),
            (2, ALL & ~STEP, ""),
        ]
        done = link.switch([2, 0, 2], STEP, 0, wait=60.0)
        assert [(one.rank, one.mask) for one in done.results] == [(0, ALL), (2, ALL)]
        assert [rank.mask for rank in job.ranks] == [ALL, COMM, ALL]


def test_a_rank_that_marks_nothing_says_so() -> None:
    with job_here(1, marked=False) as job:
        with job.operator() as link:
            [one] = link.switch(None, COMM, 0, wait=60.0).results
        assert one.mask is None and "nothing is marked on this rank" in one.why
        job.ranks[0].processor.beat_now()
        assert job.until(lambda t: t.rows[0].phase != "").rows[0].marks is None


def test_a_switch_that_fails_on_a_rank_is_reported_and_the_rank_lives(caplog: pytest.LogCaptureFixture) -> None:
    def broken(on: int, off: int) -> int:
        if on or off:
            raise RuntimeError("no ring \udcff")
        raise ValueError("nor a mask")

    with job_here(1) as job, job.operator() as link:
        job.ranks[0].processor.on_switch = broken
        [one] = link.switch(None, COMM, 0, wait=60.0).results
        assert (one.mask, one.why) == (None, "RuntimeError: no ring \\udcff")
        job.ranks[0].processor.on_switch = job.ranks[0].switch
        [one] = link.switch(None, COMM, 0, wait=60.0).results
        assert (one.mask, one.why) == (ALL, "")


def test_unknown_ranks_and_those_that_are_not_here() -> None:
    with job_here(4, joined=3) as job, job.operator() as link:
        job.ranks[1].processor.close(goodbye=True)
        job.until(lambda t: t.rows[1].state == "left")
        done = link.switch([0, 1, 3, 4, -1], COMM, 0, wait=60.0)
    why = {one.rank: one.why for one in done.results}
    assert why == {
        -1: "unknown rank: the job has 0 to 3",
        0: "",
        1: "gone: its training ended",
        3: "has not joined yet",
        4: "unknown rank: the job has 0 to 3",
    }


class Stuck:
    """A switch that begins and does not end before it may."""

    def __init__(self, job: JobHere, rank: int) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._switch = job.ranks[rank].switch
        job.ranks[rank].processor.on_switch = self

    def __call__(self, on: int, off: int) -> int:
        if on or off:
            self.begun.set()
            self.go.wait(150.0)
        return self._switch(on, off)


def asked(job: JobHere, wait: float) -> tuple[threading.Thread, list[m.SwitchDone | BaseException]]:
    """Switch comm on in a thread."""
    found: list[m.SwitchDone | BaseException] = []

    def run() -> None:
        try:
            with job.operator() as link:
                found.append(link.switch(None, COMM, 0, wait=wait))
        except ControlError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_a_rank_that_answers_too_late_is_named_and_its_answer_does_not_count_for_another() -> None:
    with job_here(2) as job, job.operator() as link:
        stuck = Stuck(job, 1)
        [late] = link.switch([1], COMM, 0, wait=0.2).results
        assert (late.mask, late.why) == (None, "no answer within 0.2 s")
        thread, found = asked(job, 60.0)
        stuck.go.set()
        thread.join(60.0)
        [answer] = found
        assert isinstance(answer, m.SwitchDone)
        assert [(one.mask, one.why) for one in answer.results] == [(ALL, ""), (ALL, "")]


@pytest.mark.parametrize("how", ["dies", "leaves", "next attempt"])
def test_a_rank_that_goes_before_it_answers_is_known_at_once(how: str) -> None:
    with job_here(2) as job:
        stuck = Stuck(job, 1)
        thread, found = asked(job, 600.0)
        assert stuck.begun.wait(60.0)
        if how == "next attempt":
            other = Link(job.address, job.token, hello(0, 2, attempt=1))
        else:
            if how == "leaves":
                job.ranks[1].link.send(m.Goodbye())
            job.ranks[1].link._socket.shutdown(socket.SHUT_RDWR)
        thread.join(60.0)
        assert not thread.is_alive()
        stuck.go.set()
        if how == "next attempt":
            other.close()
    [answer] = found
    assert isinstance(answer, m.SwitchDone)
    [one] = [one for one in answer.results if one.rank == 1]
    assert one.mask is None
    assert (
        one.why
        == {
            "dies": "gone: its connection closed",
            "leaves": "gone: its training ended",
            "next attempt": "gone: the job has started it anew",
        }[how]
    )


def test_a_controller_that_ends_ends_the_wait() -> None:
    with job_here(1) as job:
        stuck = Stuck(job, 0)
        thread, found = asked(job, 600.0)
        assert stuck.begun.wait(60.0)
        job.controller.stop()
        thread.join(60.0)
        stuck.go.set()
    [answer] = found
    assert isinstance(answer, ControlError) and "is gone" in str(answer)


def test_operators_do_not_wait_for_each_other() -> None:
    with job_here(2) as job:
        stuck = Stuck(job, 1)
        thread, found = asked(job, 60.0)
        assert stuck.begun.wait(60.0)
        with job.operator() as link:
            assert [one.mask for one in link.switch([0], 0, STEP, wait=60.0).results] == [ALL & ~STEP]
            assert len(link.ranks().rows) == 2
        assert not found
        stuck.go.set()
        thread.join(60.0)
        [answer] = found
        assert isinstance(answer, m.SwitchDone) and not any(one.why for one in answer.results)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        ({"wait": 0.05}, r"wait=0.05 is not allowed: expected 0.1 to 600 seconds"),
        ({"wait": 600.5}, "expected 0.1 to 600"),
        ({"wait": float("nan")}, "wait=nan is not allowed"),
        ({"on": 32}, "on=32, off=0 is not allowed: expected bits out of 31"),
        ({"on": -1}, "on=-1"),
        ({"off": 16}, "on=16, off=16 is not allowed: comm cannot be both"),
        ({"on": 0}, "nothing to switch"),
        ({"ranks": ()}, "nothing to switch"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(ask: dict[str, object], words: str) -> None:
    with job_here(1) as job, job.operator() as link:
        with pytest.raises(ControlError, match=words):
            link._ask(msgspec.structs.replace(SENSIBLE, **ask), m.SwitchDone, 1.0)
        assert job.ranks[0].mask == DEFAULT_ON


SENSIBLE = m.AskSwitch(ranks=None, on=COMM, off=0, wait=1.0)


def test_before_the_first_rank_there_is_nobody_to_switch() -> None:
    with job_here(2, joined=0) as job, job.operator() as link, pytest.raises(ControlError, match="no rank has joined"):
        link.switch(None, COMM, 0)


@given(st.integers(-3, 40), st.integers(-3, 40))
def test_only_bits_that_exist_and_do_not_contradict_pass(on: int, off: int) -> None:
    good = 0 <= on <= bits.ALL and 0 <= off <= bits.ALL and not on & off and on | off
    assert (wrong_switch(m.AskSwitch(ranks=None, on=on, off=off, wait=1.0)) == "") == bool(good)


# -- who may ask, and how --------------------------------------------------------------------------


def test_a_wrong_token_is_refused_and_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    with job_here(1) as job, caplog.at_level(logging.WARNING, "lastgasp.controller"):
        with pytest.raises(AuthenticationError, match="wrong token") as caught:
            OperatorLink(job.address, "f" * 64)
        assert job.token not in str(caught.value)
        job.table()
    assert "wrong token" in caplog.text and job.token not in caplog.text


@pytest.mark.parametrize("role", ["rank", "controller"])
def test_the_proof_of_another_role_does_not_do(role: m.Role, monkeypatch: pytest.MonkeyPatch) -> None:
    real = m.proof

    def proof(token: str, ours: m.Role, nonce: bytes, rank: int) -> bytes:
        return real(token, role if threading.current_thread() is threading.main_thread() else ours, nonce, rank)

    with job_here(1) as job:
        with monkeypatch.context() as patch:
            patch.setattr(m, "proof", proof)
            with pytest.raises(AuthenticationError, match="wrong token"):
                job.operator()
        job.table()


def test_another_version_is_refused_and_fails_no_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    with job_here(2) as job:
        waiting = threading.Thread(target=job.ranks[0].processor.gather, args=("tag", b"0", 60.0))
        waiting.start()
        with monkeypatch.context() as patch:
            patch.setattr(link_module, "__version__", "0.0.9")
            with pytest.raises(VersionMismatch, match=r"0\.0\.9 here, but"):
                job.operator()
        whole = job.ranks[1].processor.gather("tag", b"1", 60.0)
        waiting.join(60.0)
        assert whole is not None and whole.parts == (b"0", b"1")


def test_so_many_operators_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_OPERATORS", 2)
    with job_here(1) as job:
        with job.operator(), job.operator(), pytest.raises(Busy, match="too many operators are connected already"):
            job.operator()
        until(lambda: job.controller._controller._service._operators == 0)
        job.table()


def test_an_operator_that_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "IDLE", 0.2)
    with job_here(1) as job, job.operator() as link, pytest.raises(EOFError):
        link.receive()


def raw(frame: bytes) -> Callable[[OperatorLink], None]:
    """Send bytes as they are."""
    return lambda link: link._socket.sendall(frame)


@pytest.mark.parametrize(
    ("say", "words"),
    [
        (raw(b"\x00\x00\x00\x05hello"), f"not a message of protocol {m.PROTOCOL}"),
        (raw((m.MAX_ASK + 1).to_bytes(4, "big")), "at most 1048576 are allowed here"),
        (raw(m.frame(hello(0, 1))), f"not a message of protocol {m.PROTOCOL}"),
        (raw(m.frame(m.Goodbye())), f"not a message of protocol {m.PROTOCOL}"),
        (raw(m.frame(m.Operator(protocol=1, version="", nonce=b"", mac=b""))), "Operator after the greeting"),
    ],
    ids=["noise", "too long", "a rank's hello", "a rank's goodbye", "greeting again"],
)
def test_what_is_not_a_question_is_refused_and_harms_nobody(say: Callable[[OperatorLink], None], words: str) -> None:
    with job_here(1) as job:
        with job.operator() as link:
            say(link)
            with pytest.raises(ControlError, match=words):
                link._expect(m.Ranks)
            with pytest.raises(EOFError):
                link.receive()
        assert [row.state for row in job.table().rows] == ["running"]


def test_one_question_at_a_time() -> None:
    with job_here(1) as job, job.operator() as link:
        stuck = Stuck(job, 0)
        raw(m.frame(msgspec.structs.replace(SENSIBLE, wait=60.0)))(link)
        assert stuck.begun.wait(60.0)
        raw(m.frame(m.AskRanks()))(link)
        with pytest.raises(ControlError, match="one question at a time"):
            link._expect(m.SwitchDone)
        stuck.go.set()


def test_a_controller_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with job_here(1) as job, job.operator() as link, monkeypatch.context() as patch:
        patch.setattr(operator_module, "MARGIN", 0.2)
        stop, stopped = threading.Event(), threading.Event()

        def halt() -> None:
            stopped.set()
            stop.wait(60.0)

        job.controller._loop.call_soon_threadsafe(halt)
        try:
            assert stopped.wait(60.0)
            with pytest.raises(DeadlineExceeded, match="Is its process stopped"):
                link.ranks()
            with pytest.raises(ControlError, match="broke the greeting off"):
                OperatorLink(job.address, job.token, seconds=0.2)
        finally:
            stop.set()


def test_a_connection_during_the_stop_is_rejected() -> None:
    controller = ControllerThread("token")
    stop, stopped = threading.Event(), threading.Event()

    def halt() -> None:
        stopped.set()
        stop.wait(60.0)

    controller._loop.call_soon_threadsafe(halt)
    assert stopped.wait(60.0)
    host, _, port = controller.endpoint.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        guests = [stack.enter_context(socket.create_connection((host, int(port)), 60.0)) for _ in range(5)]
        stopping = threading.Thread(target=controller.stop)
        stopping.start()
        until(lambda: len(vars(controller._loop)["_ready"]) > 0)
        stop.set()
        stopping.join(60.0)
        for guest in guests:
            with contextlib.suppress(ConnectionResetError):
                while guest.recv(4096):
                    pass


def test_whoever_is_greeted_while_the_controller_stops_is_cancelled_like_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In Python 3.11 `asyncio.wait_for` swallows a cancellation that comes with its result; stop() took 30 s then."""
    controller = ControllerThread("token")
    greet = controller._controller._greet

    async def last_words(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> m.Greeting:
        told = await greet(reader, writer)
        others = asyncio.all_tasks() - {controller._controller._ticker}
        asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in others])
        return told

    monkeypatch.setattr(controller._controller, "_greet", last_words)
    with contextlib.closing(Link(controller.endpoint.address, "token", hello(0, 1))) as link:
        link._socket.settimeout(60.0)
        with pytest.raises(EOFError):
            link.receive()
    controller.stop()


def test_nobody_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    connect, tries = socket.create_connection, list[object]()

    def counted(*arguments: Any, **options: Any) -> socket.socket:
        tries.append(arguments)
        return connect(*arguments, **options)

    monkeypatch.setattr(socket, "create_connection", counted)
    with pytest.raises(DeadlineExceeded, match="Connection refused"):
        OperatorLink(address, "token", seconds=60.0)
    assert len(tries) == 1, "an operator does not wait for a controller to come"


# -- an operator is not a rank ------------------------------------------------------------------------


def test_an_operator_is_not_counted_and_its_end_is_no_fault() -> None:
    with job_here(1) as job:
        stuck = Stuck(job, 0)
        for _ in range(service.MAX_OPERATORS + 2):  # each ends in the middle of its question
            with job.operator() as link:
                raw(m.frame(msgspec.structs.replace(SENSIBLE, wait=600.0)))(link)
            job.until(lambda t: True)
        stuck.go.set()
        assert job.controller._controller.connected == 1
        assert job.table().state == "running"
    with job_here(1, joined=0) as job, job.operator():
        assert job.controller._controller.connected == 0
        assert not job.controller.in_use(0)
