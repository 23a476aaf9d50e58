"""A process that asked for lastgasp and never trained in a way that is protected says so."""

from __future__ import annotations

import atexit

import pytest

from lastgasp_mindformers import unused
from lastgasp_mindformers.unused import Unused


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unused, "PATIENCE", 600.0)


def said(caplog: pytest.LogCaptureFixture) -> int:
    return caplog.text.count("is protected")


@pytest.mark.usefixtures("patience")
def test_it_is_said_while_it_runs_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    watch = Unused()
    watch.watch()
    watch.watch()
    timer = watch._timer
    assert timer is not None and timer.daemon
    timer.function(*timer.args)
    assert said(caplog) == 1 and "so far" in caplog.text and "value_and_grad" in caplog.text
    watch.stop()
    timer.join(10)
    assert watch._timer is None


@pytest.mark.usefixtures("patience")
def test_a_training_ends_the_watch(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(atexit, "register", lambda call, *args: registered.append(call))
    monkeypatch.setattr(atexit, "unregister", lambda call: registered.remove(call))
    watch = Unused()
    watch.watch()
    timer = watch._timer
    assert timer is not None and len(registered) == 1
    watch.used()
    timer.join(10)
    watch.watch()
    watch._say("")
    assert (registered, watch._timer, said(caplog)) == ([], None, 0)


def test_the_scheduler_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ROLE", "MS_SCHED")
    watch = Unused()
    watch.watch()
    assert watch._timer is None
