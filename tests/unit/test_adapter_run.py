"""The life cycle of an adapter's run: one order, one rule for exits, everything undone whatever raises."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lastgasp import session as session_module
from lastgasp.adapter.run import AdapterRun, Framework
from lastgasp.config import GaspConfig
from lastgasp.errors import ConfigError
from lastgasp.gasp import messages as m
from lastgasp.gasp.again import Again
from lastgasp.gasp.messages import Release
from lastgasp.gasp.rank_status import Released
from lastgasp.gasp.serve import ControllerThread, new_token
from lastgasp.launch.framework_verdict import Verdict
from lastgasp.ports import StepLeft
from lastgasp.replicas import Digests
from lastgasp.session import Contact
from lastgasp.steps.settings import MarksConfig
from lastgasp.topology import Place, data_parallel
from support.fake_controller import FakeSource
from support.launchers import incidents


class Peer(RuntimeError):
    """A collective failed."""


class ToyTraining:
    """A state of numbers.

    Attributes:
        between: what `settle` answers.
    """

    def __init__(self) -> None:
        self.source, self.between, self.exits = FakeSource(), "", 0

    def digests(self) -> Digests:
        """Of nothing."""
        return {"model": b"1"}

    def settle(self, cause: str) -> str:
        """As the test wants it."""
        return self.between

    def before_exit(self) -> None:
        """Counted."""
        self.exits += 1

    def advice(self) -> str:
        """For people."""
        return "Buy another one."


FRAMEWORK = Framework(
    name="toy 1.0",
    kind_of=lambda error: "peer" if isinstance(error, Peer) else "exception",
    verdict_of=lambda error: Verdict(16, "NaN") if str(error) == "nan" else None,
)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[AdapterRun]:
    """Of one rank, without a controller, at step 3 once it has begun."""
    place = Place(rank=0, world_size=1, replicas=data_parallel(1))
    made = AdapterRun(FRAMEWORK, GaspConfig.resolve(tmp_path), MarksConfig.resolve(False), place, None)
    yield made
    made.close(completed=True)


def begun(run: AdapterRun) -> ToyTraining:
    training = ToyTraining()
    run.bind(training)
    assert run.begin(3, durable=0)
    run.session.step_completed(4)
    return training


def test_everything_is_undone_in_reverse_order_once_whatever_raises(
    run: AdapterRun, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []

    def take_out_a_hook() -> None:
        raise AttributeError("somebody else has taken it out")

    run.on_close(lambda: done.append("session was closed before"), last=True)
    run.on_close(lambda: done.append("first"))
    run.on_close(take_out_a_hook)
    run.on_close(lambda: done.append("last"))
    run.close(completed=True)
    run.close(completed=True)
    assert done == ["last", "first", "session was closed before"]
    assert "take_out_a_hook" in caplog.text and "somebody else has taken it out" in caplog.text


def test_ranks_that_differed_before_are_no_sign_of_what_makes_them_differ(
    run: AdapterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loop whose models differ from the start is told that its optimizers divide their work."""
    run.bind(ToyTraining())
    found = [True, False]
    monkeypatch.setattr(run.session, "compare_replicas", lambda *_, **__: found.pop(0))
    assert [run.compare_again() for _ in range(3)] == [True, False, True]
    assert (found, run.alike) == ([], False)


def test_an_interrupt_at_the_end_is_not_swallowed(run: AdapterRun) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    run.on_close(stop)
    with pytest.raises(KeyboardInterrupt):
        run.close(completed=True)


def test_an_exception_in_training_has_the_step_saved(run: AdapterRun) -> None:
    training = begun(run)
    run.failed(ValueError("no"))
    assert "save 4" in training.source.done
    assert run.session.status.outcome is not None and run.session.status.outcome.ending == "saved"


def test_a_state_that_cannot_be_kept_in_memory_is_saved(run: AdapterRun, caplog: pytest.LogCaptureFixture) -> None:
    """The controller counts on it, and no other rank may have been able to keep it."""

    def keep(again: Again) -> None:
        raise MemoryError("no room")

    training = begun(run)
    run.before_again = keep
    again = Again(incarnation=1, step=4, source=0, takers=(), lost=(), port=1)
    order = Release(recovery=1, ending="in_place", step=4, path="", reason="", again=again)
    with pytest.raises(MemoryError):
        run.failed(Released(order))
    assert "save 4" in training.source.done
    [incident] = incidents(run.config.directory)
    assert (incident.ending, incident.step_saved, incident.faults[0].cause) == ("saved", 4, "MemoryError: no room")


