"""The rank's end: the link, the control thread, and the recovery without a controller."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from lastgasp import __version__, _clock
from lastgasp.config import GaspConfig
from lastgasp.errors import (
    AuthenticationError,
    ControlError,
    DeadlineExceeded,
    Moved,
    ProtocolError,
    VersionMismatch,
)
from lastgasp.events import Fault, FaultKind, decode_incident
from lastgasp.gasp import hostloss
from lastgasp.gasp import link as link_module
from lastgasp.gasp import messages as m
from lastgasp.gasp import processor as processor_module
from lastgasp.gasp.actions import Send
from lastgasp.gasp.auxiliary import NoBuffers
from lastgasp.gasp.decision import SavePlan
from lastgasp.gasp.link import Link
from lastgasp.gasp.members import Member
from lastgasp.gasp.orders import save_orders
from lastgasp.gasp.processor import Processor
from lastgasp.gasp.rank_status import RankStatus, Released
from lastgasp.gasp.serve import ControllerThread, new_token
from lastgasp.gasp.uncoordinated import recover_uncoordinated
from lastgasp.session import Contact, Session
from lastgasp.topology import Place, data_parallel
from lastgasp.trailer import split_trailer, with_trailer
from support.fake_controller import HELLO, TOKEN, FakeController, FakeSource
from support.waiting import until

FAULT = Fault(kind="exception", rank=1, cause="ValueError: boom", step=3, seen_ns=1)
PREPARE = m.Prepare(recovery=1, faults=(FAULT,))
SAVE = m.Save(recovery=1, plan=1, step=3, aux={}, reason="because")
RELEASE = m.Release(recovery=1, ending="saved", step=3, path="p", reason="")


@dataclass
class Rank:
    """A control thread with everything around it."""

    controller: FakeController
    link: Link
    status: RankStatus = field(default_factory=RankStatus)
    source: FakeSource = field(default_factory=FakeSource)
    finish: float = 60.0
    uncoordinated: list[Fault] = field(default_factory=list)
    over: list[m.Release] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.status.step = 3
        self.processor = Processor(
            self.status, self.source, self.link, self._uncoordinated, (self.finish, 5.0), self.over.append
        )

    def _uncoordinated(self, fault: Fault) -> m.Release:
        self.uncoordinated.append(fault)
        return RELEASE


@contextmanager
def connected(host: str = "elsewhere", behind: bytes = b"", finish: float = 60.0) -> Iterator[Rank]:
    """A rank and its controller. `finish`: seconds that the rank has for leaving its update."""
    with FakeController(host, behind=behind) as controller:
        rank = Rank(controller, controller.link(), finish=finish)
        try:
            yield rank
        finally:
            rank.source.gate.set()
            rank.processor.close(goodbye=False)




# -- link ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"token": "wrong"}, AuthenticationError, "wrong token"),
        ({"version": "0.0.1"}, VersionMismatch, "0.0.1"),
        ({"attempt": -1}, ControlError, "attempt -1 is over"),
    ],
)
def test_refused(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str | int], error: type[ControlError], words: str
) -> None:
    controller = ControllerThread(new_token())
    first = Link(controller.endpoint.address, controller.endpoint.token, HELLO)
    try:
        token = str(change.pop("token", controller.endpoint.token))
        monkeypatch.setattr(link_module, "__version__", change.pop("version", __version__))
        hello = msgspec.structs.replace(HELLO, rank=0, **change)
        with pytest.raises(error, match=words) as caught:
            Link(controller.endpoint.address, token, hello)
        assert controller.endpoint.token not in str(caught.value)
    finally:
        first.close()
        controller.stop()


def test_what_comes_with_the_greeting_is_heard_at_once() -> None:
    """A rank that joins in the middle of a recovery, or after it, learns of it together with its welcome."""
    with connected(behind=m.frame(RELEASE)) as rank:
        until(lambda: rank.status.outcome is not None)
        assert rank.over == [RELEASE]


def test_a_controller_that_does_not_know_the_token_is_not_trusted() -> None:
    with (
        FakeController(token="another") as impostor,
        pytest.raises(AuthenticationError, match="does not know this job's token"),
    ):
        Link(impostor.address, TOKEN, HELLO)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", ControlError),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError),
        (b"\x00\x00\x00\x02\x91\xff", ProtocolError),
        (m.frame(m.Goodbye()), ProtocolError),
        (m.frame(RELEASE), ControlError),
    ],
)
def test_somebody_else_listens_there(answer: bytes, error: type[ControlError]) -> None:
    with FakeController(answer=answer) as stranger, pytest.raises(error):
        Link(stranger.address, TOKEN, HELLO)


def test_nobody_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "CONNECT_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(DeadlineExceeded, match="LASTGASP_CONTROLLER"):
        Link(address, TOKEN, HELLO)


def test_a_forked_child_does_not_keep_the_connection_open() -> None:
    """Data-loader workers outlive a killed rank by seconds; its connection must not."""
    with FakeController() as controller:
        link = controller.link()
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        try:
            link.close()
            with pytest.raises(EOFError):
                controller.next()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


# -- orders ----------------------------------------------------------------------------------------


def test_a_complete_recovery() -> None:
    with connected() as rank:
        rank.processor.begin()
        assert rank.controller.hear(m.Begin).step == 3
        rank.controller.say(PREPARE)
        assert rank.controller.hear(m.Prepared) == m.Prepared(
            recovery=1, step=3, durable=0, usable=True, aux=b"small 3", target=-1
        )
        rank.controller.say(SAVE)
        assert rank.controller.hear(m.Saved).part == b"part"
        rank.controller.say(m.Commit(recovery=1, plan=1, parts={1: b"part"}))
        rank.controller.hear(m.Committed)
        rank.controller.say(RELEASE)
        until(lambda: rank.over == [RELEASE])
    assert rank.source.done == ["save 3", "publish [1]"]
    assert rank.uncoordinated == []


def test_on_the_controllers_host_the_small_state_does_not_travel() -> None:
    with connected(host=HELLO.host) as rank:
        rank.controller.say(PREPARE)
        assert rank.controller.hear(m.Prepared).aux == b""


class Carries(FakeSource):
    """One with values, that are made when asked for the third time."""

    asked = 0

    def values(self, step: int) -> bytes | None:
        """As the port says."""
        self._fail()
        self.asked += 1
        return b"values" if self.asked > 2 else None


@pytest.mark.parametrize(("host", "state"), [(HELLO.host, b""), ("elsewhere", b"small 3")])
def test_values_go_with_the_answer_once_they_are_made(host: str, state: bytes) -> None:
    with FakeController(host) as controller:
        rank = Rank(controller, controller.link(), source=Carries())
        try:
            rank.controller.say(PREPARE)
            assert split_trailer(rank.controller.hear(m.Prepared).aux) == (state, b"values")
        finally:
            rank.processor.close(goodbye=False)


def test_values_that_cannot_be_made_cost_no_answer() -> None:
    with FakeController(HELLO.host) as controller:
        rank = Rank(controller, controller.link(), source=Carries())
        rank.source.error = RuntimeError("no")
        try:
            rank.controller.say(PREPARE)
            assert rank.controller.hear(m.Prepared).aux == b""
        finally:
            rank.processor.close(goodbye=False)


def test_a_saver_gets_states_and_values() -> None:
    """Those of a dead rank have no values; those of another step do not count."""

    class Buffers(NoBuffers):
        def state(self, rank: int, step: int) -> bytes | None:
            return {0: b"a", 1: b"b", 3: b"d"}.get(rank)

    def prepared(step: int, aux: bytes) -> m.Prepared:
        return m.Prepared(recovery=1, step=step, durable=0, usable=True, aux=aux)

    more = with_trailer(b"", b"values")
    answers = {0: prepared(3, more), 1: None, 2: prepared(3, b"c" + more), 3: prepared(2, more), 4: prepared(3, more)}
    members = {rank: Member(rank, prepared=one) for rank, one in answers.items()}
    plan = SavePlan(step=3, savers=(0,), unused=(), lost=0)
    [order] = save_orders((1, 1), plan, [FAULT], members, Buffers(), None)
    assert isinstance(order, Send) and isinstance(order.message, m.Save)
    assert {rank: split_trailer(state) for rank, state in order.message.aux.items()} == {
        0: (b"a", b"values"), 1: (b"b", b""), 2: (b"c", b"values"), 3: (b"d", b""),
    }  # fmt: skip


def test_a_rank_inside_its_update_answers_when_it_is_out_of_it() -> None:
    with connected() as rank:
        rank.status.before_update()
        rank.controller.say(PREPARE)
        until(lambda: rank.status.held)
        rank.status.step_completed(4)
        assert rank.controller.hear(m.Prepared).step == 4


def test_a_rank_that_stays_inside_says_so() -> None:
    with connected(finish=1.0) as rank:
        rank.status.before_update()
        rank.controller.say(PREPARE)
        answer = rank.controller.hear(m.Prepared)
        assert (answer.usable, answer.why) == (False, "still inside its update after 1 s")


def test_a_small_state_that_cannot_be_had_does_not_cost_the_step() -> None:
    with connected() as rank:
        rank.source.error = RuntimeError("no device")
        rank.controller.say(PREPARE)
        answer = rank.controller.hear(m.Prepared)
        assert (answer.usable, answer.aux) == (True, b"")
        rank.source.error = None
        rank.controller.say(PREPARE)  # the thread lives
        assert rank.controller.hear(m.Prepared).aux == b"small 3"


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SystemExit(3), OSError(2, "none", "a\udcff")])
def test_a_failed_save_is_told_whatever_it_was(error: BaseException) -> None:
    with connected() as rank:
        rank.source.error = error
        rank.controller.say(SAVE)
        assert rank.controller.hear(m.SaveFailed).why.startswith(type(error).__name__)
        rank.controller.say(m.Commit(recovery=1, plan=1, parts={}))
        assert "KeyError" in rank.controller.hear(m.SaveFailed).why


def test_where_no_more_threads_can_be_had_the_step_is_saved_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's limit of processes counts threads. The order was lost, and the others waited for the save."""
    with connected() as rank:
        rank.source.gate.set()

        def none(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", none)
        rank.controller.say(SAVE)
        rank.controller.hear(m.Saved)
        rank.controller.say(m.Commit(recovery=1, plan=1, parts={}))
        rank.controller.hear(m.Committed)
        monkeypatch.undo()


def test_a_state_that_moved_on_while_it_was_saved_is_reported_again() -> None:
    """The adapter's `look` sees it: the step is that of a compiled graph, which no gate can stop."""
    with connected() as rank:
        rank.controller.say(PREPARE)
        assert rank.controller.hear(m.Prepared).step == 3

        def look() -> None:
            rank.status.step = 4

        rank.status.look = look
        rank.source.error = Moved("step 4 began")
        rank.controller.say(SAVE)
        answer = rank.controller.hear(m.Prepared)
        assert (answer.step, answer.usable, rank.source.done) == (4, True, [])


@pytest.mark.parametrize(("kinds", "expected"), [(("sigterm",), True), (("sigterm", "killed"), False)])
def test_the_status_knows_whether_all_training_threads_continue(kinds: tuple[FaultKind, ...], expected: bool) -> None:
    with connected() as rank:
        faults = tuple(msgspec.structs.replace(FAULT, kind=kind) for kind in kinds)
        rank.controller.say(m.Prepare(recovery=1, faults=faults))
        rank.controller.hear(m.Prepared)
        assert rank.status.all_run is expected


TOLD = m.Prepare(recovery=1, faults=(msgspec.structs.replace(FAULT, kind="sigterm"),), target=3)


def test_where_no_rank_has_stopped_a_step_that_was_begun_is_reported_before_it_is_over() -> None:
    """It may be in a collective of that step, and the others held before it."""
    with connected() as rank:
        rank.status.before_update()
        rank.controller.say(TOLD)
        assert rank.controller.hear(m.Entered) == m.Entered(recovery=1, step=4)
        rank.controller.say(msgspec.structs.replace(TOLD, target=4))
        until(lambda: rank.status.since > 0)
        rank.status.step_completed(4)
        assert rank.controller.hear(m.Prepared).step == 4


def test_who_is_stopped_without_a_fault_answers_once_it_is_at_the_end_of_its_step() -> None:
    """A busy thread would not follow the order to enter the training again, and its process was ended for that."""
    with connected(finish=0.05) as rank, training(rank.status) as thread:
        rank.status.begun = 3
        rank.controller.say(m.Prepare(recovery=1, faults=(), target=-1))
        assert rank.controller.hear(m.Entered).step == 3, "one that stands before that step completes it"
        until(lambda: rank.processor._answering._asked is not None, "it is to answer")
        asked = rank.processor._answering._asked
        assert asked is not None and not rank.processor._answering.waits
        until(lambda: _clock.monotonic() > asked.reach_by and _clock.monotonic() > asked.deadline, "it is late")
        beats = rank.status.beat()
        assert rank.status.beat() == beats and rank.processor._answering._asked is asked, "it is busy, and is not asked"
        thread.start()
        assert rank.controller.hear(m.Prepared).step == 3
        assert rank.status.at_gate and rank.status.beat() > beats, "who waits for the others does not hang"


def test_who_has_ended_its_training_waits_for_what_all_were_stopped_for() -> None:
    with connected() as rank:
        rank.controller.say(m.Prepare(recovery=1, faults=(), target=-1))
        until(lambda: rank.status.held)
        thread = threading.Thread(target=rank.processor.goodbye)
        thread.start()
        rank.controller.hear(m.Entered)
        assert rank.controller.hear(m.Prepared).step == 3
        rank.controller.say(m.Prepare(recovery=1, faults=(), target=m.CALLED_OFF))
        rank.controller.hear(m.Goodbye)
        rank.controller.say(m.Farewell())
        thread.join(60)
        assert not thread.is_alive() and not rank.status.waits


def test_a_rank_that_was_told_to_stop_itself_continues_to_a_step_that_others_have_begun() -> None:
    with connected() as rank, training(rank.status) as thread:
        rank.processor.report(msgspec.structs.replace(FAULT, kind="sigterm"))
        rank.controller.hear(m.Report)
        rank.controller.say(TOLD)
        assert rank.controller.hear(m.Prepared).step == 3
        thread.start()
        until(lambda: rank.status.at_gate)
        rank.controller.say(msgspec.structs.replace(TOLD, target=4))
        assert rank.controller.hear(m.Prepared).step == 4
        until(lambda: rank.status.at_gate)
        assert rank.status.step == 4


@contextmanager
def training(status: RankStatus) -> Iterator[threading.Thread]:
    """A thread that makes steps until it is stopped."""

    def train() -> None:
        with suppress(Released):
            while True:
                status.before_update()
                status.step_completed(status.begun)

    thread = threading.Thread(target=train)
    try:
        yield thread
    finally:
        status.release(RELEASE)
        thread.join(60.0)


@pytest.mark.parametrize("raised", [True, False])
def test_a_rank_that_does_not_reach_a_step_in_time_cannot_make_it_later(raised: bool) -> None:
    """It has reported which step it holds, and that is saved."""
    with connected() as rank, training(rank.status) as thread:
        if raised:
            rank.processor.report(FAULT)
            rank.controller.hear(m.Report)
        rank.controller.say(msgspec.structs.replace(PREPARE, target=4))
        assert rank.controller.hear(m.Prepared).step == 3
        thread.start()
        until(lambda: rank.status.at_gate)
        assert rank.status.step == 3


def test_a_save_that_was_called_off_removes_what_it_wrote() -> None:
    with connected() as rank:
        rank.source.gate.clear()
        rank.controller.say(SAVE)
        assert rank.source.saving.wait(60.0)
        rank.controller.say(m.Discard(recovery=1, plan=1))
        rank.controller.say(PREPARE)
        rank.controller.hear(m.Prepared)  # so the Discard has been read
        rank.source.gate.set()
        until(lambda: rank.source.done == ["save 3", "discard"])
        rank.controller.say(PREPARE)
        rank.controller.hear(m.Prepared)  # and no Saved in between


def test_a_normal_end_waits_for_a_recovery_that_may_need_this_rank() -> None:
    with connected() as rank:
        rank.source.gate.clear()
        rank.controller.say(PREPARE)
        rank.controller.hear(m.Prepared)
        rank.controller.say(SAVE)
        assert rank.source.saving.wait(60.0)
        closing = threading.Thread(target=rank.processor.close, args=(True,))
        closing.start()
        rank.source.gate.set()
        rank.controller.hear(m.Saved)
        rank.controller.say(RELEASE)
        rank.controller.hear(m.Goodbye)
        rank.controller.say(m.Farewell())
        closing.join(60.0)


# -- without a controller --------------------------------------------------------------------------


def test_a_controller_that_has_stopped_answering_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_module, "ANSWER", 0.2)
    with connected() as rank:
        rank.processor.report(FAULT)
        rank.controller.hear(m.Report)
        until(lambda: rank.over == [RELEASE])
        assert not rank.processor.led
    assert rank.uncoordinated == [FAULT]


