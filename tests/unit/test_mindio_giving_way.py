"""A rank that MindX moves to another node: its old process gives way to the new one, and to nobody else."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import pytest
from torch._C._distributed_c10d import HashStore

from lastgasp import _clock
from lastgasp.backends.ascend.mindio import early, giving_way
from lastgasp.backends.ascend.mindio import parking as parking_module
from lastgasp.backends.ascend.mindio.early import Early, reboot_type
from lastgasp.backends.ascend.mindio.giving_way import GivingWay
from lastgasp.backends.ascend.mindio.parking import Parking
from lastgasp.events import Fault
from lastgasp.gasp import messages as m
from lastgasp.gasp.attempt import Attempt
from lastgasp.gasp.observer import IN_MINDX
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.launch.bounded import BoundedStore
from lastgasp.pytorch.loop import succession
from lastgasp.pytorch.loop.succession import Succession


@pytest.fixture
def store() -> BoundedStore:
    """In place of that of torch's agent."""
    return BoundedStore(HashStore(), 5.0)


def test_a_new_process_takes_the_rank_once_the_old_one_gives_way(store: BoundedStore) -> None:
    new, old = Succession(store, 1), Succession(store, 1)
    new.waits()
    seen = 0

    class Saying(BoundedStore):
        """The store; whoever looks for the new process hears it once more."""

        def add(self, key: str, amount: int) -> int:
            """Count."""
            nonlocal seen
            seen += 1
            if seen == 2:
                new.waits()
            return store.add(key, amount)

    old._store = Saying(store._store)
    assert old.look_for_successor() and not old.taken()
    old.give_way()
    new.take_over()
    assert old.taken()
    assert not Succession(store, 1).look_for_successor() and not new.look_for_successor()  # at once: nobody is named


def test_a_process_is_not_its_own_successor(store: BoundedStore) -> None:
    """Where a later one has failed before it said that it waits."""
    one = Succession(store, 1)
    one.waits()
    before = _clock.monotonic()
    assert not one.look_for_successor() and _clock.monotonic() < before + succession.SEEN


def test_a_store_that_is_stopped_holds_up_nobody_twice() -> None:
    """As torch's client does, whatever its timeout."""
    stopped, asked = threading.Event(), list[str]()

    class Stopped:
        """Its server does not answer."""

        def check(self, keys: list[str]) -> bool:
            """For ever."""
            asked.append(keys[0])
            stopped.wait()
            return False

    old = Succession(BoundedStore(Stopped(), 0.05), 1)
    try:
        for why in ("has not answered in 0.05 s", "still owes an earlier answer"):
            with pytest.raises(RuntimeError, match=why):
                old.look_for_successor()
        assert asked == ["successor-1"]
    finally:
        stopped.set()


