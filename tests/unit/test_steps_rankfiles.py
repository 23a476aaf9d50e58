"""A rank's files: names, bounds, complete batches or none, and what others do to the directory meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lastgasp import _fs
from lastgasp.steps.rankfiles import FILE_MAX, RankFiles, profiling_files

SECOND = 1_795_247_866
ROW = b'{"Kind":1}\n'


class Wall:
    """A clock that the test sets, in seconds."""

    def __init__(self) -> None:
        self.second = SECOND

    def __call__(self) -> int:
        """Now, in ns."""
        return self.second * 10**9 + 999_999_999


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def files(tmp_path: Path, wall: Wall) -> RankFiles:
    return RankFiles(tmp_path / "base/task/0", wall_ns=wall)


def contents(files: RankFiles) -> dict[str, bytes]:
    """Of the profiling files, by name."""
    return {path.name: path.read_bytes() for path in profiling_files(files.directory)}


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_the_first_row_makes_directories_and_a_file_named_by_the_second(files: RankFiles) -> None:
    files.append(ROW)
    assert contents(files) == {str(SECOND): ROW}
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (files.directory, *files.directory.parents[:2])}
    assert modes == {0o755}
    assert files.path is not None
    assert stat.S_IMODE(files.path.stat().st_mode) == 0o644


def test_later_rows_are_appended_whatever_the_second(files: RankFiles, wall: Wall) -> None:
    files.append(ROW)
    wall.second += 100
    files.append(ROW * 2)
    assert contents(files) == {str(SECOND): ROW * 3}


def test_another_process_continues_with_the_file_of_the_largest_number(files: RankFiles, wall: Wall) -> None:
    files.directory.mkdir(parents=True)
    for name in ("1795247000", "1795247001", "99999999999", "notes.txt", "0000000000x"):
        (files.directory / name).write_bytes(ROW)
    (files.directory / "1795247777").mkdir()
    (files.directory / "1795247778").symlink_to("notes.txt")
    files.append(ROW)
    assert (files.directory / "1795247001").read_bytes() == ROW * 2
    assert (files.directory / "notes.txt").read_bytes() == ROW
    assert files.path == files.directory / "1795247001"


@pytest.mark.parametrize(("size", "appended"), [(FILE_MAX - 1, True), (FILE_MAX, True), (FILE_MAX + 1, False)])
def test_a_new_file_follows_one_of_more_than_10_mib(files: RankFiles, wall: Wall, size: int, appended: bool) -> None:
    files.append(ROW)
    first = files.path
    assert first is not None
    with first.open("r+b") as file:
        file.truncate(size - 1)
        file.seek(size - 1)
        file.write(b"\n")
    wall.second += 7
    files.append(ROW)
    if appended:
        assert files.path == first
        assert first.stat().st_size == size + len(ROW)
    else:
        assert contents(files)[str(SECOND + 7)] == ROW
        assert first.stat().st_size == size


def test_the_bound_is_looked_at_before_the_write(files: RankFiles) -> None:
    batch = ROW * 500_000
    files.append(batch)
    files.append(batch)
    files.append(batch)
    assert [len(content) for content in contents(files).values()] == [2 * len(batch), len(batch)]


def test_names_never_clash_and_never_go_back(tmp_path: Path, wall: Wall) -> None:
    one = RankFiles(tmp_path, file_max=0, wall_ns=wall)
    other = RankFiles(tmp_path, file_max=0, wall_ns=wall)
    for _ in range(3):
        one.append(ROW)
        other.append(ROW)
    wall.second -= 1000
    one.append(ROW)
    assert contents(one) == {str(SECOND + i): ROW for i in range(7)}


@pytest.mark.parametrize("what", ["file", "directory", "base"])
def test_what_is_removed_is_made_again(files: RankFiles, what: str) -> None:
    files.beside("lastgasp.json", b"{}")
    files.append(ROW)
    assert files.path is not None
    target = {"file": files.path, "directory": files.directory, "base": files.directory.parents[1]}[what]
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    files.append(ROW)
    assert list(contents(files).values()) == [ROW]
    assert (files.directory / "lastgasp.json").read_bytes() == b"{}"


def test_what_one_that_was_killed_has_left_half_written_is_removed(files: RankFiles) -> None:
    files.directory.mkdir(parents=True)
    process = subprocess.Popen(["true"])
    process.wait()
    left = files.directory / f".lastgasp.json.tmp-{process.pid}-{_fs.host_tag()}012345"
    left.write_bytes(b"")
    files.beside("lastgasp.json", b"{}")
    files.append(ROW)
    assert not left.exists()


def test_a_file_that_is_unlinked_before_the_write_does_not_take_the_rows(
    files: RankFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.append(ROW)
    left = iter([True, True])
    real = os.write

    def unlink_and_write(descriptor: int, data: bytes) -> int:
        if next(left, False):
            assert files.path is not None
            files.path.unlink()
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", unlink_and_write)
    files.append(ROW * 2)
    assert list(contents(files).values()) == [ROW * 2]
    assert next(left, None) is None


def test_a_file_system_that_counts_no_links_gets_each_row_once(
    files: RankFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some in user space do not."""
    real = os.fstat

    def no_links(descriptor: int) -> os.stat_result:
        found = list(real(descriptor))
        found[stat.ST_NLINK] = 0
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", no_links)
    files.append(ROW)
    files.append(ROW)
    (path,) = profiling_files(files.directory)
    assert path.read_bytes() == ROW * 2