def test_a_controller_that_answers_in_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_module, "ANSWER", 60.0)
    with connected() as rank:
        rank.processor.report(FAULT)
        rank.controller.hear(m.Report)
        rank.controller.say(PREPARE)
        rank.controller.hear(m.Prepared)
        rank.processor._answer_by = 0.0  # the time for an answer is over, and there was one
        rank.source.gate.clear()
        rank.controller.say(SAVE)
        rank.controller.say(PREPARE)
        rank.controller.hear(m.Prepared)  # the thread has looked at the time since
        assert rank.processor.led
        rank.source.gate.set()
        rank.controller.hear(m.Saved)
    assert rank.uncoordinated == []


@pytest.mark.parametrize("first", ["lost", "reported"])
def test_one_recovery_alone_however_it_is_noticed(first: str) -> None:
    with connected() as rank:
        if first == "lost":
            rank.controller.hang_up()
            until(lambda: not rank.processor.led)
            assert rank.uncoordinated == []  # no fault so far: training continues
            rank.processor.report(FAULT)
        else:
            rank.processor.report(FAULT)
            rank.controller.hear(m.Report)
            rank.controller.hang_up()
        until(lambda: len(rank.over) == 1)
        rank.processor.report(FAULT)
    assert rank.uncoordinated == [FAULT]
    assert rank.over == [RELEASE]


