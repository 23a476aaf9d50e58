"""The MindIO backend of one rank, without processes: what it reports to whom, and when."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest

from lastgasp import backends, exitcodes
from lastgasp.backends.ascend.mindio import backend, early, exits, shutdown, validation
from lastgasp.backends.ascend.mindio.backend import Control, MindioBackend
from lastgasp.backends.ascend.mindio.handlers import Handlers
from lastgasp.backends.ascend.mindio.lastword import LastWord
from lastgasp.backends.ascend.mindio.parking import Parking
from lastgasp.backends.ascend.mindio.strategies import Strategies
from lastgasp.config import GaspConfig
from lastgasp.errors import ConfigError, NotSaveable
from lastgasp.gasp import messages as m
from lastgasp.gasp.again import INCARNATION, LED
from lastgasp.gasp.rank_status import RankStatus, given_up
from lastgasp.ports import Repaired
from lastgasp.topology import Place, data_parallel

SAVED = m.Release(recovery=0, ending="saved", step=7, path="p", reason="")
RETRY, RECOVER = Strategies(True, False, False, {}), Strategies(False, True, False, {})


class Left(BaseException):
    """The process would have ended with this code."""


class Action(Enum):
    """As MindIO's."""

    RETRY = 0
    EXIT = 1


class ReportState(Enum):
    """As MindIO's, what is used of it."""

    RS_NORMAL = 0
    RS_UCE = 2
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class Rank:
    """A backend whose neighbours are this object: `calls` is what was said to them, in order."""

    def __init__(self, directory: Path, strategies: Strategies | None = None) -> None:
        self.calls: list[str] = []
        self.status = RankStatus()
        self.next_action = Action.RETRY.value
        self.missing, self.led = "", True
        self.on_tell: Callable[[], None] = lambda: None
        self.on_error: Callable[[], None] = lambda: None
        processor: Any = self
        source: Any = SimpleNamespace(rank=1)
        control = Control(self.status, processor, self.gather, self.uncoordinated, "127.0.0.1", self.leave)
        place = Place(rank=1, world_size=2, replicas=data_parallel(2))
        self.backend = MindioBackend(GaspConfig.resolve(directory), place, source, control)
        self.backend.strategies, self.backend._api, self.backend._state = strategies or RETRY, self, "running"
        self.Action, self.ReportState = Action, ReportState
        self.parking = self.backend._parking = Parking(self, 1, self.status, (strategies or RETRY).retry, 60.0)
        self.led_elsewhere: Any = None

    # -- MindIO ---
    def tft_report_error(self, state: int) -> None:
        """Noted."""
        self.calls.append(ReportState(state).name)
        self.on_error()

    def tft_wait_next_action(self) -> int:
        """What the test wants."""
        self.calls.append("next")
        return self.next_action

    def tft_wait_repair_action(self) -> int:
        """What the test wants; on MindIO's thread the rollback has been ordered before."""
        self.calls.append("repair")
        if self.next_action == Action.RETRY.value:
            self.parking.rolled_back(7)
        return self.next_action

    def tft_destroy_processor(self) -> None:
        """Noted."""
        self.calls.append("destroy")

    # -- our control thread ---
    def report(self, fault: Any) -> None:
        """Noted."""
        self.calls.append(f"report {fault.kind}")

    def tell(self, message: Any) -> bool:
        """Noted."""
        what = "nobody leads" if isinstance(message, m.Led) and not message.by else ""
        self.calls.append(what or (message.text if isinstance(message, m.Noted) else f"tell {message.ending}"))
        self.on_tell()
        return self.led

    def over(self, outcome: m.Release) -> None:
        """The end."""
        self.status.release(outcome)

    def gather(self, tag: str, payload: bytes, seconds: float = 0.0) -> Any:
        """All are there, or who is missing."""
        self.calls.append("together")
        return m.Gathered(tag=tag, parts=(), missing=self.missing)

    def uncoordinated(self, fault: Any) -> m.Release:
        """Without a controller."""
        self.calls.append("alone, gate closed" if self.status.held else "alone")
        return given_up("alone")

    def leave(self, code: int) -> NoReturn:
        """The process ends."""
        raise Left(code)


# -- faults ----------------------------------------------------------------------------------------


