"""Temporary names, the lock, and layouts."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lastgasp import _clock, _fs
from lastgasp.checkpoint import DirectoryLayout, SingleFile
from lastgasp.config import check_writable
from lastgasp.errors import ConfigError
from lastgasp.ports import Layout
from support.checkpoint_kit import FILES, FOLDERS, put_file, put_folder


def _dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def _aged(path: Path, seconds: float = 90_000.0) -> Path:
    old = path.stat().st_mtime - seconds
    os.utime(path, (old, old))
    return path


def test_temporary_names_are_unique_and_beside() -> None:
    path = Path("/x/step-1.ckpt")
    names = {_fs.unique_temp(path) for _ in range(100)}
    assert len(names) == 100
    assert all(_fs.is_temp(name) and name.parent == path.parent for name in names)


@pytest.mark.parametrize(
    "name",
    [
        "a.ckpt",
        ".a.tmp",
        ".a.tmp-1-xyz",
        "a.tmp-12-0123456789ab",
        ".a.tmp-012-0123456789ab",
        ".a.tmp-5-0123456789abc",
    ],
)
def test_other_names_are_not_ours(name: str) -> None:
    assert not _fs.is_temp(Path(name))


def test_a_temporary_of_a_dead_process_of_this_host_is_removed_at_once(tmp_path: Path) -> None:
    left = tmp_path / f".a.ckpt.tmp-{_dead_pid()}-{_fs.host_tag()}012345"
    left.write_bytes(b"")
    mine = _fs.unique_temp(tmp_path / "mine.ckpt")
    mine.write_bytes(b"")
    assert _fs.remove_stale_temps(tmp_path) == [left]
    assert mine.exists()


def test_only_old_temporaries_of_other_hosts_are_removed(tmp_path: Path) -> None:
    dead = _dead_pid()
    stale = _aged_file(tmp_path / f".a.ckpt.tmp-{dead}-0123456789ab")
    folder = tmp_path / f".iter_1.tmp-{dead}-0123456789ab"
    folder.mkdir()
    _aged_file(folder / "x")
    _aged(folder)
    keep = [
        _aged_file(_fs.unique_temp(tmp_path / "mine.ckpt")),
        _aged_file(tmp_path / f".a.ckpt.tmp-{dead}"),
        _aged_file(tmp_path / "a.ckpt"),
    ]
    young = tmp_path / f".b.ckpt.tmp-{dead}-0123456789ab"
    young.write_bytes(b"")
    busy = tmp_path / f".iter_2.tmp-{dead}-0123456789ab"
    busy.mkdir()
    (busy / "just-written").write_bytes(b"")
    _aged(busy)
    assert _fs.remove_stale_temps(tmp_path) == sorted([stale, folder])
    assert all(path.exists() for path in (*keep, young, busy))
    assert _fs.remove_stale_temps(tmp_path / "none") == []


def test_a_temporary_that_cannot_be_removed_does_not_stop_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user's, or one that is still open somewhere on NFS."""
    kept, left = (tmp_path / f".{name}.ckpt.tmp-{_dead_pid()}-{_fs.host_tag()}012345" for name in "ab")
    for path in (kept, left):
        path.write_bytes(b"x")
    real = _fs.DISK.remove

    def remove(path: Path) -> None:
        if path == kept:
            raise PermissionError(errno.EACCES, "Permission denied")
        real(path)

    monkeypatch.setattr(_fs.DISK, "remove", remove)
    assert _fs.remove_stale_temps(tmp_path) == [left]
    assert f"{kept}, which a dead process has left, cannot be removed" in caplog.text


def _aged_file(path: Path) -> Path:
    path.write_bytes(b"")
    return _aged(path)


def test_write_atomically(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for data in (b"one", b"two", b""):
        _fs.write_atomically(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_the_lock_excludes_and_gives_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _fs.locked(tmp_path) as first, _fs.locked(tmp_path, wait_s=0.01) as second:
        assert first
        assert not second
    assert "no lock" in caplog.text
    with _fs.locked(tmp_path) as third:
        assert third
    with _fs.locked(tmp_path / "none") as fourth:
        assert not fourth


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-00000012.ckpt", 12),
        ("epoch=0-step=12.ckpt", 12),
        ("epoch=3-step=120-v1.ckpt", 120),
        ("model-epoch=3.ckpt", None),
        ("last.ckpt", None),
        ("step_7.ckpt", 7),
    ],
)
def test_step_of_files(name: str, step: int | None) -> None:
    assert FILES.step(Path(name)) == step


