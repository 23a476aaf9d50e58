"""reset.json: what asks a job to leave, and what does not."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from lastgasp.gasp.resetfile import DEFAULT_PATH, SIZE_LIMIT, VARIABLE, ResetFile, ResetWatch, reset_path

START = 1_700_000_000


def write(path: Path, **fields: object) -> None:
    """As MindCluster's device plugin writes it (docs/facts/taskd.md §8)."""
    content = {"RankList": [], "UpdateTime": START, "RetryTime": 0, "FaultFlushing": False, "GracefulExit": 0}
    path.write_text(json.dumps(content | fields))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "reset.json"


def test_a_request_that_appears_counts_once(path: Path) -> None:
    write(path)
    file = ResetFile(path, START)
    assert not file.poll()
    write(path, GracefulExit=1, UpdateTime=5)
    assert file.poll(), "whatever its time says: it was seen to appear"
    assert not file.poll()


def test_a_file_that_appears_with_a_request_counts(path: Path) -> None:
    file = ResetFile(path, START)
    assert not file.poll()
    write(path, GracefulExit=1, UpdateTime=START - 100)
    assert file.poll()


def test_a_request_from_before_the_start_is_for_the_run_before(path: Path) -> None:
    write(path, GracefulExit=1, UpdateTime=START - 1)
    file = ResetFile(path, START)
    assert not file.poll()
    assert not file.poll()
    write(path)
    assert not file.poll()
    write(path, GracefulExit=1)
    assert file.poll(), "a new request after the old one was taken back"


def test_a_request_made_while_the_job_was_starting_counts(path: Path) -> None:
    write(path, GracefulExit=1, UpdateTime=START)
    assert ResetFile(path, START).poll()


@pytest.mark.parametrize("value", [0, 2, -1, None, "no", [1]])
def test_other_values_ask_for_nothing(path: Path, value: object) -> None:
    file = ResetFile(path, START)
    assert not file.poll()
    write(path, GracefulExit=value)
    assert not file.poll()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b" " * (SIZE_LIMIT + 1)])
def test_what_cannot_be_read_is_reported_once_and_asks_for_nothing(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_bytes(content)
    file = ResetFile(path, START)
    assert not file.poll()
    assert not file.poll()
    assert len([record for record in caplog.records if str(path) in record.getMessage()]) == 1
    write(path, GracefulExit=1)
    assert file.poll(), "once it can be read it counts"


def test_a_pipe_does_not_hang(path: Path) -> None:
    os.mkfifo(path)
    assert not ResetFile(path, START).poll()


def test_the_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert reset_path() == DEFAULT_PATH
    monkeypatch.setenv(VARIABLE, str(tmp_path / "other.json"))
    assert reset_path() == tmp_path / "other.json"


def test_the_watch_acts_once(path: Path) -> None:
    acted = threading.Event()
    watch = ResetWatch(acted.set, ResetFile(path, START), period=0.01)
    try:
        assert not acted.wait(0.05)
        write(path.with_suffix(".new"), GracefulExit=1)
        path.with_suffix(".new").replace(path)
        assert acted.wait(120)
    finally:
        watch.close()
        watch.close()


def test_a_job_that_is_none_of_ours_is_left_alone(path: Path) -> None:
    acted, looked, ours = threading.Event(), threading.Semaphore(0), threading.Event()

    def when() -> bool:
        looked.release()
        return ours.is_set()

    watch = ResetWatch(acted.set, ResetFile(path, START), period=0.01, when=when)
    try:
        write(path, GracefulExit=1)
        for _ in range(3):
            assert looked.acquire(timeout=120)
        assert not acted.is_set()
        ours.set()  # its ranks have joined; the request was made since the start
        assert acted.wait(120)
    finally:
        watch.close()


def test_a_closed_watch_does_not_act(path: Path) -> None:
    acted = threading.Event()
    watch = ResetWatch(acted.set, ResetFile(path, START), period=0.01)
    watch.close()
    write(path, GracefulExit=1)
    assert not acted.wait(0.05)
