"""The runtime directory: who may see it, what is in it, and what happens without it."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from lastgasp.errors import ConfigError
from lastgasp.gasp import rundir
from lastgasp.gasp.rundir import Announcement, JobFile, running_jobs, runtime_directory
from support.switch_job import job_here
from support.waiting import until


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime directory that is not there yet."""
    path = tmp_path / "runtime"
    monkeypatch.setenv("LASTGASP_RUNTIME_DIR", str(path))
    return path


def announced(address: str = "127.0.0.1:4711") -> Announcement:
    """The file of a controller in this process."""
    return Announcement(address, "secret", 1_700_000_000)


def mode(path: Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(path.lstat().st_mode)


# -- the file --------------------------------------------------------------------------------------


def test_one_file_per_job_from_start_to_end(directory: Path) -> None:
    before = os.umask(0)
    try:
        one, two = announced(), announced("127.0.0.1:4712")
    finally:
        os.umask(before)
    pid = os.getpid()
    assert mode(directory) == 0o700
    assert sorted(p.name for p in directory.iterdir()) == [f"job-{pid}-4711.json", f"job-{pid}-4712.json"]
    one.tell("digits", "/ckpts")
    one.tell("digits", "/ckpts")
    assert sorted(p.name for p in directory.iterdir()) == [f"digits-{pid}-4711.json", f"job-{pid}-4712.json"]
    assert {mode(path) for path in directory.iterdir()} == {0o600}
    [first] = [job for job in running_jobs() if job.job]
    assert (first.address, first.token, first.job, first.directory) == ("127.0.0.1:4711", "secret", "digits", "/ckpts")
    assert (first.pid, first.started_s, first.version) == (pid, 1_700_000_000, 1)
    one.withdraw()
    one.withdraw()
    two.withdraw()
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    ("job", "name"),
    [
        ("a/b c", "a_b_c"),
        ("../../etc/passwd", "_.._etc_passwd"),
        ("", "job"),
        ("...", "job"),
        ("-rf", "rf"),
        ("\0\n", "__"),
        ("x" * 500, "x" * 64),
        ("größe", "gr__e"),
    ],
)
def test_any_job_has_a_name_that_is_a_file(directory: Path, job: str, name: str) -> None:
    one = announced()
    one.tell(job, "/ckpts")
    [path] = directory.iterdir()
    assert path.name == f"{name}-{os.getpid()}-4711.json"
    assert running_jobs()[0].job == job
    one.withdraw()


@pytest.mark.parametrize(
    ("address", "seen"),
    [
        ("0.0.0.0:1", "127.0.0.1:1"),
        (":::1", "127.0.0.1:1"),
        ("10.0.0.1:1", "10.0.0.1:1"),
        ("node-7:1", "node-7:1"),
    ],
)
def test_a_controller_that_listens_everywhere_is_reached_here(directory: Path, address: str, seen: str) -> None:
    one = announced(address)
    assert running_jobs()[0].address == seen
    one.withdraw()


def test_a_controller_writes_it_and_takes_it_away(directory: Path) -> None:
    with job_here(1, job="digits") as job:
        # It writes that after it has welcomed the first rank.
        until(lambda: [found.job for found in running_jobs()] == ["digits"], "the job's name to be in the file")
        [found] = running_jobs()
        assert (found.address, found.token, found.job, found.directory) == (
            job.address,
            job.token,
            "digits",
            "/nowhere",
        )
    assert list(directory.iterdir()) == []


# -- who lives -------------------------------------------------------------------------------------


def put(folder: Path, name: str = "x.json", /, **change: object) -> Path:
    """A file as this process would have written it, but for `change`."""
    one = announced()
    one.withdraw()
    path = folder / name
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(one._file, **change)))
    path.chmod(0o600)
    return path