@pytest.mark.parametrize("error", [OSError("disk"), Peer("gone")])
def test_the_traceback_of_what_is_answered_in_place_is_logged(
    run: AdapterRun, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends no process, so that nobody else prints it; that of a rank that saw its peers fail says nothing."""
    begun(run)
    run.before_again = lambda again: None
    again = Again(incarnation=1, step=4, source=0, takers=(), lost=(), port=1)
    order = Release(recovery=1, ending="in_place", step=4, path="", reason="", again=again)
    run.session.status.release(order)

    def step_of_the_user() -> None:
        raise error

    try:
        step_of_the_user()
    except Exception as raised:
        run.failed(raised)
    assert ("step_of_the_user" in caplog.text) == isinstance(error, OSError)


def test_a_session_that_another_backend_knows_goes_on_with_the_next_entry(run: AdapterRun) -> None:
    begun(run)
    undone: list[str] = []
    run.on_close(lambda: undone.append("hook"))
    run.on_close(lambda: undone.append("recorder"), last=True)
    run.on_completed(lambda: undone.append("completed"))
    run.stays, run.before_again = True, lambda again: undone.append("kept")
    again = Again(incarnation=1, step=4, source=-1, takers=(), lost=(), port=0)
    run.session.status.release(Release(recovery=0, ending="in_place", step=4, path="", reason="", again=again))
    run.failed(Released(run.session.status.outcome or Release(recovery=0, ending="open", step=0, path="", reason="")))
    assert undone == ["kept", "hook", "recorder"]
    begun(run)
    assert run.session.status.outcome is None and not run.session.status.held
    run.session.before_update()
    run.session.step_completed(5)
    assert run.session.status.step == 5


def test_a_state_between_two_steps_is_not_saved(run: AdapterRun, caplog: pytest.LogCaptureFixture) -> None:
    training = begun(run)
    run.session.before_update()
    training.between = "raised inside the update"
    run.failed(ValueError("no"))
    outcome = run.session.status.outcome
    assert outcome is not None and outcome.ending == "gave_up"
    assert "ValueError: no: raised inside the update" in outcome.reason
    assert training.source.done == [] and "Buy another one." in caplog.text


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(None), RuntimeError("nan")])
def test_a_good_exit_and_a_verdict_are_no_fault(run: AdapterRun, error: BaseException) -> None:
    training = begun(run)
    run.failed(error)
    assert training.source.done == [] and run.session.status.outcome is None


@pytest.mark.parametrize("exits", [True, False])
def test_a_training_that_a_handler_of_sigterm_has_ended_is_saved_first(run: AdapterRun, exits: bool) -> None:
    """It calls `sys.exit(0)`, or has told the loop to end."""
    training, told = ToyTraining(), list[int]()
    run.bind(training)

    def handler(number: int, frame: object) -> None:
        told.append(number)
        if exits:
            raise SystemExit(0)

    before = signal.getsignal(signal.SIGTERM)
    assert run.begin(3, durable=0, users_handler=handler)
    run.session.step_completed(4)
    try:
        signal.raise_signal(signal.SIGTERM)
        run.finish()
        run.close(completed=True)
    except SystemExit as error:
        run.failed(error)
    assert told == [signal.SIGTERM] and training.source.done.count("save 4") == 1
    assert run.session.status.outcome is not None and run.session.status.outcome.ending == "saved"
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("how", ["condemned", "by a verdict", "to be repeated"])
def test_values_that_are_wrong_on_all_ranks_are_saved_by_none(tmp_path: Path, how: str) -> None:
    """Only rank 1 has seen it; rank 0, whose collective fails then, holds the same and could save it."""
    controller = ControllerThread(new_token())
    contact = Contact(controller.endpoint.address, controller.endpoint.token)

    def rank(number: int) -> AdapterRun:
        place = Place(rank=number, world_size=2, replicas=data_parallel(2), job="job")
        made = AdapterRun(FRAMEWORK, GaspConfig.resolve(tmp_path), MarksConfig.resolve(False), place, contact)
        begun(made)
        return made

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(rank, range(2)))
        if how == "condemned":
            runs[1].condemn(Verdict(1, "the values are wrong"))
        else:
            runs[1].session.condemn("the values are wrong")
            runs[1]._training.between = "the values are wrong"  # type: ignore[union-attr]
            runs[1].failed(RuntimeError("nan" if how == "by a verdict" else "again"))
        runs[0].session.fault("peer", "connection closed")
        list(pool.map(lambda run: run.close(completed=True), runs))
    controller.stop()
    [incident] = incidents(tmp_path)
    assert (incident.ending, incident.step_saved) == ("gave_up", None)
    assert "the values are wrong" in incident.notes
    assert how == "by a verdict" or "the values are wrong" in incident.reason  # after one it leaves as at a good end
    for run in runs:
        assert run.source.inner.done == []  # type: ignore[union-attr]


def test_what_raises_before_training_is_reported_as_a_failed_start(
    run: AdapterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(run.session, "failed_to_start", lambda *what: said.append(what))
    error = ValueError("no")
    run.failed(error)
    assert said == [(error, "exception")]


def test_a_rank_that_was_released_exits_with_the_outcomes_code(
    run: AdapterRun, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "lastgasp")
    training = begun(run)
    outcome = Release(recovery=1, ending="saved", step=4, path="here", reason="")
    with pytest.raises(SystemExit) as exit_:
        run.failed(Released(outcome))
    assert exit_.value.code == 83 and training.exits == 1


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    place = Place(rank=0, world_size=1, replicas=data_parallel(1))
    monkeypatch.setattr(session_module, "Session", None)
    with pytest.raises(ConfigError, match="a directory that this user can write"):
        AdapterRun(FRAMEWORK, GaspConfig.resolve(tmp_path / "file"), MarksConfig.resolve(False), place, None)


def test_who_raised_while_all_leave_the_step_reports_what_it_raised(
    run: AdapterRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that was completed for it is whole: MindIO's order to leave it is no answer to this rank's fault."""
    training, reported = begun(run), list[str]()

    def leaves(cause: str) -> str:
        raise StepLeft("STEP FINISH")

    def fault(kind: str, cause: str) -> m.Release:
        reported.append(f"{kind}: {cause}")
        return m.Release(recovery=0, ending="saved", step=4, path="", reason="")

    monkeypatch.setattr(training, "settle", leaves)
    monkeypatch.setattr(run.session, "fault", fault)
    run.session.status.broken = "x"
    run.failed(ValueError("its own"))
    assert reported == ["exception: ValueError: its own"] and run.session.status.broken == ""