def test_a_report_that_fails_to_go_out_begins_one_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """The send is what finds out that the controller is gone."""
    with connected() as rank:

        def broken(message: m.Message) -> None:
            raise BrokenPipeError(32, "Broken pipe")

        monkeypatch.setattr(rank.link, "send", broken)
        rank.processor.report(FAULT)
        until(lambda: bool(rank.over))
        rank.processor.close(goodbye=False)
    assert rank.uncoordinated == [FAULT]


def test_without_a_controller_a_rank_hears_that_others_wait_for_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lastgasp.gasp.processor.LISTEN", 0.01)
    waiting = threading.Event()
    with connected() as rank:
        rank.processor.called = waiting.is_set
        rank.controller.hang_up()
        until(lambda: not rank.processor.led)
        assert rank.uncoordinated == []
        waiting.set()
        until(lambda: rank.status.outcome is not None)
    [fault] = rank.uncoordinated
    assert (fault.kind, "waits for this one's part" in fault.cause) == ("peer", True)


def test_a_controller_lost_in_the_middle_of_a_recovery() -> None:
    with connected() as rank:
        rank.controller.say(PREPARE)
        rank.controller.hear(m.Prepared)
        rank.controller.hang_up()
        until(lambda: bool(rank.over))
    assert [fault.kind for fault in rank.uncoordinated] == ["lost"]


