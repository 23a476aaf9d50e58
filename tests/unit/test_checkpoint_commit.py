"""A commit that dies at any call leaves the old checkpoint or the new one, and it verifies."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lastgasp._fs import DISK, Disk, is_temp
from lastgasp.checkpoint import Manifest, Provenance, SingleFile, Staged, candidates, verify
from lastgasp.checkpoint.layout import next_path
from lastgasp.checkpoint.moving import put_back
from lastgasp.errors import CheckpointError, ConfigError
from support.checkpoint_kit import FILES, FOLDERS, Died, DyingDisk, provenance, publish, put_file, put_folder

OLD, NEW, NEWER = b"old " * 3000, b"new " * 2000, b"newer " * 1500
CALLS = 12
"""Data: create, pwrite, fsync. Manifest: create, pwrite, fsync, rename, sync_dir. Twice rename, sync_dir."""


def _content_and_step(path: Path) -> tuple[bytes, int]:
    verdict = verify(path, FILES)
    assert verdict.ok, verdict.reasons
    (candidate,) = candidates([path.parent], FILES)
    assert candidate.problem is None
    assert candidate.step == verdict.step
    assert verdict.step is not None
    return path.read_bytes(), verdict.step


def test_a_commit_makes_the_documented_calls(tmp_path: Path) -> None:
    disk = DyingDisk()
    publish(tmp_path / "last.ckpt", NEW, provenance(1), disk)
    data, manifest = ["create", "pwrite", "fsync"], ["create", "pwrite", "fsync", "rename", "sync_dir"]
    assert disk.log == [*data, *manifest, "rename", "sync_dir", "rename", "sync_dir"]
    assert disk.calls == CALLS


@pytest.mark.parametrize("at", range(CALLS + 1))
def test_death_while_overwriting_leaves_old_or_new(tmp_path: Path, at: int) -> None:
    path = tmp_path / "last.ckpt"
    publish(path, OLD, provenance(1))
    disk = DyingDisk(at)
    if at < CALLS:
        with pytest.raises(Died):
            publish(path, NEW, provenance(2), disk)
    else:
        publish(path, NEW, provenance(2), disk)
    expected = (NEW, 2) if at >= 9 else (OLD, 1)
    assert _content_and_step(path) == expected


class _NoExchange(DyingDisk):
    def exchange(self, one: Path, other: Path) -> bool:
        return False


def _replace_last(folder: Path, step: int, disk: Disk) -> None:
    with Staged(folder / "iter_last", FOLDERS, disk=disk) as staged:
        staged.open("iter_last/rank0/shard.pt").write(f"data of {step}".encode())
        staged.publish(provenance(step), replace=True)


@pytest.mark.parametrize("kind", [DyingDisk, _NoExchange])
def test_a_directory_is_replaced_and_is_there_at_any_death(tmp_path: Path, kind: type[DyingDisk]) -> None:
    """`last.ckpt` of a sharded model; where names cannot be exchanged it is back once somebody selects."""
    path, at, steps = tmp_path / "iter_last", 0, []
    while True:
        for left in tmp_path.iterdir():
            DISK.remove(left)
        _replace_last(tmp_path, 1, Disk())
        disk = kind(at)
        with contextlib.suppress(Died):
            _replace_last(tmp_path, 2, disk)
        if kind is _NoExchange:
            put_back(tmp_path, FOLDERS)
        verdict = verify(path, FOLDERS)
        assert verdict.ok and verdict.step is not None, (at, verdict.reasons)
        assert (path / "rank0" / "shard.pt").read_bytes() == f"data of {verdict.step}".encode()
        steps.append(verdict.step)
        if disk.calls <= at:
            break
        at += 1
    assert steps == sorted(steps) and set(steps) == {1, 2}
    assert ("exchange" in disk.log) == (kind is DyingDisk)
    assert {one.name for one in tmp_path.iterdir() if not one.name.endswith(".lock")} == {
        "iter_last", "iter_last.manifest.json"
    }  # fmt: skip


def test_names_change_places_whatever_they_are(tmp_path: Path) -> None:
    link, folder = tmp_path / "link", tmp_path / "folder"
    link.symlink_to("nowhere")
    folder.mkdir()
    assert DISK.exchange(folder, link)
    assert folder.is_symlink() and link.is_dir()
    with pytest.raises(FileNotFoundError):
        DISK.exchange(folder, tmp_path / "none")


@pytest.mark.parametrize("at", range(CALLS))
@pytest.mark.parametrize("again", range(CALLS + 4))
def test_death_twice_leaves_one_that_verifies(tmp_path: Path, at: int, again: int) -> None:
    path = tmp_path / "last.ckpt"
    publish(path, OLD, provenance(1))
    with pytest.raises(Died):
        publish(path, NEW, provenance(2), DyingDisk(at))
    try:
        publish(path, NEWER, provenance(3), DyingDisk(again))
    except Died:
        assert _content_and_step(path) in [(OLD, 1), (NEW, 2), (NEWER, 3)]
    publish(path, NEWER, provenance(3))
    assert _content_and_step(path) == (NEWER, 3)
    assert not next_path(FILES.manifest_path(path)).exists()


@pytest.mark.parametrize("at", range(CALLS))
def test_death_of_the_first_commit_leaves_a_checkpoint_or_none(tmp_path: Path, at: int) -> None:
    path = tmp_path / "step-2.ckpt"
    with pytest.raises(Died):
        publish(path, NEW, provenance(2), DyingDisk(at))
    if at >= 9:
        assert _content_and_step(path) == (NEW, 2)
    else:
        assert candidates([tmp_path], FILES) == []


@pytest.mark.parametrize("at", range(40))
def test_death_of_a_directory_commit_harms_nothing(tmp_path: Path, at: int) -> None:
    older = put_folder(tmp_path, 1)
    target, disk = tmp_path / "iter_0000002", DyingDisk(at)
    try:
        with Staged(target, FOLDERS, disk=disk) as staged:
            staged.open("iter_0000002/a/x.pt").write(NEW)
            staged.open("iter_0000002/b.pt").write(OLD)
            staged.publish(provenance(2))
    except Died:
        assert verify(older, FOLDERS).ok
    if target.exists():
        assert verify(target, FOLDERS).ok
    else:
        assert [c.path for c in candidates([tmp_path], FOLDERS)] == [older]
    assert put_folder(tmp_path, 3) in [c.path for c in candidates([tmp_path], FOLDERS)]


_KILLED = """
import os, signal, sys
from pathlib import Path
from support.checkpoint_kit import DyingDisk, Died, provenance, publish
class Killing(DyingDisk):
    def _call(self, name):
        try:
            super()._call(name)
        except Died:
            os.kill(os.getpid(), signal.SIGKILL)