def test_a_rank_that_saves_is_not_reported_as_faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindIO needs longer than DETECTION to write a big state."""
    rank = Rank(tmp_path)
    monkeypatch.setattr(exits, "DETECTION", 0.0)
    monkeypatch.setattr(exits, "telling", lambda *_: exits.Telling("RS_UNKNOWN", 0.01))
    rank.status.hold(60.0, 7)
    threading.Timer(0.2, rank.status.release, (SAVED,)).start()
    rank.backend.fault("peer", "RuntimeError: connection closed by peer")
    assert rank.calls == ["report peer"]


def test_where_mindio_ends_the_job_without_a_checkpoint_ours_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "SETTLE", 0.01)
    rank = Rank(tmp_path)
    rank.on_tell = lambda: rank.status.release(SAVED)
    with pytest.raises(Left) as left:
        rank.backend._leave()
    assert left.value.args == (exitcodes.SAVED,)
    assert rank.calls == ["report peer", "tell gave_up"]


def test_without_any_controller_no_update_comes_while_this_rank_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training thread may be well: only this thread knows that the job is to end."""
    monkeypatch.setattr(backend, "SETTLE", 0.01)
    rank = Rank(tmp_path)
    rank.led = False
    with pytest.raises(Left):
        rank.backend._leave()
    assert rank.calls == ["report peer", "tell gave_up", "alone, gate closed"]


def test_the_training_thread_and_mindios_lead_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "SETTLE", 0.01)
    monkeypatch.setattr(MindioBackend, "grace", 0.0)
    rank = Rank(tmp_path)
    saving, saved = threading.Event(), threading.Event()

    def save() -> None:
        saving.set()
        saved.wait(60.0)
        rank.status.release(SAVED)

    rank.on_tell = save
    training = threading.Thread(target=rank.backend.fault, args=("exception", "ValueError: boom"))
    training.start()
    assert saving.wait(60.0)
    threading.Timer(0.1, saved.set).start()
    with pytest.raises(Left):
        rank.backend._leave()
    training.join(60.0)
    assert rank.calls.count("tell gave_up") == 1


@pytest.mark.parametrize(("answer", "calls"), [("granted", []), ("refused", []), ("nobody", ["RS_UNKNOWN"])])
def test_told_to_stop_in_the_middle_of_a_recovery_a_rank_stays_a_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, calls: list[str]
) -> None:
    rank = Rank(tmp_path)
    monkeypatch.setattr(backend, "ask_for_dump", lambda endpoint: answer)
    monkeypatch.setattr(backend, "TURN", 0.0)
    if answer == "nobody":
        rank.on_error = lambda: rank.status.release(SAVED)
    else:
        threading.Timer(0.2, rank.status.release, (SAVED,)).start()
    rank.backend._stop_job(rank.backend._fault_here("sigterm", "asked to stop"))
    assert rank.calls == calls


def test_a_rank_that_raised_gets_time_for_its_own_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpore mode's exit order comes at once, on another thread than that which prints the traceback."""
    rank, waited = Rank(tmp_path), []
    monkeypatch.setattr(MindioBackend, "grace", 7.5)
    monkeypatch.setattr(threading.Event, "wait", lambda self, seconds=None: waited.append(seconds))
    rank.status.outcome = SAVED
    for state in ("running", "faulted"):
        rank.backend._state = state
        with pytest.raises(Left):
            rank.backend._leave()
    assert waited.count(7.5) == 1


# -- in place --------------------------------------------------------------------------------------


def test_where_only_recover_is_granted_survivors_come_back_too(tmp_path: Path) -> None:
    rank, entered = Rank(tmp_path, RECOVER), []

    def train(what: str) -> str:
        entered.append(what)
        if len(entered) == 1:
            raise RuntimeError("FORCE STOP. by MindIO")
        return what

    assert rank.backend.protect(train)("x") == "x"
    assert rank.calls == ["RS_NORMAL", "next", "repair"]


def test_what_mindio_was_told_too_early_is_stopped_and_refused(tmp_path: Path) -> None:
    """A rank that did not stop, or said that it is not clean, would be MindIO's reason to save nothing."""
    told = Strategies(False, False, False, {"elastic-training": "no ElasticLoader"}, told=True)
    rank = Rank(tmp_path)
    rank.backend.strategies = told
    assert rank.backend._stays and told.more and not told.any_in_place
    processor: Any = rank
    handlers = Handlers(
        rank.backend._config, rank.backend._place, rank.backend._source, rank.status, processor, told,
        over=lambda ended: None, leave=lambda: None, parking=rank.parking,
    )  # fmt: skip
    assert handlers.clean(False, None, None) == 0
    with pytest.raises(NotSaveable):
        handlers.rollback(7, None, None)
    with pytest.raises(NotSaveable):
        handlers.zit_downgrade_rebuild([0], [0], None, "")