@pytest.mark.parametrize(
    ("error", "uncoordinated"), [(TimeoutError(110, "Connection timed out"), True), (EOFError("gone"), False)]
)
def test_a_rank_that_waits_for_a_host_that_has_vanished_saves_alone(
    monkeypatch: pytest.MonkeyPatch, error: Exception, uncoordinated: bool
) -> None:
    """Nobody else would tell it: its collective waits for ranks of that host. A launcher that ends is no such thing."""
    monkeypatch.setattr(hostloss, "LOST_AFTER", 0.3)

    def broken() -> list[m.FromController]:
        raise error

    with connected() as rank:
        rank.status.progress("backward")
        monkeypatch.setattr(rank.link, "receive", broken)
        rank.controller.say(RELEASE)
        until(lambda: not rank.processor.led)
        if uncoordinated:
            until(lambda: bool(rank.over))
        else:
            time.sleep(1)
    assert [fault.kind for fault in rank.uncoordinated] == (["lost"] if uncoordinated else [])


def test_a_training_thread_that_moves_on_is_left_alone() -> None:
    loss = hostloss.HostLoss()
    loss.look(1, 0.0)
    loss.lost()
    assert not loss.look(2, 12.0) and not loss.look(2, 24.9)
    assert loss.look(2, 25.0) and not loss.look(2, 60.0), "once"
    before = hostloss.HostLoss()
    before.lost()
    assert not before.look(0, 1000.0), "training has not begun"