def test_files_of_dead_controllers_are_removed(directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    put(directory, "gone.json", pid=child.pid)
    put(directory, "another process of that number.json", born=1)
    assert running_jobs() == []
    assert list(directory.iterdir()) == []


def test_the_next_job_in_the_directory_says_that_nothing_is_taken_over(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lastgasp.controller")
    put(directory, "killed.json", pid=1 << 22, directory="/ckpts")
    put(directory, "of another job.json", pid=1 << 22, directory="/other")
    one = announced()
    one.tell("digits", "/ckpts")
    assert [path.name for path in directory.iterdir()] == [one._file.name]
    assert [f"in /ckpts (process {1 << 22}) was killed" in record.message for record in caplog.records] == [True]
    one.withdraw()


def test_a_defunct_controller_is_dead(directory: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    born = rundir._born(child.pid)
    assert born is not None
    put(directory, pid=child.pid, born=born)
    assert [job.pid for job in running_jobs()] == [child.pid]
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert running_jobs() == []
    child.wait()


def test_files_of_other_machines_are_left_alone(directory: Path) -> None:
    """The directory may be on a shared file system; a dead process here says nothing about one there."""
    put(directory, host="another boot:1", pid=1 << 22)
    assert running_jobs() == []
    assert len(list(directory.iterdir())) == 1


def test_those_of_another_container_are_shown(directory: Path) -> None:
    """Same machine, other process numbers: it lives if it answers."""
    boot = announced()._file.host.partition(":")[0]
    for path in directory.iterdir():
        path.unlink()
    put(directory, host=f"{boot}:another name space", pid=1 << 22)
    assert [job.pid for job in running_jobs()] == [1 << 22]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": 2}', b"\xff", b"[" * 60000])
def test_files_that_are_none_of_ours_are_left_alone(directory: Path, content: bytes) -> None:
    one = announced()
    path = directory / "z.json"
    path.write_bytes(content)
    path.chmod(0o600)
    (directory / "notes.txt").write_text("mine")
    assert len(running_jobs()) == 1
    assert path.read_bytes() == content
    one.withdraw()


def test_a_later_version_is_not_guessed_at(directory: Path) -> None:
    put(directory, version=2)
    assert running_jobs() == []


def test_files_that_others_could_have_written_do_not_count(directory: Path) -> None:
    real = put(directory, "real.json")
    assert len(running_jobs()) == 1
    real.chmod(0o644)
    assert running_jobs() == []
    real.chmod(0o600)
    hidden = real.rename(real.with_name("away"))
    (directory / "link.json").symlink_to(hidden)
    assert running_jobs() == []
    os.mkfifo(directory / "pipe.json", 0o600)
    assert running_jobs() == []


# -- whose directory -------------------------------------------------------------------------------


def wide(path: Path) -> None:
    """Readable by everybody."""
    path.mkdir(mode=0o755)
    path.chmod(0o755)


def link(path: Path) -> None:
    """A symlink to a directory that would do."""
    real = path.with_name("real")
    real.mkdir(mode=0o700)
    path.symlink_to(real)


def file(path: Path) -> None:
    """No directory at all."""
    path.write_text("")


BAD = {wide: r"mode is 0755: chmod 700 it", link: "is a symlink or a file: remove it", file: "is a symlink or a file"}


@pytest.mark.parametrize("make", BAD)
def test_a_directory_that_cannot_be_trusted_is_not_used(
    directory: Path, caplog: pytest.LogCaptureFixture, make: object
) -> None:
    assert callable(make)
    make(directory)
    with caplog.at_level(logging.WARNING, "lastgasp.controller"):
        one = announced()
        one.tell("digits", "/ckpts")
        one.withdraw()
    [record] = caplog.records
    assert "lastgasp ps and switch will not find this job by themselves" in record.getMessage()
    assert "secret" not in record.getMessage()
    assert not directory.is_dir() or list(directory.iterdir()) == []
    with pytest.raises(ConfigError, match=BAD[make]):
        running_jobs()


def test_another_users_directory_is_not_used(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with caplog.at_level(logging.WARNING, "lastgasp.controller"):
        announced()
    assert f"belongs to user {os.getuid()}" in caplog.text
    assert list(directory.iterdir()) == []


def test_a_directory_that_cannot_be_made_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LASTGASP_RUNTIME_DIR", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING, "lastgasp.controller"), job_here(1) as job:
        assert job.table().state == "running"
    assert len([record for record in caplog.records if "will not find" in record.getMessage()]) == 1
    with pytest.raises(ConfigError, match="a symlink or a file"):
        running_jobs()


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fallback = Path(f"/tmp/lastgasp-{os.getuid()}")
    monkeypatch.delenv("LASTGASP_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert runtime_directory() == fallback
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert runtime_directory() == fallback
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert runtime_directory() == tmp_path / "lastgasp"
    monkeypatch.setenv("LASTGASP_RUNTIME_DIR", str(tmp_path / "named"))
    assert runtime_directory() == tmp_path / "named"


def test_a_job_of_another_kind_of_shell_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by a service without a session, looked for from a login, or the other way round."""
    first, second = tmp_path / "first", tmp_path / "second"
    found: list[JobFile] = []
    monkeypatch.setattr(rundir, "_candidates", lambda: [first, second])
    one = announced()
    monkeypatch.setattr(rundir, "_candidates", lambda: [second, first])
    found = running_jobs()
    one.withdraw()
    assert len(found) == 1