def test_what_is_not_granted_is_no_retry(tmp_path: Path) -> None:
    def train() -> None:
        raise RuntimeError("UCE ERROR")

    rank = Rank(tmp_path, RECOVER)
    with pytest.raises(RuntimeError, match="UCE ERROR"):
        rank.backend.protect(train)()
    assert rank.calls == []


def test_a_rank_that_was_started_again_waits_for_its_state_before_it_trains(tmp_path: Path) -> None:
    rank = Rank(tmp_path, RECOVER)
    rank.backend._rebooted = True
    protected = rank.backend.protect(lambda: rank.calls.append("train"))
    protected()
    assert rank.calls == ["RS_PREREPAIR_FINISH", "repair", "train"]
    protected()
    assert rank.calls[3:] == ["train"]


def test_for_a_switch_to_another_node_no_stop_is_waited_for(tmp_path: Path) -> None:
    rank = Rank(tmp_path, RECOVER)
    rank.parking._forget = lambda: rank.parking.rebuilt((0,))  # type: ignore[method-assign]
    repaired = rank.backend.goes_on("exception", "STEP FINISH")
    assert repaired is not None and repaired.lost == (0,)
    assert rank.calls == ["RS_STEP_FINISH", "repair", "MindIO has moved rank 0 to another node (hot switch)"]


def test_a_rank_that_is_not_taken_in_does_not_train(tmp_path: Path) -> None:
    rank = Rank(tmp_path, RECOVER)
    rank.backend._rebooted, rank.next_action = True, Action.EXIT.value
    with pytest.raises(RuntimeError, match="did not take this rank"):
        rank.backend.protect(lambda: rank.calls.append("train"))()
    assert "train" not in rank.calls


def test_who_only_sees_a_collective_fail_waits_for_the_order_to_stop(tmp_path: Path) -> None:
    """MindIO waits for the report that follows its order, and would miss one that came before."""
    rank = Rank(tmp_path)
    threading.Timer(0.3, rank.parking.stopped).start()
    repaired = rank.backend.goes_on("peer", "RuntimeError: connection closed by peer")
    assert rank.calls == ["RS_NORMAL", "next", "repair"]
    assert repaired is not None and (repaired.number, repaired.step, repaired.takers) == (1, 7, ())
    assert not rank.parking.stop_came.is_set()


@pytest.mark.parametrize(
    ("src", "dst", "gives", "takes"),
    [([1], [0], (0,), False), ([0], [1], (1,), True), ([1, 1], [0, 2], (0, 2), False)],
)
def test_a_repair_says_who_gives_its_state_to_whom(
    tmp_path: Path, src: list[int], dst: list[int], gives: tuple[int, ...], takes: bool
) -> None:
    parking = Rank(tmp_path).parking
    parking.stopped()
    parking.repair({"src": src, "dst": dst})
    assert parking.takes == takes
    parking.rolled_back(7)
    assert parking._repaired == Repaired(1, 7, src[0], gives)


@pytest.mark.parametrize(("src", "dst"), [([0, 1], [1, 2]), ([0, 2], [1, 1]), ([0], [2])])
def test_a_repair_that_cannot_be_carried_out_is_refused(tmp_path: Path, src: list[int], dst: list[int]) -> None:
    with pytest.raises(NotSaveable, match="neither give nor take"):
        Rank(tmp_path).parking.repair({"src": src, "dst": dst})