def test_a_training_that_cannot_be_entered_again_saves_alone() -> None:
    """The ranks were to meet in a store of the launcher's, which has died: they would wait until torch gives up."""
    with connected(finish=0.2) as rank:
        rank.status.entered = False
        rank.controller.hang_up()
        until(lambda: bool(rank.over))
    assert [fault.kind for fault in rank.uncoordinated] == ["lost"]


def test_a_training_that_was_entered_again_goes_on_alone() -> None:
    with connected() as rank:
        rank.status.entered = False
        rank.controller.hang_up()
        until(lambda: rank.processor._enter_by < math.inf, "the loss of the controller")
        rank.status.entered = True
        assert rank.processor._stranded(rank.processor._enter_by) == ""
    assert rank.uncoordinated == []


def test_noise_from_the_controller_counts_as_its_loss() -> None:
    with connected() as rank:
        assert rank.controller._peer is not None
        rank.controller._peer.sendall(b"\xff" * 16)
        until(lambda: not rank.processor.led)


def uncoordinated(directory: Path, source: FakeSource, step: int = 3, durable: int = 0) -> m.Release:
    """The recovery of rank 1 of 2 on its own."""
    status = RankStatus()
    status.step, status.durable = step, durable
    place = Place(rank=1, world_size=2, replicas=data_parallel(2))
    return recover_uncoordinated(status, source, place, msgspec.structs.replace(HELLO, directory=str(directory)), FAULT)


