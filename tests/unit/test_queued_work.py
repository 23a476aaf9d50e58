"""What is queued on an accelerator behind a collective that never ends, and what a gasp reads meanwhile."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lastgasp.errors import NotSaveable
from lastgasp.gasp.rank_status import RankStatus, Released, given_up
from lastgasp.nccl import WATCHDOG
from lastgasp.pytorch import queued as queued_module
from lastgasp.pytorch.queued import QueuedWork
from support.accelerator import Accelerator

DEVICE = torch.device("cuda:3")


def session_of(status: RankStatus, backend: str = "embedded") -> Any:
    """What of a session is used."""
    return SimpleNamespace(before_update=status.before_update, status=status, backend=SimpleNamespace(backend=backend))


class Training:
    """One rank's, whose gradients come from a peer."""

    def __init__(self) -> None:
        self.module, self.status, self.peer = Accelerator(), RankStatus(), threading.Event()
        self.work = QueuedWork([DEVICE], self.module)
        self.opens = self.work.gate(session_of(self.status))
        self.weights = 0
        self.peer.set()

    def _updated(self) -> bool:
        self.weights += 1
        return True

    def step(self) -> None:
        """Forward, a collective of the gradients, the update; nothing is waited for but by the gate."""
        self.module.training.give(self.peer.is_set)
        self.opens()
        self.module.training.give(self._updated)
        self.work.mark()
        self.status.step_completed(self.status.step + 1)

    def in_a_thread(self) -> tuple[threading.Thread, list[BaseException]]:
        """A thread, not started, for one step; and how it was told to stop, once it was."""
        raised = list[BaseException]()

        def train() -> None:
            try:
                self.step()
            except Released as error:
                raised.append(error)

        return threading.Thread(target=train, daemon=True), raised

    def wait_until_at_gate(self) -> None:
        """Until the thread of the step waits at the closed gate."""
        deadline = time.monotonic() + 60.0
        while not self.status.at_gate:
            assert time.monotonic() < deadline, "the training thread has not come to the gate"
            time.sleep(0.005)

    def read(self) -> int:
        """What a gasp reads, by a copy on the current stream of its thread."""
        found = list[int]()
        with self.work.reading():
            stream = self.module.current_stream()
            assert stream is not self.module.training
            stream.give(lambda: not found.append(self.weights))  # type: ignore[func-returns-value]
        return found[0]


def test_a_step_is_not_complete_before_its_gradients_are_there() -> None:
    """Else the host would count an update that no device makes any more."""
    training = Training()
    training.step()
    training.peer.clear()
    thread, raised = training.in_a_thread()
    thread.start()
    training.status.hold(60.0, target=1)
    assert (training.status.step, training.status.consistent) == (1, True)
    assert training.read() == 1, "beside the stream that waits for the peer"
    training.status.release(given_up("over"))
    thread.join(60.0)
    assert raised and training.weights == 1, "it is not stuck, and has queued no update"


def test_the_gate_that_has_opened_again_still_waits_for_the_gradients() -> None:
    training = Training()
    training.peer.clear()
    thread = threading.Thread(target=training.step, daemon=True)
    training.status.hold(60.0)
    thread.start()
    training.wait_until_at_gate()
    training.status.go_on()
    thread.join(0.2)
    assert thread.is_alive() and training.status.step == 0
    training.peer.set()
    thread.join(60.0)
    assert (training.status.step, training.weights) == (1, 1)


def test_a_gate_that_closes_once_more_stops_a_thread_that_still_waits_for_its_gradients() -> None:
    training = Training()
    training.peer.clear()
    thread, raised = training.in_a_thread()
    training.status.hold(60.0)
    thread.start()
    for _ in range(2):
        training.wait_until_at_gate()
        training.status.go_on()
        training.status.hold(60.0)
    training.wait_until_at_gate()
    assert (training.status.step, training.status.consistent) == (0, True)
    training.status.release(given_up("over"))
    thread.join(60.0)
    assert raised and training.weights == 0


def test_a_further_optimizer_of_the_step_waits_and_does_not_take_back_that_the_update_has_begun() -> None:
    """torch calls the pre-hook twice in a step of an optimizer that is derived from another: `super().step()`."""
    training, slow, began = Training(), threading.Event(), threading.Event()

    def train() -> None:
        training.opens()
        training.module.training.give(training._updated)
        training.module.training.give(slow.is_set)
        began.set()
        training.step()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    assert began.wait(60.0)
    training.status.hold(60.0)
    thread.join(0.2)
    status = training.status
    assert (status.inside, status.begun, status.consistent, status.at_gate) == (True, 1, False, False)
    assert thread.is_alive() and training.weights == 1, "it waits for the device"
    slow.set()
    thread.join(60.0)
    assert (status.step, status.consistent, training.weights) == (1, True, 2)


