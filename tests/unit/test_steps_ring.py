"""The ring's file: layout, lock, reader, places; who writes it; and that it is all there after a SIGKILL."""

from __future__ import annotations

import errno
import fcntl
import importlib
import logging
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lastgasp.errors import ConfigError
from lastgasp.steps import bits, pyring, ringfile, writer
from lastgasp.steps import format as layout
from lastgasp.steps.marks import Marks
from lastgasp.steps.recover import recover_orphans
from lastgasp.steps.ring import Name, RingDamaged, RingReader, View


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's rings are made, and no other's."""
    monkeypatch.setattr(ringfile, "places", lambda: [tmp_path])
    return tmp_path


@pytest.fixture
def marks(place: Path) -> Iterator[Marks]:
    opened = Marks.open(rank=3, world_size=8, mask=bits.FORWARD, capacity=16, directory="/runs/ä", device=2)
    yield opened
    opened.close(remove=True)


@pytest.fixture
def left(marks: Marks) -> Path:
    """A ring file whose owner has left it, with one record."""
    with marks.mark("forward"):
        pass
    marks.close(remove=False)
    assert marks.path is not None
    return marks.path


def run(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Another Python process."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, **options)


def locked(path: Path) -> bool:
    """Whether another process could not take its place; locks hold against other processes only."""
    code = "import sys; from lastgasp.steps.ring import RingReader; print(RingReader(sys.argv[1]).claim())"
    return {"True\n": False, "False\n": True}[run(code, path).stdout]


# -- layout -----------------------------------------------------------------------------------------


def test_the_file_is_as_format_says(left: Path) -> None:
    raw = left.read_bytes()
    assert len(raw) == layout.size_of(16)
    header = dict(zip(layout.OFFSETS, layout.HEADER.unpack_from(raw), strict=True))
    offset = header.pop("wall_offset")
    before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
    assert before - 1e9 < wall - offset < after + 1e9
    assert header == {
        "magic": layout.MAGIC, "version": layout.VERSION, "record_size": layout.RECORD.size, "capacity": 16,
        "head": 1, "tail": 0, "dropped": 0, "next_id": 2, "mask": bits.FORWARD, "names": 2, "pid": os.getpid(),
        "rank": 3, "world_size": 8, "device": 2,
    }  # fmt: skip
    length = int.from_bytes(raw[layout.DIRECTORY_AT : layout.DIRECTORY_AT + 2], "little")
    assert raw[layout.DIRECTORY_AT + 2 :][:length].decode() == "/runs/ä"
    second = raw[layout.NAMES_AT + layout.NAME_SIZE :]
    assert layout.NAME.unpack_from(second) == (bits.FORWARD, layout.STREAM, 7, 7)
    assert second[layout.NAME.size :][:14] == b"defaultforward"
    begin, end, number, value, *device, name, thread = layout.RECORD.unpack_from(raw, layout.RECORDS_AT)
    assert begin < end
    assert (number, value, device, name, thread) == (1, 0, [0, 0], 1, os.getpid())


def test_the_offsets_are_those_of_the_header() -> None:
    values = range(1, len(layout.OFFSETS) + 1)
    raw = memoryview(bytearray(layout.size_of(1)))
    layout.HEADER.pack_into(raw, 0, *values)
    view = View(raw)
    assert [view[field] for field in layout.OFFSETS] == list(values)


@pytest.mark.parametrize("field", layout.OFFSETS)
def test_a_field_reads_back(field: str) -> None:
    raw = memoryview(bytearray(layout.size_of(1)))
    view = View(raw)
    value = -5 if field in ("wall_offset", "device") else 2**31
    view[field] = value
    fields = dict(zip(layout.OFFSETS, layout.HEADER.unpack_from(raw), strict=True))
    assert view[field] == fields.pop(field) == value
    assert set(fields.values()) == {0}


def test_the_file_is_private_and_named_after_user_and_process(marks: Marks) -> None:
    assert marks.path is not None
    assert marks.path.stat().st_mode & 0o777 == 0o600
    assert marks.path.name.startswith(f"lastgasp-marks-{os.getuid()}-{os.getpid()}-")
    assert list(ringfile.ring_files()) == [marks.path]


def test_a_directory_told_later_and_one_too_long(marks: Marks) -> None:
    assert marks.path is not None
    longest = "/" + "x" * (layout.DIRECTORY_MAX - 1)
    marks.set_directory(longest)
    with pytest.raises(ConfigError, match="directory="):
        marks.set_directory(longest + "x")
    with RingReader(marks.path) as reader:
        assert reader.directory == longest
    marks.set_directory("/y")
    with RingReader(marks.path) as reader:
        assert reader.directory == "/y"


@pytest.mark.parametrize("wrong", [{"capacity": 0}, {"capacity": 24}, {"capacity": -2}, {"mask": 32}])
def test_wrong_values_are_refused_and_leave_nothing(place: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Marks.open(rank=0, world_size=1, **{"capacity": 16, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Marks.open(rank=0, world_size=1, directory="x" * 5000)
    assert list(place.iterdir()) == []


def test_a_directory_whose_name_is_not_text_comes_back_as_it_was(marks: Marks) -> None:
    assert marks.path is not None
    name = os.fsdecode(b"/runs/\xff")
    marks.set_directory(name)
    with RingReader(marks.path) as reader:
        assert reader.directory == name


# -- the lock ---------------------------------------------------------------------------------------


def test_the_lock_distinguishes_the_living_from_the_dead(marks: Marks) -> None:
    assert marks.path is not None
    assert locked(marks.path)
    with RingReader(marks.path) as reader:
        assert reader.mine
        assert not reader.claim()
    child = os.fork()
    if child == 0:
        marks.close(remove=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert locked(marks.path), "a reader in this process, or a child, has let go of it"
    marks.close(remove=False)
    assert not locked(marks.path)


def test_a_reader_in_this_process_looks_while_the_ring_moves(marks: Marks) -> None:
    """Between its looks at `head` and at `tail` the flusher may have got on: that is not damage."""
    assert marks.path is not None
    with marks.mark("forward"):
        pass
    marks._view["tail"] = 2
    assert recover_orphans() == []
    marks._view["tail"] = 1
    assert marks.path.exists()
    assert locked(marks.path)


def test_a_dead_ones_place_is_taken_once(left: Path) -> None:
    with RingReader(left) as reader:
        assert not reader.mine
        assert reader.claim()
        assert locked(left)
        assert len(reader.records(99)) == layout.RECORD.size
        reader.consumed(1)
        assert reader.records(99) == b""
    assert not locked(left)
    with RingReader(left) as reader:
        assert (reader["head"], reader["tail"]) == (1, 1)
        left.unlink()
        assert not reader.claim(), "another one has done it meanwhile"


def test_a_killed_process_leaves_all_its_finished_ranges(place: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from lastgasp.steps import ringfile
from lastgasp.steps.marks import Marks
ringfile.places = lambda: [Path(sys.argv[1])]
marks = Marks.open(rank=5, world_size=8, directory="/runs/x")
for number in range(1000):
    marks.step(number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run(code, place).returncode == -signal.SIGKILL
    (path,) = ringfile.ring_files()
    with RingReader(path) as reader:
        assert reader.claim()
        assert (reader["rank"], reader.directory) == (5, "/runs/x")
        assert reader.names() == [Name("step {}", "default", bits.STEP, stream=True)]
        values = [fields[3] for fields in layout.RECORD.iter_unpack(reader.records(5000))]
    assert values == list(range(999))


# -- damage -----------------------------------------------------------------------------------------


def _set(field: str, value: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
            View(memoryview(mapping))[field] = value

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: os.truncate(path, 0), "only 0 bytes"),
    "short": (lambda path: os.truncate(path, layout.size_of(16) - 1), "a capacity of 16"),
    "magic": (_set("magic", 7), "magic is 0x7"),
    "version": (_set("version", 2), "version is 0x2, expected 0x1"),
    "record size": (_set("record_size", 32), "record_size"),
    "no capacity": (_set("capacity", 0), "a capacity of 0"),
    "odd capacity": (_set("capacity", 12), "a capacity of 12"),
    "huge capacity": (_set("capacity", 1 << 40), "a capacity of"),
    "tail before head": (_set("tail", 9), "-8 records of 16"),
    "more than fit": (_set("head", 17), "17 records of 16"),
    "names": (_set("names", 513), "513 names"),
    "another file": (lambda path: path.write_bytes(b"x" * layout.size_of(16)), "magic"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_ring_is_refused_and_let_go_of(left: Path, kind: str) -> None:
    damage, reason = DAMAGE[kind]
    damage(left)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RingDamaged, match=reason):
        RingReader(left)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_not_a_file_of_this_user_is_not_opened(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = left.with_name("link")
    link.symlink_to(left)
    with pytest.raises(RingDamaged, match="regular file of this user"):
        RingReader(link)
    with pytest.raises(RingDamaged):
        RingReader(left.parent)
    with pytest.raises(FileNotFoundError):
        RingReader(left.with_name("nothing"))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(RingDamaged, match="this user"):
        RingReader(left)


@pytest.mark.parametrize("at", [layout.NAMES_AT, layout.NAMES_AT + layout.NAME_SIZE, layout.DIRECTORY_AT])
def test_garbage_in_texts_is_read_as_something(left: Path, at: int) -> None:
    with left.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 300)
    with RingReader(left) as reader:
        assert len(reader.names()) == 2
        assert isinstance(reader.directory, str)


# -- places -----------------------------------------------------------------------------------------


def _no_room(*_: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_next_place_where_there_is_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ringfile, "places", lambda: [tmp_path / "missing", tmp_path])
    with caplog.at_level(logging.INFO, "lastgasp"):
        marks = Marks.open(rank=0, world_size=1, capacity=16)
    assert marks.path is not None
    assert marks.path.parent == tmp_path
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "missing: No such file" in caplog.text
    marks.close(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_the_places_are_shared_memory_and_the_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp/x")
    monkeypatch.delenv("LASTGASP_RING_DIR")
    assert ringfile.places() == [Path("/dev/shm"), Path("/tmp/x")]


def test_a_directory_of_ones_own_is_the_only_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor are rings recovered elsewhere: those of another run of the tests, say."""
    monkeypatch.setenv("LASTGASP_RING_DIR", str(tmp_path))
    marks = Marks.open(rank=0, world_size=1, capacity=16)
    assert marks.path is not None and marks.path.parent == tmp_path
    assert list(ringfile.ring_files()) == [marks.path]
    marks.close(remove=True)


