"""Marks on disk after real deaths of real processes, and on disks that are full or vanish."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastgasp.steps import recover, ringfile
from lastgasp.steps.rankfiles import profiling_files
from lastgasp.steps.recorder import StepRecorder
from lastgasp.steps.recover import recover_orphans
from support import marks_worker, taskd_reader
from support.marks_worker import MOMENTS, PER_TOKEN, options
from support.waiting import until

LIMIT = 200.0
WORKER = Path(marks_worker.__file__)

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tmp_path / "profiling"


@pytest.fixture(autouse=True)
def rings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place of their own for the rings of a test and its processes: in real shared memory where there is some."""
    shared = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="marks-test-", dir=shared if shared.is_dir() else None))
    monkeypatch.setenv("MARKS_TEST_RINGS", str(place))
    monkeypatch.setattr(ringfile, "places", lambda: [place])
    recover._said.clear()
    yield place
    left = list(place.iterdir())
    shutil.rmtree(place)
    assert left == [], "a ring is left"


class Rank:
    """A worker in a process of its own."""

    def __init__(self, base: Path, first: int | str, how: str = "") -> None:
        command = [sys.executable, str(WORKER), str(base), str(first), *filter(None, [how])]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
        self.first, self.steps, self.held = first, 0, False
        self._rest = b""

    def go(self, tokens: int = 1) -> None:
        """Let it take `tokens * PER_TOKEN` steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"." * tokens)

    def read(self, lines: int) -> None:
        """Wait for so many lines."""
        assert self.process.stdout is not None
        while self._rest.count(b"\n") < lines:
            more = os.read(self.process.stdout.fileno(), 65536)
            assert more, self.process.stderr and self.process.stderr.read().decode()
            self._rest += more
        for _ in range(lines):
            line, _, self._rest = self._rest.partition(b"\n")
            self._count(line)

    def until_held(self) -> None:
        """Let it go on until the thread that writes has stopped."""
        while not self.held and self.first != "recover":
            self.go()
            self.read(PER_TOKEN)
        while not self.held:
            self.read(1)

    def kill(self) -> int:
        """SIGKILL; returns how many steps it had reported as completed."""
        self.process.send_signal(signal.SIGKILL)
        return self.join()

    def join(self) -> int:
        """Wait for its end and read what it still said."""
        out, self.errors = self.process.communicate(timeout=LIMIT)
        for line in (self._rest + out).splitlines():
            self._count(line)
        return self.steps

    def _count(self, line: bytes) -> None:
        if line.isdigit():
            assert isinstance(self.first, int)
            assert int(line) == self.first + self.steps
            self.steps += 1
        elif line == b"hold":
            self.held = True


@contextlib.contextmanager
def rank(base: Path, first: int | str, how: str = "") -> Iterator[Rank]:
    """Start one; it is gone afterwards."""
    worker = Rank(base, first, how)
    try:
        yield worker
    finally:
        if worker.process.poll() is None:
            worker.kill()


def steps(base: Path) -> list[int]:
    """Steps on disk in their order; all rows and ranges are complete."""
    taken = taskd_reader.read(base / "task/0")
    assert taken.open == {}
    assert not [name for name in taken.names if name.startswith("dropped")]
    return [int(name.split()[1]) for name in taken.names if name.startswith("step ")]


def expect(base: Path, first: int, told: int) -> None:
    """Each step from `first` on is there once; the last may have ended unreported."""
    found = [number for number in steps(base) if first <= number < first + 100_000]
    assert found in (list(range(first, first + told)), list(range(first, first + told + 1)))
    names = taskd_reader.read(base / "task/0").names
    assert names.count("forward") - len(steps(base)) in (0, 1)


def test_the_last_steps_of_killed_ranks_are_recovered_each_once(base: Path) -> None:
    """Twelve attempts of one job, killed at other moments each, between two tokens or amid their steps."""
    told = []
    for attempt in range(12):
        with rank(base, attempt * 100_000) as worker:
            for _ in range(1 + attempt * 3):
                worker.go()
                worker.read(PER_TOKEN)
            worker.go(tokens=1 + attempt % 3)
            worker.read(attempt % 4)
            told.append(worker.kill())
            assert worker.process.returncode == -signal.SIGKILL
        (recovered,) = recover_orphans()
        assert recovered.problem == ""
    assert told[-1] > 34 * PER_TOKEN
    found = steps(base)
    assert len(set(found)) == len(found)
    for attempt, count in enumerate(told):
        mine = [number - attempt * 100_000 for number in found if number // 100_000 == attempt]
        assert mine in (list(range(count)), list(range(count + 1)))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_inside_the_flusher_s_write_loses_and_doubles_nothing(base: Path, moment: str) -> None:
    with rank(base, 0, moment) as worker:
        worker.until_held()
        worker.go(2)
        worker.read(PER_TOKEN)
        told = worker.kill()
    (recovered,) = recover_orphans()
    assert recovered.ranges > 0
    expect(base, 0, told)


@pytest.mark.parametrize("moment", ["before", "half", "after", "told"])
def test_a_recovery_that_is_killed_is_taken_over_by_the_next(base: Path, moment: str, rings: Path) -> None:
    with rank(base, 0, "before") as worker:
        worker.until_held()
        told = worker.kill()
    with rank(base, "recover", "half" if moment == "told" else moment) as first:
        first.read(1)
        first.go()
        first.until_held()
        assert recover_orphans() == [], "the first recovery lives"
        first.kill()
    assert len(list(rings.iterdir())) == 1
    assert len(recover_orphans()) == 1
    expect(base, 0, told)


def test_many_recoveries_at_once_write_the_rows_once(base: Path) -> None:
    told = []
    for attempt in range(3):
        with rank(base, attempt * 100_000, "before") as worker:
            worker.until_held()
            told.append(worker.kill())
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(rank(base, "recover")) for _ in range(4)]
        for other in others:
            other.read(1)
        for other in others:
            other.go()
        for other in others:
            other.join()
            assert other.process.returncode == 0, other.errors
    assert recover_orphans() == []
    for attempt, count in enumerate(told):
        expect(base, attempt * 100_000, count)


@pytest.mark.parametrize(
    ("how", "code"), [("return", 0), ("close", 0), ("raise", 1), ("exit", 3), ("_exit", 4), ("fork", 0)]
)
def test_every_way_to_end_brings_the_last_rows_to_disk(base: Path, how: str, code: int, rings: Path) -> None:
    with rank(base, 0, how) as worker:
        worker.go(3)
        worker.read(3 * PER_TOKEN)
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        worker.process.stdin = None
        assert worker.join() == 3 * PER_TOKEN
        assert worker.process.returncode == code, worker.errors
    assert steps(base) == list(range(3 * PER_TOKEN))
    if how == "_exit":
        assert [recovered.ranges for recovered in recover_orphans()] == [0]
    assert list(rings.iterdir()) == []


def test_sigterm_that_nobody_takes_loses_nothing(base: Path) -> None:
    with rank(base, 0, "return") as worker:
        worker.go(3)
        worker.read(3 * PER_TOKEN)
        worker.process.terminate()
        told = worker.join()
        assert worker.process.returncode == -signal.SIGTERM
    assert [recovered.ranges for recovered in recover_orphans()] == [3 * told]
    expect(base, 0, told)


# -- disks -------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few hundred steps."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("a small disk needs the right to mount a tmpfs")
    yield disk
    command = ["umount", str(disk)]  # a process that has just been killed may still have a file open
    until(lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, "the disk is unmounted")


def take(recorder: StepRecorder, first: int, count: int) -> bool:
    """Some steps, and whether they are on disk."""
    for number in range(first, first + count):
        recorder.marks.step_begin(number)
        recorder.marks.step_end()
    return recorder.flush(LIMIT)


def test_a_full_disk_is_one_warning_and_marks_resume_when_there_is_room(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lastgasp")
    with StepRecorder.open(options(small_disk)) as recorder:
        assert take(recorder, 0, 10)
        filler = small_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        refused = [take(recorder, 10 + 20 * i, 20) for i in range(10)]
        assert refused[-1] is False
        rows = b"".join(path.read_bytes() for path in profiling_files(small_disk / "task/0"))
        assert rows.endswith(b"\n"), "half a row is on the full disk"
        filler.unlink()
        assert recorder.flush(LIMIT)
        assert take(recorder, 210, 10)
        assert steps(small_disk) == list(range(220))
    told = [record for record in caplog.records if "written" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING", "INFO"]
    assert "No space left" in told[0].getMessage()


def test_a_rank_that_ends_on_a_full_disk_leaves_its_rows_to_the_recovery(
    small_disk: Path, caplog: pytest.LogCaptureFixture, rings: Path
) -> None:
    recorder = StepRecorder.open(options(small_disk))
    assert take(recorder, 0, 10)
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    take(recorder, 10, 100)
    assert recorder.close() is False
    assert "for the launcher" in caplog.text
    assert [bool(recovered.problem) for recovered in recover_orphans()] == [True]
    assert len(list(rings.iterdir())) == 1
    filler.unlink()
    assert [recovered.problem for recovered in recover_orphans()] == [""]
    assert steps(small_disk) == list(range(110))


@pytest.mark.parametrize("what", ["base", "task", "task/0"])
def test_a_directory_that_is_removed_is_made_again(base: Path, what: str) -> None:
    with StepRecorder.open(options(base)) as recorder:
        recorder.set_groups({})
        assert take(recorder, 0, 10)
        shutil.rmtree(base if what == "base" else base / what)
        assert take(recorder, 10, 10)
        assert steps(base) == list(range(10, 20))
        names = sorted(path.name for path in (base / "task/0").iterdir())
        assert names[1:] == ["lastgasp.json", "parallel_group.json"]


@pytest.mark.parametrize("limit", [0, 1, 9])
def test_a_limit_below_one_file_keeps_little_and_harms_nothing(
    base: Path, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    with StepRecorder.open(options(base, limit_mb=limit, period=3600.0)) as recorder:
        for turn in range(40):
            assert take(recorder, 100 * turn, 100)
        assert recorder.marks.dropped == 0
    found = steps(base)
    assert found[-1] == 3999
    assert found == list(range(found[0], 4000))
    size = sum(path.stat().st_size for path in profiling_files(base / "task/0"))
    assert size <= (limit << 20) + 300_000, "more than the limit, the file that is written and a batch"
    assert [record.levelname for record in caplog.records if record.levelno >= logging.INFO] == ["WARNING"]


def test_two_jobs_and_the_user_s_files_under_one_base(base: Path) -> None:
    """At the documented bounds: 10 MiB a file, a fifth of the oldest, ten digits in folders of the rank."""
    other = base / "older-job/0"
    other.mkdir(parents=True)
    for i in range(10):
        with (other / f"17000000{i:02d}").open("wb") as file:
            file.truncate(1 << 20)
        os.utime(other / f"17000000{i:02d}", (1_700_000_000 + i,) * 2)
    foreign = [other / "notes.txt", other / "parallel_group.json", base / "older-job/1/1700000000"]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    with StepRecorder.open(options(base, limit_mb=10)) as recorder:
        assert take(recorder, 0, 10)
    assert sorted(path.name for path in profiling_files(other)) == [f"17000000{i:02d}" for i in range(2, 10)]
    assert all(path.read_text() == "mine" for path in foreign)
    assert steps(base) == list(range(10))
