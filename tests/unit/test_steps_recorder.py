"""The recorder: one rank's ring, flusher, files and switch together."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastgasp.errors import ConfigError
from lastgasp.steps import bits, recorder, ringfile
from lastgasp.steps.rankfiles import RankFiles
from lastgasp.steps.recorder import RecorderOptions, StepRecorder, flush_all
from lastgasp.steps.recover import recover_orphans
from support import taskd_reader

LIMIT = 120.0


@pytest.fixture(autouse=True)
def rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of their own for the rings of a test."""
    place = tmp_path / "rings"
    place.mkdir()
    monkeypatch.setattr(ringfile, "places", lambda: [place])
    return place


@pytest.fixture
def options(tmp_path: Path) -> RecorderOptions:
    return RecorderOptions(
        rank=3, world_size=8, base=tmp_path / "base", task="job", framework="tests 1", device=1, period=3600.0,
        switch_path=tmp_path / "switch",
    )  # fmt: skip


@pytest.fixture
def one(options: RecorderOptions) -> Iterator[StepRecorder]:
    with StepRecorder.open(options) as one:
        yield one


def steps(one: StepRecorder, *numbers: int) -> None:
    """Whole ones."""
    for number in numbers:
        one.marks.step_begin(number)
        one.marks.step_end()


def test_rows_lie_where_taskd_s_readers_look(one: StepRecorder, tmp_path: Path) -> None:
    steps(one, 1, 2)
    assert one.flush(LIMIT)
    assert one.directory == tmp_path / "base/job/3"
    assert set(taskd_reader.read(one.directory).steps) == {1, 2}
    first = next(taskd_reader.rows(one.directory))
    assert first["MsptiObjectId"]["Pt"] == {"ProcessId": os.getpid(), "ThreadId": threading.get_native_id()}
    device = [row["MsptiObjectId"]["Ds"] for row in taskd_reader.rows(one.directory) if row["SourceKind"] == 1]
    assert {row["DeviceId"] for row in device} == {1}


def test_what_readers_may_want_to_know_is_beside(one: StepRecorder) -> None:
    assert one.flush(LIMIT)
    about = json.loads((one.directory / "lastgasp.json").read_bytes())
    assert about == {
        "version": 1, "rank": 3, "world_size": 8, "host": socket.gethostname(), "pid": os.getpid(),
        "device_rows": "host", "framework": "tests 1", "bits": "step forward dataloader save",
    }  # fmt: skip
    one.set_device_rows("events")
    one.set_groups({"g": {"group_name": "tp", "group_rank": 1, "global_ranks": [2, 3]}})
    assert one.flush(LIMIT)
    assert json.loads((one.directory / "lastgasp.json").read_bytes()) == {**about, "device_rows": "events"}
    assert (
        b'"global_ranks": [\n            2,\n            3\n        ]'
        in (one.directory / "parallel_group.json").read_bytes()
    )


def test_close_writes_the_rest_removes_the_ring_and_is_idempotent(options: RecorderOptions, rings: Path) -> None:
    one = StepRecorder.open(options)
    assert len(list(rings.iterdir())) == 1
    steps(one, 1)
    assert one.close()
    assert list(rings.iterdir()) == []
    assert not one.close()
    assert not one.flush(LIMIT)
    steps(one, 2)
    assert one.marks.mask == 0
    assert list(taskd_reader.read(one.directory).steps) == [1]


def test_the_switch_file_switches(options: RecorderOptions, tmp_path: Path) -> None:
    keys = dict.fromkeys(bits.TASKD, "off") | {"Step": "on"}
    (tmp_path / "switch").write_text(json.dumps(keys))
    switched = threading.Event()
    with StepRecorder.open(options) as one:
        real = one._flusher._age

        def age() -> None:
            real()
            switched.set()

        one._flusher._age = age  # type: ignore[method-assign]
        assert one.flush(LIMIT)
        assert switched.wait(LIMIT)
        assert one.marks.mask == bits.STEP


def test_all_open_recorders_are_flushed_before_a_hard_exit(options: RecorderOptions) -> None:
    assert flush_all(0.0)
    with StepRecorder.open(options) as one:
        steps(one, 1)
        assert flush_all(LIMIT)
        assert list(taskd_reader.read(one.directory).steps) == [1]
    assert flush_all(0.0)


def test_a_base_that_cannot_be_written_leaves_training_alone(
    options: RecorderOptions, caplog: pytest.LogCaptureFixture, rings: Path
) -> None:
    options.base.write_text("a file is in the way")
    one = StepRecorder.open(options)
    for number in range(3):
        steps(one, number)
        assert not one.flush(LIMIT)
    assert not one.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert len(list(rings.iterdir())) == 1
    options.base.unlink()
    assert [recovered.ranges for recovered in recover_orphans()] == [3]
    assert list(taskd_reader.read(one.directory).steps) == [0, 1, 2]


def test_a_disk_that_hangs_at_the_end_holds_nobody_and_doubles_nothing(
    options: RecorderOptions, monkeypatch: pytest.MonkeyPatch, rings: Path
) -> None:
    release, real = threading.Event(), RankFiles.append

    def hang(files: RankFiles, rows: bytes) -> None:
        assert release.wait(LIMIT)
        real(files, rows)

    monkeypatch.setattr(RankFiles, "append", hang)
    one = StepRecorder.open(options)
    steps(one, 1)
    assert not one.close(timeout=0.05)
    assert recover_orphans() == [], "the write may come to its end yet"
    release.set()
    one._flusher._thread.join(LIMIT)
    assert list(taskd_reader.read(one.directory).steps) == [1]
    one.marks.close(remove=True)


def test_a_ring_without_shared_memory_works_as_well(
    options: RecorderOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ringfile, "places", lambda: [tmp_path / "nowhere"])
    with StepRecorder.open(options) as one:
        assert one.marks.path is None
        steps(one, 1)
    assert list(taskd_reader.read(one.directory).steps) == [1]


def test_a_wrong_mask_is_refused_at_the_start(options: RecorderOptions, rings: Path) -> None:
    with pytest.raises(ConfigError, match="mask"):
        StepRecorder.open(RecorderOptions(rank=0, world_size=1, base=options.base, task="job", mask=999))
    assert list(rings.iterdir()) == []
    assert recorder._open == set()


@pytest.mark.parametrize("call", [StepRecorder.close, lambda one: one.flush(LIMIT), lambda one: flush_all(LIMIT)])
def test_a_forked_child_leaves_all_of_it_to_its_parent(
    one: StepRecorder, call: Callable[[StepRecorder], bool], rings: Path
) -> None:
    steps(one, 1)
    pid = os.fork()
    if pid == 0:
        call(one)
        os._exit(len(recorder._open))
    assert os.waitpid(pid, 0)[1] == 0
    assert len(list(rings.iterdir())) == 1
    assert not one.directory.exists() or taskd_reader.read(one.directory).steps == {}
    steps(one, 2)
    assert one.flush(LIMIT)
    assert list(taskd_reader.read(one.directory).steps) == [1, 2]


def test_a_full_ring_is_counted_in_the_file(options: RecorderOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    real, full = RankFiles.append, [True]

    def append(files: RankFiles, rows: bytes) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(files, rows)

    monkeypatch.setattr(RankFiles, "append", append)
    with StepRecorder.open(options) as one:
        steps(one, *range(16384 + 5))
        assert not one.flush(LIMIT)
        full[0] = False
        assert one.flush(LIMIT)
        names = taskd_reader.read(one.directory).names
        assert len(names) == 16384 + 1
        assert names[-1] == "dropped 5"