@pytest.mark.parametrize(("name", "step"), [("iter_0000012", 12), ("checkpoint-40", 40), ("latest", None)])
def test_step_of_directories(name: str, step: int | None) -> None:
    assert FOLDERS.step(Path(name)) == step


def test_layouts_are_layouts() -> None:
    assert isinstance(FILES, Layout)
    assert isinstance(FOLDERS, Layout)


def test_discover_leaves_out_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    file, folder = put_file(tmp_path, 1), put_folder(tmp_path, 1)
    for name in ("a.ckpt.corrupt", "iter_9.corrupt", "iter_9.corrupt-1", ".x.ckpt", "iter_7.manifest.next.json"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "iter_9.corrupt.manifest.json").write_bytes(b"")
    _fs.unique_temp(file).write_bytes(b"")
    assert list(FILES.discover(tmp_path)) == [file]
    assert list(FOLDERS.discover(tmp_path)) == [folder]
    assert list(FILES.discover(tmp_path / "none")) == []


def test_a_lone_manifest_is_a_checkpoint_that_lost_its_data(tmp_path: Path) -> None:
    path = put_file(tmp_path, 1)
    path.unlink()
    assert list(FILES.discover(tmp_path)) == [path]
    assert FILES.files(path) == {}


def test_files_of_a_directory(tmp_path: Path) -> None:
    path = put_folder(tmp_path, 1, parts=1)
    names = ["iter_0000001/common.pt", "iter_0000001/rank0/shard.pt"]
    assert FOLDERS.files(path) == {name: tmp_path / name for name in names}
    assert FOLDERS.manifest_path(path) == tmp_path / "iter_0000001.manifest.json"


def test_wrong_layouts_are_refused() -> None:
    for suffix in ("", "ckpt", ".", "./x"):
        with pytest.raises(ConfigError, match="suffix"):
            SingleFile(suffix)
    for pattern in ("", "a/b"):
        with pytest.raises(ConfigError, match="pattern"):
            DirectoryLayout(pattern)


@pytest.mark.parametrize(("hours", "kept"), [(2, True), (23, True), (25, False)])
def test_a_temporary_of_a_host_whose_clock_is_hours_behind_is_live(tmp_path: Path, hours: int, kept: bool) -> None:
    temp = tmp_path / f".step=1.ckpt.tmp-1-{'0' * 12}"
    temp.write_bytes(b"being written")
    assert _fs.is_temp(temp) and _fs.host_tag() != "000000"
    written = time.time() - hours * 3600
    os.utime(temp, (written, written))
    assert _fs.remove_stale_temps(tmp_path) == ([] if kept else [temp])
    assert [path.name for path in tmp_path.iterdir()] == ([temp.name] if kept else [])


def test_a_file_system_whose_clock_is_behind_keeps_what_it_has_just_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server stamps the files; this host is a day and more ahead of it."""
    temp = tmp_path / f".step=1.ckpt.tmp-1-{'0' * 12}"
    temp.write_bytes(b"being written")
    ahead = time.time_ns() + 30 * 3600 * 10**9
    monkeypatch.setattr(_clock, "wall_ns", lambda: ahead)
    assert _fs.remove_stale_temps(tmp_path) == []


def test_a_file_system_that_cannot_sync_directories_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """FUSE and some network file systems answer with EINVAL; it is said once, and at the start."""
    fsync = os.fsync

    def refusing(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refusing)
    monkeypatch.setattr(_fs, "_SAID", set())
    check_writable(tmp_path)
    assert caplog.text.count("cannot sync directories") == 1
    _fs.write_atomically(tmp_path / "name", b"content")
    assert (tmp_path / "name").read_bytes() == b"content" and caplog.text.count("cannot sync directories") == 1


def test_a_disk_that_fails_is_no_such_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output"):
        _fs.fsync_dir(tmp_path)
