"""Signals for the launcher, put off while it looks at its workers: none is lost, none comes twice."""

from __future__ import annotations

import _thread
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from lastgasp.launch import stop_signals
from lastgasp.launch.stop_signals import StopSignals


class Stopped(Exception):
    """As torch's."""


def handler(number: int, frame: object) -> None:
    raise Stopped(signal.Signals(number).name)


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopSignals]:
    """Of two signals that torch handles; the third name is none of this platform."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR1, SIGUSR2,SIGNOTHERE")
    numbers = signal.SIGUSR1, signal.SIGUSR2
    before = [signal.signal(number, handler) for number in numbers]
    made = StopSignals()
    made.take_over()
    yield made
    for number, old in zip(numbers, before, strict=True):
        signal.signal(number, old)


def test_one_outside_is_raised_where_it_arrives(signals: StopSignals) -> None:
    with pytest.raises(Stopped, match="SIGUSR1"):
        signal.raise_signal(signal.SIGUSR1)
    signals.take_over()  # of the next attempt, where nobody has set another one
    with signals:
        pass
    with pytest.raises(Stopped, match="SIGUSR2"):
        signal.raise_signal(signal.SIGUSR2)


def test_one_inside_is_raised_once_at_the_end(signals: StopSignals) -> None:
    reached = []

    def look() -> None:
        with signals:
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR2)
            reached.append("behind")

    with pytest.raises(Stopped, match="SIGUSR2"):
        look()
    assert reached == ["behind"]
    with signals:
        pass


def test_it_counts_more_than_what_the_look_raised(signals: StopSignals) -> None:
    def look() -> None:
        with signals:
            signal.raise_signal(signal.SIGUSR1)
            raise RuntimeError("the rendezvous is gone")

    with pytest.raises(Stopped, match="SIGUSR1") as raised:
        look()
    assert isinstance(raised.value.__context__, RuntimeError)


@pytest.mark.parametrize("before", [True, False])
def test_what_waits_for_long_is_interrupted(before: bool, signals: StopSignals) -> None:
    def look() -> None:
        with signals:
            steps = [lambda: signal.raise_signal(signal.SIGUSR1), signals.at_once]
            for step in steps if before else reversed(steps):
                step()
            pytest.fail("put off")

    with pytest.raises(Stopped, match="SIGUSR1"):
        look()


def test_a_look_that_does_not_end_is_interrupted(signals: StopSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits without a limit for the process of a function that has returned."""
    monkeypatch.setattr(stop_signals, "LIMIT", 0.1)
    with signals:
        signal.raise_signal(signal.SIGUSR2)
        with pytest.raises(Stopped, match="SIGUSR2"):
            threading.Event().wait(60)
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGUSR1)


class Loud(logging.Handler):
    """A signal arrives while it writes; as all of that module's, it goes on after an exception."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except Exception:
            self.handleError(record)


@pytest.mark.parametrize("inside", [True, False])
def test_a_handler_of_the_log_swallows_none(
    inside: bool, signals: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the launcher waits for the survivors, signals are not put off, and it logs what it does."""
    monkeypatch.setattr(stop_signals, "LIMIT", 0.1)
    log = logging.Logger("of this test")
    log.addHandler(Loud())

    def wait() -> None:
        with signals if inside else nullcontext():
            if inside:
                signals.at_once()
            log.warning("killing rank 1, which hangs")
            threading.Event().wait(10)
            pytest.fail("swallowed")

    with pytest.raises(Stopped, match="SIGUSR1"):
        wait()
    with signals:
        pass


def test_one_that_was_handled_is_not_sent_again(signals: StopSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_signals, "LIMIT", 0)
    threads = _thread._count()
    for _ in range(200):  # as the look ends, or before
        with pytest.raises(Stopped), signals:
            signal.raise_signal(signal.SIGUSR2)
        with signals:
            pass
    while _thread._count() > threads:
        time.sleep(0.01)


def test_without_another_thread_nothing_is_put_off(signals: StopSignals, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", full)
    with signals, pytest.raises(Stopped):
        signal.raise_signal(signal.SIGUSR1)


def test_what_is_ignored_stays_so(signals: StopSignals) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signals.take_over()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