@pytest.mark.parametrize("at", ["posix_fallocate", "link"])
def test_a_process_killed_while_it_makes_its_ring_leaves_nothing(at: str, tmp_path: Path) -> None:
    code = f"import os\nos.{at} = lambda *a, **k: os.kill(os.getpid(), 9)\n" + (
        "from lastgasp.steps.marks import Marks\nMarks.open(rank=0, world_size=1, capacity=16)"
    )
    done = run(code, env=os.environ | {"LASTGASP_RING_DIR": str(tmp_path)})
    assert done.returncode == -9, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_place_where_files_have_names_from_their_beginning(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ringfile, "_nameless", lambda place: None)
    marks = Marks.open(rank=0, world_size=1, capacity=16)
    assert marks.path is not None and list(place.iterdir()) == [marks.path]
    assert locked(marks.path)
    marks.close(remove=True)
    monkeypatch.setattr(os, "rename", _no_room)
    marks = Marks.open(rank=0, world_size=1, capacity=16)
    assert marks.path is None and list(place.iterdir()) == []
    marks.close(remove=True)


def test_a_full_place_is_found_at_once_and_memory_of_its_own_is_the_last_resort(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _no_room)
    marks = Marks.open(rank=0, world_size=1, capacity=16)
    assert marks.path is None
    assert list(place.iterdir()) == []
    with marks.mark("forward"):
        pass
    assert len(marks.records(9)) == layout.RECORD.size
    marks.consumed(1)
    child = os.fork()
    if child == 0:
        with marks.mark("forward"):
            os._exit(0)
    os.waitpid(child, 0)
    assert (marks.head, marks.tail) == (1, 1)
    marks.close(remove=True)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert f"{place}: No space left on device" in warnings[0].getMessage()


