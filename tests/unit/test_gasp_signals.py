"""SIGTERM beside what users and libraries do with it themselves."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator
from types import FrameType

import pytest

from lastgasp.gasp.signals import TermSignal


@pytest.fixture
def term() -> Iterator[TermSignal]:
    trigger = TermSignal()
    yield trigger
    trigger.uninstall()
    trigger.close()


def terminate() -> None:
    """To ourselves; Python's part of the handler has run when this returns."""
    os.kill(os.getpid(), signal.SIGTERM)


def came(term: TermSignal) -> bool:
    """As the control thread asks."""
    select.select([term], [], [], 5.0)
    return term.came()


def child_of(term: TermSignal) -> int:
    """Fork; the child waits for signals once it has reported what it found."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        fine = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and signal.set_wakeup_fd(-1) == -1
        os.write(writing, b"y" if fine and term.fileno() == -1 else b"n")
        while True:
            signal.pause()
    os.close(writing)
    told = os.read(reading, 1)
    os.close(reading)
    assert told == b"y", "the child still has our handler, descriptor or socket"
    return pid


def test_a_forked_child_dies_of_its_own_sigterm_and_does_not_report_it(term: TermSignal) -> None:
    term.install()
    pid = child_of(term)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert not term.came()
    terminate()
    assert came(term), "the parent still hears its own"


def test_the_users_handler_is_called_too(term: TermSignal) -> None:
    calls: list[int] = []

    def users(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    term.install(users)
    terminate()
    assert calls == [signal.SIGTERM]
    assert came(term)
    assert not term.came(), "once"


@pytest.mark.parametrize("users", [None, signal.SIG_DFL, signal.SIG_IGN])
def test_handlers_that_cannot_be_called_are_not(term: TermSignal, users: signal.Handlers | None) -> None:
    term.install(users)
    terminate()
    assert came(term)


def test_a_wakeup_descriptor_from_before_is_served_and_put_back(term: TermSignal) -> None:
    """asyncio's, for one."""
    theirs, end = socket.socketpair()
    with theirs, end:
        end.setblocking(False)
        signal.set_wakeup_fd(end.fileno())
        try:
            term.install()
            terminate()
            assert came(term)
            assert theirs.recv(10) == bytes([signal.SIGTERM])
            term.uninstall()
        finally:
            assert signal.set_wakeup_fd(-1) == end.fileno()


def test_a_wakeup_descriptor_that_was_closed_since_harms_nobody(term: TermSignal) -> None:
    theirs, end = socket.socketpair()
    theirs.setblocking(False)
    end.setblocking(False)
    signal.set_wakeup_fd(end.fileno())
    term.install()
    theirs.close()
    terminate()
    assert came(term)
    term.uninstall()
    signal.set_wakeup_fd(-1)
    end.close()


def test_uninstall_restores_and_is_idempotent(term: TermSignal) -> None:
    def users(number: int, frame: FrameType | None) -> None:
        """Never called here."""

    before = signal.signal(signal.SIGTERM, users)
    try:
        term.install()
        term.install()
        assert signal.getsignal(signal.SIGTERM) is not users
        term.uninstall()
        term.uninstall()
        assert signal.getsignal(signal.SIGTERM) is users
    finally:
        signal.signal(signal.SIGTERM, before)


def test_uninstall_leaves_alone_what_others_have_put_there_since(term: TermSignal) -> None:
    before = signal.getsignal(signal.SIGTERM)
    theirs, end = socket.socketpair()
    with theirs, end:
        end.setblocking(False)
        term.install()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.set_wakeup_fd(end.fileno())
        term.uninstall()
        try:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGTERM, before)
            assert signal.set_wakeup_fd(-1) == end.fileno()


def test_other_signals_are_not_ours(term: TermSignal) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    try:
        term.install()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not came(term)
        assert calls == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