def test_who_does_not_answer_is_not_waited_for(
    store: BoundedStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has ended, or the controller refuses the new process."""
    monkeypatch.setattr(succession, "ANSWER", 0.1)
    new = Succession(store, 1)
    new.waits()
    new.take_over()
    assert "the old process of rank 1 does not say that it gives way" in caplog.text


def test_the_new_process_waits_for_as_long_as_the_old_one_may_take() -> None:
    assert succession.ANSWER >= succession.SEEN + giving_way.CONFIRM


def test_who_does_not_wait_any_more_is_no_successor(store: BoundedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has ended, or the switch was stopped."""
    monkeypatch.setattr(succession, "SEEN", 0.1)
    Succession(store, 1).waits()
    old = Succession(store, 1)
    assert not old.look_for_successor() and not old.taken()
    assert not Succession(store, 2).look_for_successor()


def test_a_process_that_takes_a_dead_ones_place_asks_nobody(store: BoundedStore) -> None:
    Succession(store, 1).take_over()


class Left(BaseException):
    """The process would have ended."""


class Old:
    """The old process: `said` is what it did, in order; its neighbours are this object."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits: bool = True, confirms: bool = True) -> None:
        self.said: list[str] = []
        self.waits, self.confirms, self.over, self.led = waits, confirms, False, True
        early_one = Early(None, None, 1, False)  # type: ignore[arg-type]
        early_one.meeting = SimpleNamespace(succession=self)
        monkeypatch.setattr(early, "_early", [early_one])
        monkeypatch.setattr(giving_way, "KNOWN", 0.1)
        processor: Any = self
        self.way = GivingWay(1, processor, RankStatus(), self.leave)

    def look_for_successor(self) -> bool:
        """Whether the test has one."""
        return self.waits

    def give_way(self) -> None:
        """Noted."""
        self.said.append("gives way")

    def taken(self) -> bool:
        """What the test wants."""
        return self.over

    def tell(self, message: m.Report) -> None:
        """Noted."""
        self.said.append(f"{message.fault.kind} {message.fault.rank}")

    def consult(self, *_: Any) -> Any:
        """The controller's answer."""
        return m.Consulted(step=0, aux={}, parts={}) if self.confirms else None

    def leave(self, code: int) -> NoReturn:
        """The process ends."""
        raise Left(code)


def test_it_says_so_first_and_ends_when_its_rank_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Old(monkeypatch)
    old.way.begins()
    old.way.step_finished()
    assert old.said == ["killed 1", "gives way"] and old.way.decided()
    old.way.look()
    old.over = True
    with pytest.raises(Left, match="0"):
        old.way.look()


@pytest.mark.parametrize(
    ("unanswered", "led", "ends"), [(True, True, True), (False, False, True), (False, True, False)]
)
def test_it_does_not_speak_for_a_rank_that_may_have_a_new_process(
    unanswered: bool, led: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not heard that the rank is taken; where MindIO has ended the switch it is a holder as any."""
    old = Old(monkeypatch)
    old.way.step_finished()
    old.led = led
    with pytest.raises(Left, match="0") if ends else contextlib.nullcontext():
        old.way.not_ordered(unanswered)
    old.way.over()
    old.way.not_ordered(True)


@pytest.mark.parametrize("takes", [True, False])
def test_who_waits_for_orders_does_so_without_the_store(
    takes: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once that the other process of the rank cannot be asked. Where no order comes, that is known."""
    released, looks, late = threading.Event(), list[int](), [0.0]
    monkeypatch.setattr(parking_module, "_clock", SimpleNamespace(monotonic=lambda: _clock.monotonic() + late[0]))

    class Api:
        """MindIO."""

        ReportState: ClassVar = {"RS_STEP_FINISH": SimpleNamespace(value=7)}
        Action = SimpleNamespace(RETRY=SimpleNamespace(value=0))

        def tft_report_error(self, state: int) -> None:
            """That it has left its step."""

        def tft_wait_repair_action(self) -> int:
            """Once the test lets it."""
            released.wait(60)
            parking.rolled_back(9)
            return 0

    def fails() -> None:
        looks.append(1)
        if len(looks) == 2 and takes:
            released.set()
        elif len(looks) == 2:
            late[0] = 120.0
        raise RuntimeError("no store")

    parking = Parking(Api(), 0, RankStatus(), True, 120.0)
    parking.at_each_look = fails
    try:
        assert (parking.wait("exception", "STEP FINISH") is not None) == takes
        assert parking.unanswered != takes
    finally:
        released.set()
    assert len(looks) >= 2 and caplog.text.count("no store") == 1


def test_it_does_not_say_so_where_the_controller_would_refuse_the_new_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = Old(monkeypatch, confirms=False)
    old.way.step_finished()
    assert old.said == ["killed 1"]


def test_a_rank_that_is_not_moved_says_nothing_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Old(monkeypatch, waits=False)
    old.over = True
    old.way.begins()
    assert not old.way.decided()  # not yet
    old.way.step_finished()
    old.way.look()
    assert old.said == [] and not old.way.decided()


def test_who_goes_on_does_not_end_by_a_later_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    old = Old(monkeypatch)
    old.way.step_finished()
    old.way.over()
    assert not old.way.decided()


def test_who_has_a_fault_of_its_own_does_not_wait_at_a_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It left the step by another exception, so that nobody looks for a new process any more."""
    old = Old(monkeypatch)
    monkeypatch.setattr(giving_way, "KNOWN", 60.0)
    old.way.begins()
    old.way.over()
    before = _clock.monotonic()
    assert not old.way.decided() and _clock.monotonic() < before + 30


def test_what_an_earlier_repair_has_left_is_forgotten() -> None:
    """No `stop` comes before the orders of a switch."""

    class Api:
        """MindIO, which orders nothing that concerns this rank but the rollback."""

        ReportState: ClassVar = {"RS_STEP_FINISH": SimpleNamespace(value=7)}
        Action = SimpleNamespace(RETRY=SimpleNamespace(value=0))

        def tft_report_error(self, state: int) -> None:
            """That it has left its step."""
            assert state == 7

        def tft_wait_repair_action(self) -> int:
            """To go on."""
            parking.rebuilt((1,))
            parking.rolled_back(9)
            return 0

    parking = Parking(Api(), 0, RankStatus(), True, 60.0)
    parking.repair({"src": [0], "dst": [2]})
    repaired = parking.wait("exception", "STEP FINISH")
    assert repaired is not None and (repaired.source, repaired.takers, repaired.lost) == (-1, (), (1,))


@pytest.mark.parametrize(
    ("module", "kind"), [({}, "arf"), ({"tft_get_reboot_type": lambda: "hot switch"}, "hot switch")]
)
def test_older_packages_know_no_switch(module: dict[str, Any], kind: str) -> None:
    assert reboot_type(SimpleNamespace(__name__="no_such_package", **module)) == kind


def hello(rank: int) -> m.Hello:
    """Of a rank that joins a job of three."""
    return m.Hello(
        protocol=m.PROTOCOL, version="", mac=b"", nonce=b"", rank=rank, job="j", attempt=0, world_size=3,
        replicas=b"", directory="/c", host="h", pid=1, hang_timeout=1.0, save_timeout=1.0, finish_timeout=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("says", ["gives way", "raises", "nothing"])
def test_two_processes_of_a_rank_are_there_only_where_the_old_one_gives_way(
    says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lastgasp.gasp.attempt.unpack", lambda packed: ((0, 1, 2),))
    attempt = Attempt.of(hello(0))
    attempt.led_by(IN_MINDX)
    for rank in range(3):
        attempt.joined(rank, 0.0, 1)
    kinds: dict[str, Any] = {"gives way": "killed", "raises": "exception"}
    if says in kinds:
        fault = Fault(kind=kinds[says], rank=1, cause="x", step=4, seen_ns=1)
        attempt.machine.said(1, m.Report(fault=fault), 1.0)
    assert bool(attempt.disagreement(hello(1))) == (says != "gives way")
    assert "two processes claim the same rank" in attempt.disagreement(hello(2))