def test_a_full_tmpfs_is_no_sigbus(tmp_path: Path) -> None:
    """The real thing, in a mount namespace of its own, where that is allowed."""
    code = """
import sys
from pathlib import Path
from lastgasp.steps import ringfile
from lastgasp.steps.marks import Marks
ringfile.places = lambda: [Path(sys.argv[1])]
marks = Marks.open(rank=0, world_size=1)
for number in range(20000):
    marks.step(number)
print(marks.path, marks.head, marks.dropped)
"""
    script = f'mount -t tmpfs -o size=512k tmpfs {tmp_path} && exec "$@"'
    command: list[str] = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-c",
        script,
        "sh",
        sys.executable,
        "-c",
        code,
        str(tmp_path),
    ]
    try:
        allowed = subprocess.run([*command[:6], "true"], capture_output=True, timeout=200, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("no right to mount a file system: needs user namespaces, or root with CAP_SYS_ADMIN")
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "None 16384 3615\n"), done.stderr


def test_a_ring_that_cannot_be_finished_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", _no_room)
    before = len(os.listdir("/proc/self/fd"))
    marks = Marks.open(rank=0, world_size=1, capacity=16)
    assert marks.path is None
    marks.close(remove=True)
    assert list(place.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_nobody_sees_a_ring_before_it_is_locked(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Path]] = []
    real = fcntl.lockf

    def lockf(*arguments: Any) -> object:
        seen.append(list(ringfile.ring_files()))
        return real(*arguments)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    Marks.open(rank=0, world_size=1, capacity=16).close(remove=True)
    assert seen == [[]]


