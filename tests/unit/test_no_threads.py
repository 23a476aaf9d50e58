"""Where a container's limit of processes, which counts threads, is reached for a while: no job ends because of it."""

from __future__ import annotations

import threading
from contextlib import closing

import pytest

from lastgasp.gasp.leaving import Leaving
from lastgasp.gasp.records import RecordWriter
from lastgasp.launch.bounded import Bounded, NodesWaiting, Unanswered
from lastgasp.pytorch.ondemand import OnDemand


def none(thread: threading.Thread) -> None:
    """In place of `Thread.start`."""
    raise RuntimeError("can't start new thread")


def test_a_launcher_that_cannot_ask_its_store_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception ended it, and with it a job in which nothing had failed."""
    bounded, waiting = Bounded(60), NodesWaiting(lambda: 2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        with pytest.raises(Unanswered, match="can't start new thread"):
            bounded(lambda: 7)
        assert waiting() == 0
    assert bounded(lambda: 7) == 7
    waiting._none_until = 0.0
    assert waiting() == 2


def test_a_record_is_written_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    with closing(RecordWriter()) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", none)
            writer.put("a", lambda: written.append("a"))
        assert not writer.idle
        writer.put("b", lambda: written.append("b"))
        assert writer.settle(60) and written == ["a", "b"]


def test_a_recovery_goes_on_without_a_limit_for_its_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leaving = Leaving()
    monkeypatch.setattr(threading.Thread, "start", none)
    leaving.after(60.0, lambda: 83)
    assert "is not ended in 60 s if it hangs" in caplog.text
    leaving.stays()


def test_values_that_would_be_made_apart_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank would not have answered, and be taken for hung."""
    made = OnDemand(lambda step: b"values", apart=True)
    monkeypatch.setattr(threading.Thread, "start", none)
    assert made.poll(3) == b""