def test_an_uncoordinated_rank_saves_and_says_so(tmp_path: Path) -> None:
    source = FakeSource()
    assert uncoordinated(tmp_path, source).ending == "saved"
    assert source.done == ["save 3", "publish [1]"]
    [record] = (tmp_path / "incidents").iterdir()
    incident = decode_incident(record.read_bytes())
    assert (incident.led_by, incident.step_saved, incident.steps_lost) == ("rank 1", 3, 0)
    assert incident.unused[0].why == "unknown: the controller is gone"


def test_alone_a_record_that_cannot_be_written_does_not_spoil_the_save(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert uncoordinated(tmp_path / "file", FakeSource()).ending == "saved"


@pytest.mark.parametrize("durable", [0, 1])
@pytest.mark.parametrize("error", [OSError(28, "No space left"), TypeError("a bug"), OSError(2, "none", "a\udcff")])
def test_alone_a_failed_save_is_on_record_and_loses_all_since_the_newest_checkpoint(
    tmp_path: Path, error: Exception, durable: int
) -> None:
    source = FakeSource()
    source.error = error
    outcome = uncoordinated(tmp_path, source, durable=durable)
    assert (outcome.ending, type(error).__name__ in outcome.reason) == ("gave_up", True)
    [record] = (tmp_path / "incidents").iterdir()
    assert decode_incident(record.read_bytes()).steps_lost == 3 - durable


def test_alone_with_nothing_new(tmp_path: Path) -> None:
    source = FakeSource()
    assert uncoordinated(tmp_path, source, step=0).ending == "nothing_to_save"
    assert source.done == []


def test_a_session_takes_any_text_for_a_cause(tmp_path: Path) -> None:
    """Exceptions quote file names, and those may hold bytes that are not UTF-8."""
    source = FakeSource()
    source.rank = 0
    place = Place(rank=0, world_size=1, replicas=data_parallel(1))
    session = Session(GaspConfig.resolve(tmp_path), place, source, None)
    try:
        session.training_started(2, 0)
        assert session.fault("exception", "no such file: \udcff").ending == "saved"
    finally:
        session.close(goodbye=False)
    [record] = (tmp_path / "incidents").iterdir()
    assert decode_incident(record.read_bytes()).faults[0].cause == "no such file: \\udcff"


def test_a_rank_that_defers_gathers_and_may_end(tmp_path: Path) -> None:
    """Its framework leads its recoveries itself: nobody here may take the end of a rank for a fault."""
    controller = ControllerThread(new_token())
    try:
        contact = Contact(controller.endpoint.address, controller.endpoint.token)
        sessions = []
        for rank in range(2):
            source = FakeSource()
            source.rank = rank
            place = Place(rank=rank, world_size=2, replicas=data_parallel(2), job="aside")
            sessions.append(Session(GaspConfig.resolve(tmp_path), place, source, contact))
            sessions[-1].defer_to_framework()
        told: list[list[bytes]] = []
        other = threading.Thread(target=lambda: told.append(sessions[1].gather("tag", b"1")))
        other.start()
        assert sessions[0].gather("tag", b"0") == [b"0", b"1"]
        other.join(60.0)
        assert told == [[b"0", b"1"]]
        sessions[1].close(goodbye=False)
        assert not sessions[0].status.held
        sessions[0].close(goodbye=True)
    finally:
        controller.stop()
    assert not (tmp_path / "incidents").exists()


def test_the_end_is_reported_before_the_training_thread_continues() -> None:
    """It may end the process, and what was not reported by then never is."""
    status, seen = RankStatus(), list[m.Release | None]()

    def told(outcome: m.Release) -> None:
        seen.append(status.outcome)

    processor = Processor(status, FakeSource(), None, lambda fault: RELEASE, (1.0, 5.0), told)
    try:
        processor.over(RELEASE)
    finally:
        processor.close(goodbye=False)
    assert seen == [None]
    assert status.outcome == RELEASE


def test_a_message_that_cannot_be_sent_holds_nobody_up() -> None:
    def broken(outcome: m.Release) -> None:
        raise OSError("stderr is gone")

    status = RankStatus()
    processor = Processor(status, FakeSource(), None, lambda fault: RELEASE, (1.0, 5.0), broken)
    try:
        with pytest.raises(OSError, match="stderr is gone"):
            processor.over(RELEASE)
    finally:
        processor.close(goodbye=False)
    assert status.outcome == RELEASE
