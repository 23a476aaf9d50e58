"""The controller's port full of strangers: they have bounds, a rank gets in past them, and the log stays readable."""

from __future__ import annotations

import logging
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from lastgasp import _clock
from lastgasp.gasp import controller as controller_module
from lastgasp.gasp import doorway, link
from lastgasp.gasp import messages as m
from lastgasp.gasp.doorway import LimitedLog
from lastgasp.gasp.link import Link
from lastgasp.gasp.serve import ControllerThread, new_token
from support.certificates import issue
from support.fake_controller import HELLO
from support.waiting import until


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is sent away because the machine is slow."""
    monkeypatch.setattr(controller_module, "GREETING_TIMEOUT", 600.0)


@pytest.fixture
def controller(patient: None) -> Iterator[ControllerThread]:
    """A real one."""
    thread = ControllerThread(new_token())
    yield thread
    thread.stop()


@contextmanager
def idle(count: int, port: int, addresses: int = 1) -> Iterator[list[socket.socket]]:
    """Connections that say nothing, from so many addresses of this machine."""
    with ExitStack() as stack:
        found = []
        for number in range(count):
            source = (f"127.0.0.{2 + number % addresses}", 0)
            one = socket.create_connection(("127.0.0.1", port), timeout=120, source_address=source)
            found.append(stack.enter_context(one))
        yield found


def strangers(thread: ControllerThread) -> int:
    """How many have proven nothing."""
    return thread._call(lambda: len(thread._controller._door._strangers), 150.0)


def joined(thread: ControllerThread) -> Link:
    """A rank that gets in."""
    return Link(thread.endpoint.address, thread.endpoint.token, HELLO)


@pytest.mark.parametrize(("addresses", "most"), [(1, 20), (10, 50)])
def test_a_rank_gets_in_past_any_number_of_them(
    controller: ControllerThread,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    addresses: int,
    most: int,
) -> None:
    monkeypatch.setattr(doorway, "STRANGERS_PER_ADDRESS", 20)
    monkeypatch.setattr(doorway, "STRANGERS", 50)
    controller._controller._door.log = LimitedLog(seconds=600.0)
    before = len(os.listdir("/proc/self/fd"))
    with caplog.at_level(logging.WARNING), idle(200, controller.endpoint.port, addresses) as ours:
        until(lambda: strangers(controller) == most, f"there are {most} left")
        until(lambda: len(os.listdir("/proc/self/fd")) <= before + len(ours) + most, "the others' descriptors are free")
        with closing(joined(controller)):
            assert controller.in_use(HELLO.attempt)
            until(lambda: strangers(controller) <= most, "the rank is not a stranger")
        assert m.BUSY.encode() in b"".join(iter(lambda: ours[0].recv(4096), b"")), "the oldest heard why"
    lines = [record for record in caplog.records if "prove nothing" in record.getMessage()]
    assert len(lines) == doorway.LINES


def test_in_the_middle_of_tls_they_count_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The handshake comes before the greeting."""
    monkeypatch.setattr(doorway, "STRANGERS_PER_ADDRESS", 20)
    for name, value in issue(tmp_path / "tls", trustme.CA(), "node").items():
        monkeypatch.setenv(name, value)
    thread = ControllerThread(new_token())
    try:
        with idle(60, thread.endpoint.port):
            until(lambda: strangers(thread) == 20, "there are 20 left")
            with closing(joined(thread)):
                assert thread.in_use(HELLO.attempt)
    finally:
        thread.stop()


def test_a_connection_that_proves_nothing_is_closed_soon(
    controller: ControllerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "GREETING_TIMEOUT", 0.2)
    with idle(5, controller.endpoint.port) as ours:
        for one in ours:
            assert m.from_controller(one.recv(4096)[m.HEADER :])
            assert one.recv(4096) == b"", "and then the end"
        until(lambda: strangers(controller) == 0, "all are gone")


@pytest.mark.parametrize("late", [False, True], ids=["room", "earlier training"])
def test_a_rank_that_cannot_be_had_yet_tries_again(
    late: bool, controller: ControllerThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A later training of the script waits for longer, and then says for what."""
    real, tries = link._connect, []
    let_in: Any = link.Link._let_in
    if late:  # as if it had asked for as long as it may ask for room
        monkeypatch.setattr(link.Link, "_let_in", lambda *args: let_in(*args[:-1], _clock.monotonic()))

    def connect(address: str, seconds: float, retry: bool, name: str) -> socket.socket:
        tries.append(address)
        if len(tries) > 1:
            return real(address, seconds, retry, name)
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(m.frame(m.Refused(reason=m.NOT_YET if late else m.BUSY)))
        return ours

    monkeypatch.setattr(link, "_connect", connect)
    with closing(joined(controller)):
        assert len(tries) == 2
    assert (m.NOT_YET in caplog.text) == late


def test_the_soft_limit_is_raised_once_connections_take_a_quarter_of_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] <= 1024:
        pytest.skip(f"the hard limit of descriptors is {before[1]}")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
        doorway._raise_limit(255)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
        doorway._raise_limit(256)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], doorway.DESCRIPTORS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_log_of_few_lines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    monkeypatch.setattr(_clock, "monotonic", lambda: now[0])
    limited = LimitedLog(lines=2, seconds=10.0)
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            limited.warning("line %d", number)
        now[0] += 10
        limited.warning("later")
    assert [record.getMessage() for record in caplog.records] == [
        "line 0",
        "line 1",
        "98 more lines like the following were left out",
        "later",
    ]