def test_closing_beside_a_reader_of_this_process(marks: Marks) -> None:
    assert marks.path is not None
    reader = RingReader(marks.path)
    marks.close(remove=False)
    assert reader["rank"] == 3
    reader.close()
    reader.close()
    with RingReader(marks.path) as reader:
        assert not reader.mine


# -- who writes it ----------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    """As if nobody had asked yet."""
    writer._compiled.cache_clear()
    yield
    writer._compiled.cache_clear()


def _refuse(*_: object) -> Any:
    raise ImportError("No module named 'lastgasp.steps._ring'")


def test_without_the_extension_python_writes_and_it_is_logged_once(
    place: Path, fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib, "import_module", _refuse)
    with caplog.at_level(logging.INFO, "lastgasp"):
        for _ in range(2):
            marks = Marks.open(rank=0, world_size=1, capacity=16)
            assert isinstance(marks.mark("forward"), pyring.Mark)
            marks.close(remove=True)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "No module named 'lastgasp.steps._ring'" in caplog.text


def test_an_extension_of_another_layout_is_not_used(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(writer.SWITCH, raising=False)
    monkeypatch.setattr(layout, "VERSION", 2)
    with caplog.at_level(logging.INFO, "lastgasp"):
        assert writer.choose() is pyring


def test_the_variable_takes_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGASP_PURE_PYTHON", "1")
    assert writer.choose() is pyring


def test_the_extension_refuses_what_is_no_ring() -> None:
    _ring = pytest.importorskip("lastgasp.steps._ring", reason="the extension is not built")
    memory = bytearray(layout.size_of(16))
    for broken in (memory, bytes(memory), bytearray(10)):
        with pytest.raises((ValueError, BufferError)):
            _ring.Ring(broken, layout.RECORDS_AT)
    for arguments in ((), (1,), (object(), 0, 1), (None, 1, 2)):
        with pytest.raises(TypeError):
            _ring.Mark(*arguments)
    for name in ("__enter__", "__exit__"):
        with pytest.raises(TypeError):
            getattr(_ring.Mark, name)()
        with pytest.raises(TypeError):
            getattr(_ring.Mark, name)(3)


def test_a_mark_of_the_extension_refuses_wrong_numbers(marks: Marks) -> None:
    mark = marks.mark("forward")
    if not type(mark).__module__.endswith("._ring"):
        pytest.skip("the extension is not built")
    with pytest.raises(TypeError, match="put"):
        mark.put(1, 2)  # type: ignore[call-arg]
    for wrong in ((-1, 2, 0, 0, 0), (1, 2**64, 0, 0, 0), (1, 2, 2**63, 0, 0)):
        with pytest.raises(OverflowError):
            mark.put(*wrong)
    with pytest.raises(TypeError):
        mark.put("1", 2, 0, 0, 0)  # type: ignore[arg-type]
    asked: list[int] = []

    class Odd:
        def __index__(self) -> int:
            asked.append(1)
            return 1

    with pytest.raises(TypeError):
        mark.put("1", 2, Odd(), 0, 0)  # type: ignore[arg-type]
    assert asked == [], "its code would run while an error is set already"
    with pytest.raises(OverflowError):
        mark.value = 2**63
    assert marks.head == 0