def test_a_rank_whose_memory_is_bad_is_no_holder(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.next_action = Action.EXIT.value
    assert rank.backend.goes_on("exception", "RuntimeError: UCE ERROR") is None
    assert "memory" in rank.status.broken
    assert rank.parking.told  # MindIO is not told twice: it would wait for an exit order that has come


def test_a_rank_that_waits_for_the_end_of_training_goes_on_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, others = Rank(tmp_path), threading.Event()
    monkeypatch.setattr(rank, "gather", lambda *_: others.wait(60.0))
    rank.parking.stopped()
    rank.backend.goodbye()
    others.set()
    outcome = rank.status.outcome
    assert outcome is not None and outcome.again is not None and outcome.again.step == 7
    assert "destroy" not in rank.calls
    rank.status.renew()
    assert rank.status.outcome is None and not rank.status.held


@pytest.mark.parametrize("kind", [5, 6])
def test_a_state_that_nobody_holds_is_not_repaired_in_place(tmp_path: Path, kind: int) -> None:
    rank = Rank(tmp_path)
    processor: Any = rank
    handlers = Handlers(
        rank.backend._config, rank.backend._place, rank.backend._source, rank.status, processor, RETRY,
        over=lambda ended: None, leave=lambda: None, parking=rank.parking,
    )  # fmt: skip
    info = {"type": [0], "repair_type": kind, "src": [0], "dst": [0], "rank_list": [0]}
    with pytest.raises(NotSaveable, match="newest good checkpoint"):
        handlers.repair(7, kind == 6, [0], info, None, None)


# -- the end ---------------------------------------------------------------------------------------


def test_a_rank_leaves_together_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "destroy", lambda api: shutdown.destroy(api, 60.0))
    monkeypatch.setattr(backends, "_ended", [])
    rank = Rank(tmp_path)
    rank.backend.goodbye()
    rank.backend.goodbye()
    assert rank.calls == ["together", "destroy", "nobody leads"]


def test_a_later_training_of_the_process_is_the_embedded_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MindIO's repairs are no incarnations of it; a new process finds its controller together with the others."""
    new = early.Early(None, None, 1, False, anew=True, adopted=True)  # type: ignore[arg-type]
    monkeypatch.setattr(backends, "_ended", [])
    monkeypatch.setattr(early, "_early", [new])
    for name, value in ((INCARNATION, "3"), (LED, "1"), (early.CONTROLLER, "127.0.0.1:1")):
        monkeypatch.setenv(name, value)
    found = {name: Path("/site") / name for name in ("mindio_ttp", "torch_npu")}
    env = {"LASTGASP_BACKEND": "ascend"}
    assert backends.choose_backend(env, found.get).backend == "ascend"
    Rank(tmp_path).backend.goodbye()
    choice = backends.choose_backend(env, found.get)
    assert choice.backend == "embedded" and "it leads one training of a process" in choice.brief()
    assert (os.environ[INCARNATION], os.environ[early.CONTROLLER]) == ("1", "")


def test_a_rank_that_has_the_last_step_stays_where_another_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has left would be MindIO's reason to save nothing."""
    rank = Rank(tmp_path)
    rank.missing = "rank 0 is gone"
    threading.Timer(0.1, rank.status.release, (SAVED,)).start()
    rank.backend.goodbye()
    assert rank.calls == ["together", "report peer"]
    assert rank.status.outcome is SAVED


def test_training_begins_on_the_main_thread(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def run() -> None:
        try:
            validation.check_thread()
        except ConfigError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="worker")
    thread.start()
    thread.join()
    assert "thread='worker'" in str(errors[0])
    validation.check_thread()


PACKAGE = "import os\ndef end(): os._exit(2)\n"


def test_only_mindios_own_exit_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[object] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    package = ModuleType("mindio_fake")
    package.__file__ = str(tmp_path / "mindio_fake" / "__init__.py")
    monkeypatch.setitem(sys.modules, "mindio_fake", package)
    exec(compile(PACKAGE, str(tmp_path / "mindio_fake" / "framework" / "__init__.py"), "exec"), vars(package))
    word = LastWord(ModuleType("mindio_fake.framework"), lambda: codes.append("asked"))
    word.install()
    package.end()
    os._exit(3)
    assert codes == ["asked", 2, 3]
    word.remove()
    package.end()
    assert codes == ["asked", 2, 3, 2]


def test_an_exit_that_fails_to_wait_is_an_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[object] = []
    monkeypatch.setattr(os, "_exit", codes.append)

    def fail() -> None:
        raise Left("no")

    package = ModuleType("mindio_fake")
    package.__file__ = str(tmp_path / "mindio_fake" / "__init__.py")
    exec(compile(PACKAGE, str(tmp_path / "mindio_fake" / "x.py"), "exec"), vars(package))
    word = LastWord(package, fail)
    word.install()
    package.end()
    word.remove()
    assert codes == [2]
