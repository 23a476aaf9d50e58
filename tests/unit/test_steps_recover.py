"""Recovery of the last marks from rings of dead processes: exactly once, and nothing in a ring stops it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lastgasp import _clock
from lastgasp.steps import format as layout
from lastgasp.steps import recover, ringfile
from lastgasp.steps.marks import Marks
from lastgasp.steps.rankfiles import RankFiles, profiling_files
from lastgasp.steps.recover import Recovered, recover_orphans
from lastgasp.steps.ring import RingReader
from lastgasp.steps.rows import Origin, dropped, render
from support import taskd_reader

LIMIT = 120.0
Dead = Callable[..., Path]


@pytest.fixture(autouse=True)
def rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of their own for the rings of a test."""
    place = tmp_path / "rings"
    place.mkdir()
    monkeypatch.setattr(ringfile, "places", lambda: [place])
    recover._said.clear()
    return place


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "task/3"


@pytest.fixture
def dead(directory: Path) -> Dead:
    """A ring whose owner has died, with that many steps in it."""

    def make(count: int, *, capacity: int = 64, where: Path | str = directory, first: int = 0) -> Path:
        marks = Marks.open(rank=3, world_size=4, capacity=capacity, directory=str(where), device=1)
        assert marks.path is not None
        for number in range(first, first + count):
            marks.step_begin(number)
            marks.step_end()
        marks.close(remove=False)
        return marks.path

    return make


def rows_of(path: Path) -> bytes:
    """All rows that the ring holds."""
    with RingReader(path) as ring:
        origin = Origin(ring["pid"], ring["device"], ring["wall_offset"])
        return render(ring.records(1 << 20), ring.names(), origin)


def steps(directory: Path) -> list[int]:
    """On disk, in order."""
    taken = taskd_reader.read(directory)
    assert taken.open == {}
    return [int(name.split()[1]) for name in taken.names if name.startswith("step ")]


def test_nothing_to_do_is_nothing_done(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: pytest.fail("it has started a thread"))
        assert recover_orphans() == []


def test_a_dead_ring_goes_to_the_directory_that_it_names(dead: Dead, directory: Path) -> None:
    path = dead(5)
    assert recover_orphans() == [Recovered(path, 3, str(directory), ranges=5)]
    assert steps(directory) == [0, 1, 2, 3, 4]
    assert not path.exists()
    assert recover_orphans() == []


def test_the_rows_are_those_that_the_flusher_would_have_written(dead: Dead, directory: Path) -> None:
    expected = rows_of(dead(3))
    recover_orphans()
    assert [path.read_bytes() for path in profiling_files(directory)] == [expected]
    assert b'"DeviceId":1,' in expected


def test_a_living_ring_is_left_alone(directory: Path) -> None:
    """In this process, whose lock would be lost if its ring were opened, and in another."""
    marks = Marks.open(rank=0, world_size=1, directory=str(directory))
    try:
        marks.step(1)
        marks.step(2)
        assert recover_orphans() == []
        assert marks.path is not None
        code = (
            "import fcntl, sys\n"
            "try:\n    fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
            "except OSError:\n    sys.exit(7)"
        )
        assert subprocess.run([sys.executable, "-c", code, marks.path], timeout=200, check=False).returncode == 7
    finally:
        marks.close(remove=True)
    assert not directory.exists()