publish(Path(sys.argv[1]), b"new " * 2000, provenance(2), Killing(int(sys.argv[2])))
"""


@pytest.mark.parametrize("at", [1, 5, 8, 9, 10, 11])
def test_sigkill_leaves_old_or_new(tmp_path: Path, at: int) -> None:
    path = tmp_path / "last.ckpt"
    publish(path, OLD, provenance(1))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", _KILLED, str(path), str(at)]
    done = subprocess.run(command, env=environment, timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL
    assert _content_and_step(path) == ((NEW, 2) if at >= 9 else (OLD, 1))
    publish(path, NEWER, provenance(3))  # the lock died with its holder
    assert _content_and_step(path) == (NEWER, 3)


def _publish_often(path: Path, number: int) -> None:
    for turn in range(20):
        publish(path, f"{number} {turn} ".encode() * 500, provenance(7))


def test_two_processes_may_publish_the_same_step(tmp_path: Path) -> None:
    path = tmp_path / "step-7.ckpt"
    context = multiprocessing.get_context("fork")
    others = [context.Process(target=_publish_often, args=(path, number)) for number in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join(400)
    assert [other.exitcode for other in others] == [0, 0]
    assert verify(path, FILES).ok
    assert not [entry for entry in tmp_path.iterdir() if is_temp(entry)]


def test_two_threads_publish_one_directory_and_the_first_wins(tmp_path: Path) -> None:
    target, manifests = tmp_path / "iter_0000007", list[Manifest]()

    def write(number: int) -> None:
        with Staged(target, FOLDERS) as staged:
            staged.open(f"{target.name}/x.pt").write(bytes([number]) * 1000)
            manifests.append(staged.publish(provenance(7)))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({manifest.self_digest for manifest in manifests}) == 1
    assert verify(target, FOLDERS).ok
    assert not [entry for entry in tmp_path.iterdir() if is_temp(entry)]


def test_another_directory_is_never_overwritten(tmp_path: Path) -> None:
    path = put_folder(tmp_path, 1)
    with Staged(path, FOLDERS) as staged:
        staged.open(f"{path.name}/x.pt").write(b"x")
        with pytest.raises(CheckpointError, match="never overwritten"):
            staged.publish(provenance(2))
    assert verify(path, FOLDERS).ok


class _Full(DyingDisk):
    def _call(self, name: str) -> None:
        try:
            super()._call(name)
        except Died:
            if name == "remove":
                return
            raise OSError(errno.ENOSPC, "No space left on device") from None


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 8])
def test_a_full_disk_raises_and_leaves_the_old_one_and_no_rubbish(tmp_path: Path, at: int) -> None:
    path = tmp_path / "last.ckpt"
    publish(path, OLD, provenance(1))
    with pytest.raises(OSError, match="No space"):
        publish(path, NEW, provenance(2), _Full(at))
    assert _content_and_step(path) == (OLD, 1)
    assert not [entry for entry in tmp_path.iterdir() if is_temp(entry)]


def test_a_full_disk_is_seen_when_the_writing_thread_meets_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        publish(tmp_path / "a.ckpt", bytes(20 << 20), provenance(1), _Full(1))


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    with Staged(tmp_path / "new" / "step-1.ckpt", FILES) as staged:
        staged.open().write(b"x")
        assert staged.nbytes == 1
        assert staged.first_byte_ns
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == []


def test_publish_once_and_only_what_was_written(tmp_path: Path) -> None:
    staged = Staged(tmp_path / "step-1.ckpt", FILES)
    with pytest.raises(CheckpointError, match="nothing to publish"):
        staged.publish(provenance(1))
    staged.open().write(b"x")
    staged.publish(provenance(1))
    with pytest.raises(CheckpointError, match="publish once"):
        staged.publish(provenance(1))


@pytest.mark.parametrize("relative", ["../x", "other.ckpt", "/etc/passwd", "step-1.ckpt/../../x", "step-1.ckpt//x"])
def test_paths_outside_of_the_target_are_refused(tmp_path: Path, relative: str) -> None:
    with pytest.raises(ConfigError, match="relative"):
        Staged(tmp_path / "step-1.ckpt", FILES).open(relative)


def test_what_another_job_has_saved_is_replaced_with_a_warning_where_that_had_come_further(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A training that goes on in a new job replaces its `last.ckpt` at each save, which is no news."""
    for job, step, warns in (("a", 5, False), ("b", 6, False), ("c", 2, True)):
        caplog.clear()
        with Staged(tmp_path / "last.ckpt", SingleFile()) as staged:
            staged.open().write(b"x" * 10)
            staged.publish(Provenance(format="test", step=step, kind="periodic", job=job))
        assert ("(step 6 of job b) is replaced by this job's step 2" in caplog.text) == warns == bool(caplog.text)