def test_a_further_optimizer_waits_no_longer_than_the_recovery() -> None:
    training = Training()
    training.opens()
    training.peer.clear()
    thread, raised = training.in_a_thread()
    thread.start()
    training.status.hold(60.0)
    thread.join(0.1)
    assert thread.is_alive()
    training.status.release(given_up("over"))
    thread.join(60.0)
    assert not thread.is_alive() and not raised, "the next step's gate stops it"


def test_a_gasp_waits_for_the_update_that_was_queued() -> None:
    training, slow = Training(), threading.Event()
    training.module.training.give(slow.is_set)  # the device is busy
    thread = threading.Thread(target=training.step, daemon=True)
    slow.set()
    thread.start()
    thread.join(60.0)
    slow.clear()
    training.module.training.give(slow.is_set)
    training.module.training.give(training._updated)
    training.work.mark()
    later = threading.Timer(0.1, slow.set)
    later.start()
    assert training.read() == 2


def test_a_device_that_does_not_come_to_its_update_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queued_module, "LONGEST", 0.05)
    training, never = Training(), threading.Event()
    training.module.training.give(never.is_set)
    training.work.mark()
    with pytest.raises(NotSaveable, match="has not made the update"):
        training.read()


@pytest.mark.parametrize(
    ("value", "hosts", "told"),
    [("1", 2, "torch ends this process"), (None, 2, "torch ends this process"), ("1", 1, ""), ("0", 1, "nobody does")],
)
def test_that_torch_ends_survivors_of_other_hosts_is_said_and_that_it_ends_no_collective(
    value: str | None, hosts: int, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    variables = {"WORLD_SIZE": str(2 * hosts), "LOCAL_WORLD_SIZE": "2", "RANK": "0", WATCHDOG: value}
    for name, content in variables.items():
        monkeypatch.delenv(name, raising=False)
        if content is not None:
            monkeypatch.setenv(name, content)
    caplog.set_level("INFO")
    Training()
    assert (WATCHDOG in caplog.text) == bool(told) and told in caplog.text


def test_while_a_graph_is_captured_no_event_is_asked_for() -> None:
    training = Training()
    training.module.capturing = True
    training.opens()
    training.work.mark()
    assert training.status.inside


@pytest.mark.parametrize("devices", [[], [torch.device("cpu")], [torch.device("meta")]])
def test_without_an_accelerator_it_is_the_gate_itself(devices: list[torch.device]) -> None:
    status, work = RankStatus(), QueuedWork(devices)
    assert work.gate(session_of(status)) == status.before_update
    work.mark()
    with work.reading():
        pass


def test_where_mindio_leads_it_stops_the_device_itself() -> None:
    status, work = RankStatus(), QueuedWork([DEVICE], Accelerator())
    assert work.gate(session_of(status, "mindio")) == status.before_update


def test_a_kind_of_device_without_streams_is_left_alone() -> None:
    assert QueuedWork([torch.device("mps")])._devices == []


def test_torch_still_has_what_is_used() -> None:
    """As far as it can be seen without a device."""
    for module in (torch.cuda, torch.xpu):
        assert all(hasattr(module, name) for name in queued_module._NEEDED)


def test_what_was_queued_is_waited_for() -> None:
    training = Training()
    training.step()
    done = [False]
    training.module.training.give(lambda: done[0])
    with pytest.raises(AssertionError, match="would wait for ever"):
        training.work.settle()
    done[0] = True
    training.work.settle()
    QueuedWork([]).settle()


class Nccl:
    """Communicators that can be aborted: the collective that waits for the peer ends then, and nothing says so."""

    def __init__(self, training: Training, monkeypatch: pytest.MonkeyPatch, number: int = 1) -> None:
        self.training, self.why, self.number, self.aborts = training, "", number, 0
        for name in ("failure", "let_go", "groups_number", "uses_nccl", "abort_groups"):
            monkeypatch.setattr(queued_module, name, getattr(self, name))

    def failure(self) -> str:
        """As `aborting`'s."""
        return self.why

    def let_go(self) -> str:
        """As `aborting`'s."""
        return self.why if self.aborts else ""

    def groups_number(self) -> int:
        """As `aborting`'s."""
        return self.number

    def uses_nccl(self) -> bool:
        """As `aborting`'s."""
        return True

    def abort_groups(self, number: int) -> bool:
        """As `aborting`'s."""
        if number != self.number:
            return False
        self.aborts, self.why = self.aborts + 1, "its communicators were aborted"
        self.training.peer.set()
        return True


def test_gradients_that_an_abort_has_let_go_are_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    nccl = Nccl(training, monkeypatch)
    training.peer.clear()
    raised = list[str]()

    def train() -> None:
        try:
            training.step()
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    assert nccl.abort_groups(1)
    thread.join(60.0)
    assert "NCCL" in raised[0] and "were aborted" in raised[0]
    assert (training.weights, training.status.step, training.status.consistent) == (0, 0, True)


def test_a_collective_that_has_failed_and_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is down, and all ranks live: nobody else would notice."""
    training = Training()
    Nccl(training, monkeypatch).why = "torch says COMM_ERROR"
    training.peer.clear()
    with pytest.raises(RuntimeError, match="COMM_ERROR"):
        training.step()
    assert (training.weights, training.status.step, training.status.consistent) == (0, 0, True)


@pytest.mark.parametrize("later", [False, True])
def test_a_thread_that_is_to_enter_its_training_again_is_freed_unless_it_has(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And never is the communicator aborted that it has made since."""
    training = Training()
    nccl = Nccl(training, monkeypatch)
    monkeypatch.setattr(queued_module, "FREED_AFTER", 0.05)
    free = training.status.free
    assert free is not None
    end = free()
    nccl.number += later
    end()
    assert nccl.aborts == (0 if later else 1)


def test_what_an_abort_has_let_go_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective of the update itself, as ZeRO has it: behind an abort its end says nothing."""
    training = Training()
    Nccl(training, monkeypatch)
    monkeypatch.setattr(queued_module, "FREED_AFTER", 0.0)
    training.peer.clear()
    training.module.training.give(training.peer.is_set)
    training.work.mark()
    training.work.free()()
    with pytest.raises(NotSaveable, match="aborted before"):
        training.read()


@pytest.mark.parametrize("takes", [True, False])
def test_a_device_whose_queue_is_full_is_made_to_take_work(takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work behind a collective that never ends: at some point no thread can give the device any more."""
    training = Training()
    nccl = Nccl(training, monkeypatch)
    monkeypatch.setattr(queued_module, "TAKES_WORK", 60.0 if takes else 0.05)
    training.step()
    if not takes:
        training.peer.clear()
    monkeypatch.setattr(queued_module, "_copy_one", lambda device: training.peer.wait(60.0))
    with training.work.reading():
        assert training.peer.wait(60.0), "what the gasp would wait for"
    assert nccl.aborts == (not takes)


def test_a_device_that_takes_no_more_work_while_a_gasp_reads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one connection to the device all streams share a queue, and the training thread queues a wait later."""
    training = Training()
    nccl, taken = Nccl(training, monkeypatch), threading.Event()

    def takes_work() -> bool:  # at once, also where a machine is so busy that a copy is late
        taken.set()
        return training.peer.is_set()

    monkeypatch.setattr(training.work, "_takes_work", takes_work)
    monkeypatch.setattr(queued_module, "LOOKS_EVERY", 0.01)
    training.step()
    with training.work.reading():
        assert taken.wait(60.0)
        training.peer.clear()
        assert training.peer.wait(60.0)
    assert nccl.aborts == 1


def test_a_stream_is_taken_that_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives out its streams in turn, and NCCL has one of them."""
    training = Training()
    training.step()
    given = iter([False, False, True])
    kind = type(training.module.training)
    monkeypatch.setattr(kind, "query", lambda self: next(given), raising=False)
    assert training.read() == 1
    assert len(training.module.made) == 3


def test_nothing_is_aborted_of_a_rank_that_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has only stopped for others to be taken in, and its device is slow."""
    training = Training()
    nccl = Nccl(training, monkeypatch)
    looked = threading.Event()
    monkeypatch.setattr(queued_module, "TAKES_WORK", 0.01)
    monkeypatch.setattr(queued_module, "LOOKS_EVERY", 0.01)

    def slow(device: torch.device) -> None:
        looked.set()
        time.sleep(0.1)

    monkeypatch.setattr(queued_module, "_copy_one", slow)
    training.status.may_go_on = True
    with training.work.reading():
        assert looked.wait(60.0)
        time.sleep(0.1)
    assert nccl.aborts == 0


def test_gradients_that_are_there_are_whole_whatever_has_failed_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer dies behind its last collective: this rank has all of it, and completes the step as others may have."""
    training = Training()
    Nccl(training, monkeypatch).why = "torch says COMM_ERROR"
    training.step()
    assert (training.weights, training.status.step) == (1, 1)