def test_half_a_row_that_a_death_has_left_is_not_appended_to(files: RankFiles) -> None:
    files.directory.mkdir(parents=True)
    (files.directory / str(SECOND)).write_bytes(ROW + b'{"Kin')
    files.append(ROW)
    assert contents(files) == {str(SECOND): ROW + b'{"Kin', str(SECOND + 1): ROW}


@pytest.mark.parametrize("take", ["a link", "a directory"])
def test_what_takes_our_file_s_place_is_left_alone(files: RankFiles, tmp_path: Path, take: str) -> None:
    files.append(ROW)
    assert files.path is not None
    files.path.unlink()
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"theirs")
    files.path.symlink_to(foreign) if take == "a link" else files.path.mkdir()
    files.append(ROW)
    assert contents(files) == {str(SECOND + 1): ROW}
    assert foreign.read_bytes() == b"theirs"


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call it with the bytes that the disk has room for."""
    real, room = os.write, [1 << 40]

    def write(descriptor: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real(descriptor, data[: room[0]])
        room[0] -= done
        return done

    def set_room(size: int) -> None:
        room[0] = size

    monkeypatch.setattr(os, "write", write)
    return set_room


def test_a_batch_that_does_not_fit_is_taken_back_and_comes_later(files: RankFiles, disk: Callable[[int], None]) -> None:
    files.append(ROW)
    disk(len(ROW) + 3)
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            files.append(ROW * 2)
        assert contents(files) == {str(SECOND): ROW}
    disk(1 << 40)
    files.append(ROW * 2)
    assert contents(files) == {str(SECOND): ROW * 3}


def test_a_short_write_is_finished(files: RankFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:5]))
    files.append(ROW * 2)
    assert contents(files) == {str(SECOND): ROW * 2}


def test_what_another_process_appended_meanwhile_is_not_cut_off(
    files: RankFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.append(ROW)
    path, real, calls = files.path, os.write, iter(range(10))
    assert path is not None

    def write(descriptor: int, data: bytes) -> int:
        if next(calls) == 0:
            done = real(descriptor, data[:5])
            with path.open("ab") as theirs:
                theirs.write(b"theirs\n")
            return done
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(OSError, match="No space"):
            files.append(ROW)
    assert path.read_bytes() == ROW + ROW[:5] + b"theirs\n"


def test_a_file_beside_that_cannot_be_written_stops_no_row(files: RankFiles, caplog: pytest.LogCaptureFixture) -> None:
    (files.directory / "lastgasp.json").mkdir(parents=True)
    files.beside("lastgasp.json", b"{}")
    files.append(ROW)
    files.append(ROW)
    assert contents(files) == {str(SECOND): ROW * 2}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert sorted(path.name for path in files.directory.iterdir()) == [str(SECOND), "lastgasp.json"]


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "base").write_text("a file")
    with pytest.raises(OSError):
        RankFiles(tmp_path / "base/task/0").append(ROW)


def test_a_file_of_another_user_is_followed_by_one_of_ours(files: RankFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the refusal comes from a wrapper."""
    files.directory.mkdir(parents=True)
    theirs, real = files.directory / str(SECOND), os.open
    theirs.write_bytes(ROW)

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if Path(path) == theirs:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    files.append(ROW)
    assert contents(files) == {str(SECOND): ROW, str(SECOND + 1): ROW}