def test_a_file_without_manifest_may_be_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "step-00000003.ckpt"
    path.write_bytes(b"from elsewhere")
    assert put_file(tmp_path, 3) == path
    assert verify(path, FILES).ok


def test_files_of_several_processes_become_one_directory(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000003"
    first, second = Staged(path, FOLDERS), Staged(path, FOLDERS)
    first.open(f"{path.name}/rank0/shard.pt").write(b"zero" * 1000)
    second.open(f"{path.name}/rank1/shard.pt").write(b"one" * 1000)
    folder, entries = second.sealed()
    first.adopt(folder, entries)
    manifest = first.publish(provenance(3))
    assert [entry.path for entry in manifest.files] == [f"{path.name}/rank{i}/shard.pt" for i in (0, 1)]
    assert verify(path, FOLDERS).ok
    assert [p.name for p in tmp_path.iterdir() if is_temp(p)] == []


def test_files_that_another_library_has_written_are_taken_over(tmp_path: Path) -> None:
    path, folder = tmp_path / "iter_0000003", tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "shard.pt").write_bytes(b"data")
    with Staged(path, FOLDERS, sha256=True) as staged:
        staged.take(folder, {f"{path.name}/shard.pt": folder / "shard.pt"})
        assert staged.nbytes == 4
        [entry] = staged.publish(provenance(3)).files
    assert entry.sha256 == hashlib.sha256(b"data").hexdigest()
    assert verify(path, FOLDERS).ok


def test_a_file_that_is_there_already_is_not_adopted(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000003"
    with Staged(path, FOLDERS) as first, Staged(path, FOLDERS) as second:
        for staged in (first, second):
            staged.open(f"{path.name}/shard.pt").write(b"data")
        with pytest.raises(ConfigError, match="each once"):
            first.adopt(*second.sealed())
