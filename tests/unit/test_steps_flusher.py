"""From the ring to the files: in order, once, whatever the disk does; and the flusher's thread."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastgasp.steps import bits, drain
from lastgasp.steps.ageing import Ageing
from lastgasp.steps.drain import Drain
from lastgasp.steps.flusher import Flusher
from lastgasp.steps.marks import Marks
from lastgasp.steps.rankfiles import FILE_MAX, RankFiles, profiling_files
from lastgasp.steps.recorder import RecorderOptions, StepRecorder
from lastgasp.steps.rows import Renderer
from support import taskd_reader

LIMIT = 120.0
"""Seconds for what must happen."""
NEVER = 3600.0
"""A period that is over in no test: only what is asked for happens."""


class Disk(RankFiles):
    """Files whose disk the test breaks."""

    error: OSError | None = None
    hang: threading.Event | None = None

    def __init__(self, directory: Path, file_max: int = FILE_MAX) -> None:
        super().__init__(directory, file_max=file_max)
        self.inside = threading.Event()
        self.batches: list[int] = []

    def append(self, rows: bytes) -> None:
        """As it is, unless it is broken."""
        if self.hang is not None:
            self.inside.set()
            assert self.hang.wait(LIMIT)
        if self.error is not None:
            raise self.error
        super().append(rows)
        self.batches.append(rows.count(b"\n"))


@pytest.fixture
def marks() -> Iterator[Marks]:
    marks = Marks.open(rank=0, world_size=1, capacity=64)
    yield marks
    marks.close(remove=True)


@pytest.fixture
def files(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "task/0")


def step(marks: Marks, *numbers: int) -> None:
    """Whole steps."""
    for number in numbers:
        marks.step_begin(number)
        marks.step_end()


def steps(files: RankFiles) -> list[int]:
    """The steps on disk, in their order, each once; all other rows are complete."""
    found = [name for name in taskd_reader.read(files.directory).names if name.startswith("step ")]
    assert len(set(found)) == len(found), "a step is there twice"
    return [int(name.split()[1]) for name in found]


def names(files: RankFiles) -> list[str]:
    """All ranges on disk."""
    return taskd_reader.read(files.directory).names


# -- drain -------------------------------------------------------------------------------------------


def test_everything_goes_to_the_file_in_one_write(marks: Marks, files: Disk) -> None:
    work = Drain(marks, files)
    step(marks, 1, 2)
    with marks.mark("dataloader"):
        pass
    assert work.run()
    assert names(files) == ["step 1", "step 2", "dataloader"]
    assert files.batches == [10]
    assert marks.head == marks.tail == 3
    assert work.run()
    assert files.batches == [10]


def test_nothing_to_write_makes_no_file(marks: Marks, files: Disk) -> None:
    assert Drain(marks, files).run()
    assert not files.directory.exists()


def test_what_is_beside_comes_without_a_row(marks: Marks, files: Disk) -> None:
    files.beside("lastgasp.json", b"{}")
    assert Drain(marks, files).run()
    assert [path.name for path in files.directory.iterdir()] == ["lastgasp.json"]


def test_more_than_a_batch_is_several_writes(marks: Marks, files: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "BATCH", 4)
    monkeypatch.setattr(drain, "CHUNK", 3)
    step(marks, *range(10))
    assert Drain(marks, files).run()
    assert steps(files) == list(range(10))
    assert files.batches == [16, 16, 8]


def test_a_full_disk_keeps_the_rows_and_is_reported_once(
    marks: Marks, files: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lastgasp")
    work = Drain(marks, files)
    files.error = OSError(errno.ENOSPC, "No space left on device")
    for number in range(5):
        step(marks, number)
        assert not work.run()
    files.error = None
    assert work.run()
    assert work.run()
    assert steps(files) == list(range(5))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "No space left" in caplog.text
    assert "Free some space" in caplog.text


def test_a_disk_that_fails_in_turns_does_not_fill_the_log(
    marks: Marks, files: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lastgasp")
    work = Drain(marks, files)
    for number in range(10):
        files.error = OSError(errno.ENOSPC, "No space left on device") if number % 2 == 0 else None
        step(marks, number)
        work.run()
    assert steps(files) == list(range(10))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_another_trouble_is_another_warning(marks: Marks, files: Disk, caplog: pytest.LogCaptureFixture) -> None:
    work = Drain(marks, files)
    step(marks, 1)
    for number in (errno.ENOSPC, errno.EIO, errno.EIO):
        files.error = OSError(number, os.strerror(number))
        assert not work.run()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_what_finds_no_room_is_counted_in_the_file(marks: Marks, files: Disk) -> None:
    work = Drain(marks, files)
    files.error = OSError(errno.EIO, "Input/output error")
    step(marks, *range(100))
    assert not work.run()
    files.error = None
    assert work.run()
    step(marks, 100)
    assert work.run()
    step(marks, *range(200, 270))
    assert work.run()
    found = names(files)
    assert found[64:66] == ["dropped 36", "step 100"]
    assert found[-1] == "dropped 6"
    assert len(found) == 64 + 1 + 1 + 64 + 1
    assert steps(files)[:65] == [*range(64), 100]


def test_a_failed_count_comes_later_and_once(marks: Marks, files: Disk) -> None:
    work = Drain(marks, files)
    step(marks, *range(66))
    real = files.append

    def second_fails(rows: bytes) -> None:
        if b"dropped" in rows:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(rows)

    files.append = second_fails  # type: ignore[method-assign]
    assert not work.run()
    del files.append
    assert work.run()
    assert work.run()
    assert names(files)[64:] == ["dropped 2"]


def test_records_that_cannot_be_rendered_do_not_block_the_others(
    marks: Marks, files: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    work = Drain(marks, files)
    step(marks, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Renderer, "render", lambda self, records: 1 / 0)
        work.run()
    step(marks, 3)
    assert work.run()
    assert names(files) == ["dropped 2", "step 3"]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


# -- the thread --------------------------------------------------------------------------------------


@pytest.fixture
def flusher(marks: Marks, files: Disk) -> Iterator[Flusher]:
    flusher = Flusher(marks, files, period=NEVER)
    flusher.start()
    yield flusher
    flusher.stop(LIMIT)


def test_a_flush_returns_when_it_is_on_disk(flusher: Flusher, marks: Marks, files: Disk) -> None:
    for number in range(20):
        step(marks, number)
        assert flusher.flush(LIMIT)
        assert steps(files) == list(range(number + 1))


def test_rows_come_by_themselves(marks: Marks, files: Disk) -> None:
    written = threading.Event()

    def append(rows: bytes) -> None:
        RankFiles.append(files, rows)
        written.set()

    files.append = append  # type: ignore[method-assign]
    flusher = Flusher(marks, files, period=0.01)
    flusher.start()
    step(marks, 1)
    assert written.wait(LIMIT)
    assert flusher.stop(LIMIT)
    assert steps(files) == [1]


def test_stop_writes_the_rest_and_twice_is_fine(marks: Marks, files: Disk) -> None:
    flusher = Flusher(marks, files, period=NEVER)
    flusher.start()
    step(marks, 1)
    assert flusher.stop(LIMIT)
    assert not flusher.running
    assert flusher.stop(LIMIT)
    assert steps(files) == [1]


def test_without_a_thread_a_flush_writes_synchronously(
    marks: Marks, files: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flusher = Flusher(marks, files)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        flusher.start()
    step(marks, 1)
    assert flusher.flush(LIMIT)
    assert steps(files) == [1]
    assert flusher.stop(LIMIT)
    assert "can't start new thread" in caplog.text


def test_a_write_that_hangs_holds_nobody_beyond_the_deadline(flusher: Flusher, marks: Marks, files: Disk) -> None:
    files.hang = threading.Event()
    step(marks, 1)
    assert not flusher.flush(0.05)
    assert files.inside.wait(LIMIT)
    assert not flusher.flush(0.0)
    assert not flusher.stop(0.05)
    assert flusher.running
    step(marks, 2)
    files.hang.set()
    assert flusher.stop(LIMIT)
    assert steps(files) == [1, 2]


def test_a_request_during_the_last_write_is_served_as_well(flusher: Flusher, marks: Marks, files: Disk) -> None:
    """The training thread closes, and the thread that ends the process flushes."""
    files.hang = threading.Event()
    step(marks, 1)
    results: list[bool] = []
    closing = threading.Thread(target=lambda: results.append(flusher.stop(LIMIT)))
    closing.start()
    assert files.inside.wait(LIMIT)
    asking = threading.Thread(target=lambda: results.append(flusher.flush(LIMIT)))
    with flusher._changed:
        before = flusher._asked
        asking.start()
        assert flusher._changed.wait_for(lambda: flusher._asked > before, LIMIT)
    files.hang.set()
    for thread in (closing, asking):
        thread.join(LIMIT * 2)
    assert results == [True, True]
    assert not flusher.running
    assert steps(files) == [1]


def test_a_flush_that_the_disk_refuses_is_false(flusher: Flusher, marks: Marks, files: Disk) -> None:
    files.error = OSError(errno.EROFS, "Read-only file system")
    step(marks, 1)
    assert not flusher.flush(LIMIT)
    files.error = None
    assert flusher.flush(LIMIT)
    assert steps(files) == [1]


def test_many_threads_flush_at_once(flusher: Flusher, marks: Marks, files: Disk) -> None:
    results: list[bool] = []

    def work(first: int) -> None:
        for number in range(first, first + 10):
            with marks.mark(f"name {number}"):
                pass
            results.append(flusher.flush(LIMIT))

    threads = [threading.Thread(target=work, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert results == [True] * 40
    assert sorted(names(files)) == sorted(f"name {1000 * i + k}" for i in range(4) for k in range(10))


def test_a_signal_handler_may_flush_while_its_thread_flushes(flusher: Flusher, marks: Marks, files: Disk) -> None:
    flushed: list[bool] = []
    real, sent = files.append, threading.Event()

    def signal_and_append(rows: bytes) -> None:
        if not sent.is_set():
            sent.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        real(rows)

    files.append = signal_and_append  # type: ignore[method-assign]
    before = signal.signal(signal.SIGUSR1, lambda *_: flushed.append(flusher.flush(LIMIT)))
    try:
        step(marks, 1)
        assert flusher.flush(LIMIT)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert flushed == [True]
    assert steps(files) == [1]


def test_a_bug_is_reported_once_and_does_not_end_the_thread(
    flusher: Flusher, marks: Marks, files: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    def bug(rows: bytes) -> None:
        raise KeyError("a bug")

    step(marks, 1)
    files.append = bug  # type: ignore[method-assign]
    assert not flusher.flush(LIMIT)
    assert not flusher.flush(LIMIT)
    del files.append
    assert flusher.flush(LIMIT)
    assert steps(files) == [1]
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_the_switch_is_asked_once_a_second_and_obeyed(
    marks: Marks, files: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lastgasp")
    now, asked, turns = [100.0], list[int](), threading.Semaphore(0)
    answers = iter([None, bits.STEP, None])
    monkeypatch.setattr("lastgasp._clock.monotonic", lambda: now[0])

    def poll(mask: int) -> int | None:
        asked.append(mask)
        return next(answers)

    flusher = Flusher(marks, files, poll=poll, period=NEVER)
    age = Ageing(files.directory, 0, 5000)
    monkeypatch.setattr(age, "tick", lambda writing: turns.release())
    flusher._ageing = age
    flusher.start()
    for now[0] in (100.0, 100.9, 101.0, 101.5, 102.0):
        assert flusher.flush(LIMIT)
        assert turns.acquire(timeout=LIMIT)
    flusher.stop(LIMIT)
    assert asked == [bits.DEFAULT_ON, bits.DEFAULT_ON, bits.STEP]
    assert marks.mask == bits.STEP
    assert [record.getMessage() for record in caplog.records] == ["the switch file sets the step marks: step"]


def test_a_switch_with_a_bug_stops_neither_rows_nor_ageing(
    marks: Marks, files: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    base = files.directory.parents[1]
    old = base / "older/0/1700000000"
    old.parent.mkdir(parents=True)
    with old.open("wb") as file:
        file.truncate(11 << 20)
    flusher = Flusher(marks, files, ageing=Ageing(base, 0, 10), poll=lambda mask: 1 // 0, period=NEVER)
    flusher.start()
    step(marks, 1)
    assert flusher.flush(LIMIT)
    assert flusher.stop(LIMIT)
    assert not old.exists()
    assert steps(files) == [1]
    assert "ZeroDivisionError" in caplog.text


def test_a_completed_file_is_aged_at_once(marks: Marks, tmp_path: Path) -> None:
    files = Disk(tmp_path / "task/0", file_max=500)
    flusher = Flusher(marks, files, ageing=Ageing(tmp_path, 0, 0), period=NEVER)
    flusher.start()
    for number in range(10):
        step(marks, number)
        assert flusher.flush(LIMIT)
    assert flusher.stop(LIMIT)
    left = profiling_files(files.directory)
    assert len(left) <= 2
    assert steps(files)[-1] == 9


def test_a_forked_child_flushes_nothing_of_its_parent(flusher: Flusher, marks: Marks, files: Disk) -> None:
    step(marks, 1)
    pid = os.fork()
    if pid == 0:
        os._exit(int(flusher.flush(LIMIT)) + 2 * int(flusher.stop(LIMIT)))
    assert os.waitpid(pid, 0)[1] == 0
    assert flusher.flush(LIMIT)
    assert steps(files) == [1]


def test_a_command_that_comes_while_the_switch_file_is_read_stays(tmp_path: Path) -> None:
    options = RecorderOptions(rank=0, world_size=1, base=tmp_path, task="t", mask=bits.STEP, period=0.01)
    with StepRecorder.open(options) as recorder:
        marks, asked = recorder.marks, threading.Event()

        def poll(mask: int) -> int | None:
            if asked.is_set():
                return None
            marks.switch(bits.COMM, 0)  # the command
            asked.set()
            return mask | bits.SAVE  # the file

        recorder._flusher._poll = poll
        assert asked.wait(30)
        assert recorder.flush(30)
        assert marks.mask == bits.STEP | bits.COMM | bits.SAVE