def test_what_the_flusher_had_said_to_be_on_disk_is_not_written_again(dead: Dead, directory: Path) -> None:
    path = dead(5)
    rows = rows_of(path)
    with RingReader(path) as ring:
        ring.consumed(2)
    RankFiles(directory).append(b"".join(rows.splitlines(keepends=True)[:8]))
    assert recover_orphans()[0].ranges == 3
    assert steps(directory) == [0, 1, 2, 3, 4]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60, deadline=None
)
@given(at=st.integers(0, 100))
def test_a_death_anywhere_in_the_write_doubles_and_loses_nothing(
    at: int, dead: Dead, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The owner died after any byte of its write, and before it moved the tail."""
    directory = tmp_path_factory.mktemp("task") / "3"
    path = dead(4, where=directory)
    rows = rows_of(path)
    before, cut = b'{"Kind":1,"Flag":16}\n', len(rows) * at // 100
    directory.mkdir()
    (directory / "1700000000").write_bytes(before + rows[:cut])
    recover_orphans()
    assert b"".join(p.read_bytes() for p in profiling_files(directory)) == before + rows
    assert not path.exists()


def test_the_ranges_that_were_missing_are_counted(dead: Dead, directory: Path) -> None:
    rows = rows_of(dead(4))
    RankFiles(directory).append(rows)
    assert [r.ranges for r in recover_orphans()] == [0]
    rows = rows_of(dead(4, first=4))
    (path,) = profiling_files(directory)
    with path.open("ab") as file:
        file.write(b"".join(rows.splitlines(keepends=True)[:6]))
    assert [r.ranges for r in recover_orphans()] == [2]
    assert steps(directory) == list(range(8))


def test_rows_that_another_process_appended_since_are_no_hindrance(dead: Dead, directory: Path) -> None:
    path = dead(4)
    rows = rows_of(path).splitlines(keepends=True)
    RankFiles(directory).append(b"".join(rows[:8]))
    other = rows_of(dead(2, first=100))
    RankFiles(directory).append(other)
    assert sorted(r.ranges for r in recover_orphans()) == [0, 2]
    assert sorted(steps(directory)) == [0, 1, 2, 3, 100, 101]


def test_half_a_row_in_an_older_file_is_finished_there(dead: Dead, directory: Path) -> None:
    """The next attempt began a new file, since this one ended in half a row."""
    path = dead(3)
    rows = rows_of(path)
    directory.mkdir(parents=True)
    older = directory / "1700000000"
    older.write_bytes(rows[:300])
    next_rows = rows_of(dead(2, first=50))
    RankFiles(directory).append(next_rows)
    assert len(profiling_files(directory)) == 2
    recover_orphans()
    assert older.read_bytes() == rows
    assert sorted(steps(directory)) == [0, 1, 2, 50, 51]


@pytest.mark.parametrize("seen", [10, 66])
def test_half_a_row_that_another_process_is_writing_is_not_continued(
    dead: Dead, directory: Path, monkeypatch: pytest.MonkeyPatch, seen: int
) -> None:
    """Rows begin alike, and who reads a file sees a write in its middle."""
    dead(3)
    other = rows_of(dead(2, first=50, where=directory / "elsewhere"))
    directory.mkdir(parents=True)
    file = directory / "1700000000"
    file.write_bytes(other[:seen])
    real = time.sleep

    def goes_on(seconds: float) -> None:
        if file.stat().st_size == seen:
            file.write_bytes(other)
        real(seconds)

    if seen == 66:  # it has the whole time of another: nothing to wait for
        recover_orphans()
        assert file.stat().st_size == seen
        file.write_bytes(other)
    else:
        monkeypatch.setattr(time, "sleep", goes_on)
        recover_orphans()
    assert sorted(steps(directory)) == [0, 1, 2, 50, 51]


def test_a_recovery_that_dies_in_the_middle_is_taken_over(
    dead: Dead, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dead(4)

    class Dies(BaseException):
        pass

    def dies(ring: RingReader, count: int) -> None:
        raise Dies

    with monkeypatch.context() as patch:
        patch.setattr(RingReader, "consumed", dies)
        with pytest.raises(Dies):
            recover._recover(path)
    assert steps(directory) == [0, 1, 2, 3]
    assert path.exists()
    assert recover_orphans() == [Recovered(path, 3, str(directory), ranges=0)]
    assert steps(directory) == [0, 1, 2, 3]
    assert not path.exists()


def test_one_that_another_process_is_at_is_left_to_it(dead: Dead, directory: Path) -> None:
    path = dead(2)
    code = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'r+b')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        assert recover_orphans() == []
        assert path.exists()
        other.communicate(timeout=LIMIT)
    assert [r.ranges for r in recover_orphans()] == [2]


def test_threads_of_one_process_do_not_both_write(dead: Dead, directory: Path) -> None:
    for _ in range(8):
        dead(3, first=3)
    results: list[Recovered] = []
    threads = [threading.Thread(target=lambda: results.extend(recover_orphans())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert len(results) == 8
    assert steps(directory) == [3, 4, 5] * 8


def test_dropped_ranges_are_reported_once(dead: Dead, directory: Path) -> None:
    path = dead(70)
    with RingReader(path) as ring:
        origin = Origin(ring["pid"], 1, ring["wall_offset"])
        assert ring["dropped"] == 6
    RankFiles(directory).append(dropped(2, 1, time.time_ns(), origin))
    (recovered,) = recover_orphans()
    assert recovered.ranges == 64
    assert taskd_reader.read(directory).names[0] == "dropped 2"
    assert taskd_reader.read(directory).names[-1] == "dropped 4"
    assert steps(directory) == list(range(64))


def test_only_a_count_is_reported_too(dead: Dead, directory: Path) -> None:
    path = dead(70)
    rows = rows_of(path)
    RankFiles(directory).append(rows)
    with RingReader(path) as ring:
        ring.consumed(64)
    assert [r.ranges for r in recover_orphans()] == [0]
    assert taskd_reader.read(directory).names[-1] == "dropped 6"


def test_a_disk_that_refuses_keeps_the_ring_for_later_with_one_warning(
    dead: Dead, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = dead(2)

    def refuse(files: RankFiles, rows: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RankFiles, "append", refuse)
        for _ in range(3):
            (recovered,) = recover_orphans()
            assert "No space left" in recovered.problem
            assert not recovered.removed
    assert path.exists()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert [r.ranges for r in recover_orphans()] == [2]
    assert steps(directory) == [0, 1]


def test_the_next_starts_are_silent_about_a_ring_and_it_goes_after_a_day(
    dead: Dead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every job of this user comes by a ring whose directory was mistyped."""
    (tmp_path / "a file").touch()
    path = dead(2, where=tmp_path / "a file/profiling/task/3")
    for _ in range(3):
        recover._said.clear()  # as in another process
        assert [one.removed for one in recover_orphans()] == [False]
    (warning,) = caplog.records
    assert str(path) in warning.getMessage() and "Make it writable" in warning.getMessage()
    now = _clock.wall_ns()
    monkeypatch.setattr(_clock, "wall_ns", lambda: now + int(recover.GIVE_UP_S * 1.1e9))
    assert [one.removed for one in recover_orphans()] == [True]
    assert not path.exists() and caplog.records[-1].getMessage().endswith("its ring file is removed")
    assert recover_orphans() == []


def test_a_directory_that_was_removed_is_not_made_anew(dead: Dead, tmp_path: Path) -> None:
    """By any later job of this user; nor below the mount point of what is not mounted."""
    path = dead(2, where=tmp_path / "ckpts/profiling/task/3")
    assert "it was removed or is not mounted here" in recover_orphans()[0].problem
    assert path.exists() and not (tmp_path / "ckpts").exists()
    (tmp_path / "ckpts").mkdir()
    assert [one.ranges for one in recover_orphans()] == [2]


def test_a_disk_that_fills_while_a_row_is_finished_is_no_loss(
    dead: Dead, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dead(2)
    rows = rows_of(path)
    directory.mkdir(parents=True)
    (directory / "1700000000").write_bytes(rows[:100])
    real, calls = os.write, iter(range(10))

    def write(descriptor: int, data: bytes) -> int:
        if next(calls) == 0:
            return real(descriptor, data[:333])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        assert "No space left" in recover_orphans()[0].problem
    assert [r.problem for r in recover_orphans()] == [""]
    assert (directory / "1700000000").read_bytes() == rows


def test_a_disk_that_hangs_holds_nobody_beyond_the_deadline(
    dead: Dead, directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dead(2)
    release, inside, real = threading.Event(), threading.Event(), RankFiles.append

    def hang(files: RankFiles, rows: bytes) -> None:
        inside.set()
        assert release.wait(LIMIT)
        real(files, rows)

    monkeypatch.setattr(RankFiles, "append", hang)
    assert recover_orphans(timeout=0.05) == []
    assert inside.wait(LIMIT)
    assert recover_orphans(timeout=0.05) == []
    assert "takes longer" in caplog.text
    release.set()
    for thread in threading.enumerate():
        if thread.name == "lastgasp-recover":
            thread.join(LIMIT)
    assert steps(directory) == [0, 1]


# -- damage ------------------------------------------------------------------------------------------


def damage(path: Path, at: int, value: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(value)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (layout.OFFSETS["magic"], b"XX"),
        (layout.OFFSETS["version"], b"\x09"),
        (layout.OFFSETS["capacity"], b"\xff" * 8),
        (layout.OFFSETS["tail"], b"\xff" * 8),
        (layout.OFFSETS["names"], b"\xff" * 4),
    ],
)
def test_a_damaged_ring_is_removed_with_a_warning_and_stops_no_other(
    dead: Dead, directory: Path, at: int, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = dead(2), dead(3, first=10)
    damage(bad, at, value)
    found = {recovered.ring: recovered for recovered in recover_orphans()}
    assert found[bad].problem
    assert found[bad].removed
    assert found[good].ranges == 3
    assert not bad.exists()
    assert not good.exists()
    assert steps(directory) == [10, 11, 12]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_short_an_empty_and_a_garbled_file_are_removed(rings: Path) -> None:
    prefix = f"{ringfile.PREFIX}-{os.getuid()}-99-"
    for name, content in (("a", b""), ("b", b"short"), ("c", os.urandom(1 << 21))):
        (rings / (prefix + name)).write_bytes(content)
    assert [recovered.removed for recovered in recover_orphans()] == [True] * 3
    assert list(rings.iterdir()) == []


def test_a_damaged_ring_of_a_living_owner_is_left_alone(rings: Path) -> None:
    """It may be that of a later version."""
    path = rings / f"{ringfile.PREFIX}-{os.getuid()}-99-a"
    path.write_bytes(bytes(1 << 21))
    code = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1], 'r+b')\n"
        "fcntl.lockf(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        assert recover_orphans() == []
        assert path.exists()
        other.communicate(timeout=LIMIT)


def test_a_damaged_ring_that_another_recovery_removes_stops_no_other(
    dead: Dead, directory: Path, rings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rings / f"{ringfile.PREFIX}-{os.getuid()}-0-damaged").write_bytes(b"short")
    dead(2)
    mine = recover._mine

    def seen_by_both(path: Path) -> bool:
        found = mine(path)
        path.unlink()
        return found

    monkeypatch.setattr(recover, "_mine", seen_by_both)
    assert [recovered.ranges for recovered in recover_orphans()] == [2]
    assert steps(directory) == [0, 1]


def test_what_is_not_a_file_of_ours_is_left_alone(rings: Path, tmp_path: Path) -> None:
    prefix = f"{ringfile.PREFIX}-{os.getuid()}-99-"
    (tmp_path / "mine.txt").write_text("mine")
    (rings / (prefix + "link")).symlink_to(tmp_path / "mine.txt")
    (rings / (prefix + "folder")).mkdir()
    assert recover_orphans() == []
    assert len(list(rings.iterdir())) == 2
    assert (tmp_path / "mine.txt").read_text() == "mine"


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40, deadline=None
)
@given(data=st.data())
def test_no_damage_stops_it(data: st.DataObject, dead: Dead, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = dead(3, where=tmp_path_factory.mktemp("task") / "3")
    places = st.one_of(
        st.integers(0, 100), st.integers(layout.NAMES_AT, layout.NAMES_AT + 100),
        st.integers(layout.RECORDS_AT, layout.RECORDS_AT + 200),
    )  # fmt: skip
    for _ in range(3):
        damage(path, data.draw(places), data.draw(st.binary(min_size=1, max_size=9)))
    assert len(recover_orphans()) == 1
    assert not path.exists()


def test_rows_that_have_no_place_to_go_are_reported(dead: Dead, caplog: pytest.LogCaptureFixture) -> None:
    with_rows, without = dead(2, where=""), dead(0, where="")
    found = {recovered.ring: recovered.problem for recovered in recover_orphans()}
    assert "2 ranges are lost" in found[with_rows]
    assert found[without] == ""
    assert not with_rows.exists()
    assert not without.exists()


def test_rings_that_were_never_finished_go_after_an_hour(rings: Path) -> None:
    old, new = (rings / f".{ringfile.PREFIX}-{os.getuid()}-99-{name}" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (time.time() - 3700,) * 2)
    assert recover_orphans() == []
    assert not old.exists()
    assert new.exists()


def test_what_was_recovered_is_reported(dead: Dead, caplog: pytest.LogCaptureFixture, directory: Path) -> None:
    caplog.set_level(logging.INFO, "lastgasp")
    dead(2)
    recover_orphans()
    assert [record.getMessage() for record in caplog.records] == [
        f"the last 2 step marks of a process that was killed (rank 3 of the job that trained there) are in {directory}"
    ]


@pytest.fixture(autouse=True)
def no_lock_is_left(rings: Path) -> Iterator[None]:
    yield
    for path in rings.glob(f"{ringfile.PREFIX}*"):
        if path.is_file() and not path.is_symlink():
            with path.open("r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
