"""Checkpoints of several files at scattered places: found, committed, verified, moved and removed as a whole."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lastgasp._fs import Disk, is_temp, remove_stale_temps
from lastgasp.checkpoint import (
    Manifest,
    ScatteredLayout,
    Staged,
    adopt,
    apply,
    candidates,
    newest_good,
    verify,
)
from lastgasp.checkpoint.adopt import read_entries, remove_orphans, write_manifest
from lastgasp.checkpoint.layout import next_path
from lastgasp.checkpoint.manifest_lookup import read_pair
from lastgasp.checkpoint.moving import aside_in, put_back, set_aside
from lastgasp.errors import CheckpointError, ConfigError
from lastgasp.ports import Layout
from lastgasp.testing import corrupt
from support.checkpoint_kit import (
    FILES,
    FOLDERS,
    SCATTERED,
    Died,
    DyingDisk,
    provenance,
    put_file,
    put_folder,
    put_scattered,
    scattered_name,
)

NEW = [b"new zero " * 900, b"new one " * 700]
TENSORFLOW = ScatteredLayout(
    pattern=r"(?P<name>.+-\d+)\.(?:index|data-\d+-of-\d+)", title=r"\g<name>", names=r".+-(?P<step>\d+)"
)


def _newest(directory: Path, rank: int = 0) -> str:
    """What the framework's own marker says."""
    return (directory / f"rank_{rank}" / "newest").read_text()


# -- layout ---------------------------------------------------------------------------------------


def test_it_is_a_layout() -> None:
    assert isinstance(SCATTERED, Layout)


def test_files_of_a_name_are_one_checkpoint(tmp_path: Path) -> None:
    path = put_scattered(tmp_path, 4)
    other = put_scattered(tmp_path, 5)
    (tmp_path / "rank_0" / "notes.txt").write_bytes(b"")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "net_rank_0-4.bin").write_bytes(b"")
    assert list(SCATTERED.discover(tmp_path)) == [path, other]
    names = [scattered_name(rank, 4) for rank in (0, 1)]
    assert SCATTERED.files(path) == {name: tmp_path / name for name in names}
    assert SCATTERED.parts(path) == [tmp_path / name for name in names]
    assert SCATTERED.manifest_path(path) == tmp_path / "net-4.manifest.json"
    assert (SCATTERED.step(path), SCATTERED.step(tmp_path / "other")) == (4, None)
    assert SCATTERED.owns(path, names[0])
    assert not SCATTERED.owns(path, scattered_name(0, 5))
    assert not SCATTERED.owns(path, path.name)
    assert [c.step for c in candidates([tmp_path], SCATTERED)] == [5, 4]


def test_hidden_files_and_a_directory_that_is_not_there_hold_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_0" / ".net_rank_0-4.bin").write_bytes(b"")
    (tmp_path / "rank_7").write_bytes(b"no folder")
    assert list(SCATTERED.discover(tmp_path)) == []
    assert list(SCATTERED.discover(tmp_path / "none")) == []


def test_layouts_in_one_directory_do_not_see_each_other(tmp_path: Path) -> None:
    file, folder, scattered = put_file(tmp_path, 1), put_folder(tmp_path, 2), put_scattered(tmp_path, 3)
    assert list(FILES.discover(tmp_path)) == [file]
    assert list(FOLDERS.discover(tmp_path)) == [folder]
    assert list(SCATTERED.discover(tmp_path)) == [scattered]


def test_files_beside_each_other(tmp_path: Path) -> None:
    path = tmp_path / "model-7"
    with Staged(path, TENSORFLOW) as staged:
        staged.open("model-7.index").write(b"index")
        staged.open("model-7.data-00000-of-00001").write(b"data")
        staged.publish(provenance(7), markers={"checkpoint": b'model_checkpoint_path: "model-7"'})
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith(".")) == [
        "checkpoint", "model-7.data-00000-of-00001", "model-7.index", "model-7.manifest.json",
    ]  # fmt: skip
    assert verify(path, TENSORFLOW).ok
    assert [(c.path, c.step) for c in candidates([tmp_path], TENSORFLOW)] == [(path, 7)]
    corrupt.flip_bit(tmp_path / "model-7.index", 0)
    assert verify(path, TENSORFLOW).reasons == ["model-7.index bytes 0-5: content differs from its digest"]


@pytest.mark.parametrize(
    ("field", "given"), [("pattern", "("), ("names", "["), ("folders", ("a/b",)), ("folders", "a")]
)
def test_wrong_expressions_are_refused(field: str, given: Any) -> None:
    right: dict[str, Any] = {"pattern": "x", "title": "x", "names": "x", "folders": ("",)}
    with pytest.raises(ConfigError, match=field):
        ScatteredLayout(**(right | {field: given}))


# -- commit ---------------------------------------------------------------------------------------


def test_a_commit_makes_the_documented_calls(tmp_path: Path) -> None:
    (tmp_path / "rank_0").mkdir()
    (tmp_path / "rank_1").mkdir()
    disk = DyingDisk()
    put_scattered(tmp_path, 4, NEW, disk)
    atomic = ["create", "pwrite", "fsync", "rename", "sync_dir"]
    begin = disk.log.index("sync_dir")
    assert sorted(disk.log[:begin]) == sorted(["create", "pwrite", "fsync"] * 2)
    rest = disk.log[begin:]
    while rest[0] == "sync_dir":  # the temporary folders
        rest.pop(0)
    assert rest[: len(atomic)] == atomic
    assert rest[len(atomic) :] == [
        "rename", "rename", "sync_dir", "sync_dir", "remove",
        *atomic, *atomic, "rename", "sync_dir",
    ]  # fmt: skip


def _calls(tmp_path: Path) -> int:
    disk = DyingDisk()
    put_scattered(tmp_path / "count", 4, NEW, disk)
    return disk.calls


def test_death_at_any_call_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    calls, seen = _calls(tmp_path), set[int]()
    for at in range(calls):
        folder = tmp_path / str(at)
        old = put_scattered(folder, 3)
        with pytest.raises(Died):
            put_scattered(folder, 4, NEW, DyingDisk(at))
        assert verify(old, SCATTERED).ok
        chosen = newest_good([folder], SCATTERED)
        assert chosen is not None
        assert chosen.step is not None
        seen.add(chosen.step)
        if chosen.step == 4:
            assert [(folder / scattered_name(rank, 4)).read_bytes() for rank in (0, 1)] == NEW
        for rank in (0, 1):  # what the framework would load by itself is whole
            named = int(_newest(folder, rank))
            assert all((folder / scattered_name(each, named)).is_file() for each in (0, 1))
            assert named <= chosen.step
        # The next attempt at the same step is not in its own way, and leaves nothing behind.
        assert verify(put_scattered(folder, 4, NEW), SCATTERED).ok
        assert not next_path(folder / "net-4.manifest.json").exists()
        assert _newest(folder) == "4"
    assert seen == {3, 4}


_KILLED = """
import os, signal, sys
from pathlib import Path
from support.checkpoint_kit import DyingDisk, Died, put_scattered
class Killing(DyingDisk):
    def _call(self, name):
        try:
            super()._call(name)
        except Died:
            os.kill(os.getpid(), signal.SIGKILL)
put_scattered(Path(sys.argv[1]), 4, None, Killing(int(sys.argv[2])))
"""


@pytest.mark.parametrize("before", ["between the renames", "before the markers", "before the manifest"])
def test_sigkill_leaves_the_old_one_or_the_new_one(tmp_path: Path, before: str) -> None:
    disk = DyingDisk()
    put_scattered(tmp_path / "count", 4, None, disk)
    old = put_scattered(tmp_path, 3)
    renames = [number for number, call in enumerate(disk.log) if call == "rename"]
    at = {"between the renames": renames[2], "before the markers": renames[2] + 4, "before the manifest": renames[-1]}
    command = [sys.executable, "-c", _KILLED, str(tmp_path), str(at[before])]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, check=False, timeout=200, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == -9
    assert verify(old, SCATTERED).ok
    chosen = newest_good([tmp_path], SCATTERED)
    assert chosen is not None
    assert chosen.step == (3 if before == "between the renames" else 4)
    assert _newest(tmp_path) == ("4" if before == "before the manifest" else "3")
    remove_stale_temps(tmp_path)
    assert not [path for path in tmp_path.iterdir() if is_temp(path)]


def test_a_half_renamed_one_is_not_used_and_does_not_mix_with_the_next(tmp_path: Path) -> None:
    disk = DyingDisk()
    put_scattered(tmp_path / "count", 4, NEW, disk)
    at = [number for number, call in enumerate(disk.log) if call == "rename"][2]
    with pytest.raises(Died):
        put_scattered(tmp_path, 4, NEW, DyingDisk(at))
    assert list(SCATTERED.files(tmp_path / "net-4")) == [scattered_name(0, 4)]
    assert not isinstance(read_pair(tmp_path / "net-4", SCATTERED), Manifest)
    path = put_scattered(tmp_path, 4, [b"other zero", b"other one"])
    assert verify(path, SCATTERED).ok
    (home,) = aside_in(tmp_path)
    assert (home / scattered_name(0, 4)).read_bytes() == NEW[0]


def test_it_is_never_overwritten_unless_asked(tmp_path: Path) -> None:
    path = put_scattered(tmp_path, 4)
    for aside in (False, True):
        with Staged(path, SCATTERED) as staged:
            staged.open(scattered_name(0, 4)).write(b"x")
            if not aside:
                with pytest.raises(CheckpointError, match="never overwritten"):
                    staged.publish(provenance(4, job="other"))
                assert verify(path, SCATTERED).ok
            else:
                staged.publish(provenance(4, job="other"), aside=True)
    assert verify(path, SCATTERED).ok
    assert list(SCATTERED.files(path)) == [scattered_name(0, 4)]
    (home,) = aside_in(tmp_path)
    assert (home / scattered_name(1, 4)).is_file()


@pytest.mark.parametrize("kind", ["scattered", "folder"])
def test_what_was_moved_aside_for_a_commit_that_was_killed_is_restored(tmp_path: Path, kind: str) -> None:
    layout: Layout = SCATTERED if kind == "scattered" else FOLDERS
    ends = set()
    for at in range(200):
        directory = tmp_path / str(at)
        path, old = _bare(directory, layout)
        disk = DyingDisk(at)
        try:
            with Staged(path, layout, disk=disk) as staged:
                for relative in old:
                    staged.open(relative).write(b"new")
                staged.publish(provenance(4), aside=True)
        except Died:
            pass
        back = put_back(directory, layout)
        assert put_back(directory, layout) == []
        found = {name: file.read_bytes() for name, file in layout.files(path).items()}
        homes = aside_in(directory)
        ends.add("old, moved back" if back else "old" if found == old else "new" if verify(path, layout).ok else "half")
        if back or not homes:
            assert found == old, at
        if homes and "half" not in ends:
            assert verify(path, layout).ok, at
        if homes:  # then all of it is there
            assert len([file for file in homes[0].rglob("*") if file.is_file()]) == len(old)
        if disk.calls <= at:
            assert verify(path, layout).ok
            break
    else:
        raise AssertionError("it never came to an end")
    assert ends == {"old", "old, moved back", "new"} | ({"half"} if kind == "scattered" else set())


def _bare(directory: Path, layout: Layout) -> tuple[Path, dict[str, bytes]]:
    """A complete checkpoint without a manifest, as a framework leaves it, and what is in it."""
    path = put_scattered(directory, 4) if layout is SCATTERED else put_folder(directory, 4)
    layout.manifest_path(path).unlink()
    return path, {name: file.read_bytes() for name, file in layout.files(path).items()}


def test_killed_before_the_manifest_was_moved_too(tmp_path: Path) -> None:
    """What is there is another job's, with a manifest."""
    count = DyingDisk()
    set_aside(put_scattered(tmp_path / "count", 4), SCATTERED, count)
    for at in range(count.calls):
        directory = tmp_path / str(at)
        path = put_scattered(directory, 4, job="other")
        next_path(SCATTERED.manifest_path(path)).write_bytes(b"of the commit that was killed")
        with pytest.raises(Died):
            set_aside(path, SCATTERED, DyingDisk(at))
        put_back(directory, SCATTERED)
        assert verify(path, SCATTERED).ok, at
        assert not aside_in(directory), at


def test_another_jobs_checkpoint_comes_back_with_its_manifest(tmp_path: Path) -> None:
    path = put_scattered(tmp_path, 4, job="other")
    set_aside(path, SCATTERED)
    assert not SCATTERED.files(path) and not SCATTERED.manifest_path(path).exists()
    assert put_back(tmp_path, SCATTERED) == [], "nobody was killed: it was moved aside for good"
    next_path(SCATTERED.manifest_path(path)).write_bytes(b"of the commit that was killed")
    assert put_back(tmp_path, SCATTERED) == [path]
    assert verify(path, SCATTERED).ok
    assert not aside_in(tmp_path)


def test_the_same_step_of_the_same_job_is_there_already(tmp_path: Path) -> None:
    path = put_scattered(tmp_path, 4)
    before = (tmp_path / scattered_name(0, 4)).read_bytes()
    put_scattered(tmp_path, 4, NEW)
    assert (tmp_path / scattered_name(0, 4)).read_bytes() == before
    corrupt.drop(tmp_path / scattered_name(1, 4))
    put_scattered(tmp_path, 4, NEW)  # what stands there is not whole: it does not count
    assert (tmp_path / scattered_name(0, 4)).read_bytes() == NEW[0]
    assert verify(path, SCATTERED).ok


def test_files_of_several_processes_become_one(tmp_path: Path) -> None:
    path = tmp_path / "net-4"
    first, second = Staged(path, SCATTERED), Staged(path, SCATTERED)
    first.open(scattered_name(0, 4)).write(NEW[0])
    second.open(scattered_name(1, 4)).write(NEW[1])
    first.adopt(*second.sealed())
    first.publish(provenance(4))
    assert verify(path, SCATTERED).ok
    assert [p.name for p in tmp_path.iterdir() if is_temp(p)] == []


class _NoLinks(Disk):
    def link(self, src: Path, dst: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("disk", [Disk(), _NoLinks()], ids=["links", "no links"])
def test_one_content_at_several_places(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / "net-4"
    with Staged(path, SCATTERED, disk=disk) as staged:
        staged.open(scattered_name(0, 4)).write(NEW[0])
        staged.link(scattered_name(1, 4), scattered_name(0, 4))
        with pytest.raises(ConfigError, match="each once"):
            staged.link(scattered_name(1, 4), scattered_name(0, 4))
        with pytest.raises(ConfigError, match="same_as"):
            staged.link(scattered_name(3, 4), scattered_name(2, 4))
        staged.publish(provenance(4))
    assert verify(path, SCATTERED).ok
    places = [tmp_path / scattered_name(rank, 4) for rank in (0, 1)]
    assert [place.read_bytes() for place in places] == [NEW[0]] * 2
    assert places[0].samefile(places[1]) == (not isinstance(disk, _NoLinks))


@pytest.mark.parametrize("relative", ["../x", "rank_0/net_rank_0-5.bin", "rank_0/net_rank_1-4.bin", "net-4", "/x"])
def test_places_of_other_checkpoints_are_refused(tmp_path: Path, relative: str) -> None:
    with Staged(tmp_path / "net-4", SCATTERED) as staged, pytest.raises(ConfigError, match="relative"):
        staged.open(relative)


# -- damage, quarantine, retention ----------------------------------------------------------------


def test_damage_moves_all_files_to_one_place(tmp_path: Path) -> None:
    old, new = put_scattered(tmp_path, 3), put_scattered(tmp_path, 4)
    corrupt.flip_bit(tmp_path / scattered_name(1, 4), 17)
    chosen = newest_good([tmp_path], SCATTERED)
    assert chosen is not None
    assert chosen.path == old
    home = tmp_path / "net-4.corrupt"
    assert sorted(p.relative_to(home).as_posix() for p in home.rglob("*.bin")) == [scattered_name(r, 4) for r in (0, 1)]
    assert (tmp_path / "net-4.corrupt.manifest.json").is_file()
    assert scattered_name(1, 4) in (tmp_path / "net-4.corrupt.reason.json").read_text()
    assert list(SCATTERED.discover(tmp_path)) == [old]
    assert not new.exists()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda d: corrupt.drop(d / scattered_name(1, 4)), "rank_1/net_rank_1-4.bin bytes 0-4000: file is missing"),
        (lambda d: corrupt.truncate(d / scattered_name(0, 4), 100), "rank_0/net_rank_0-4.bin bytes 100-4000: has 100"),
        (lambda d: (d / "rank_2").mkdir() or (d / scattered_name(2, 4)).write_bytes(b"x"), "is not in the manifest"),
        (lambda d: corrupt.copy_over(d / "net-3.manifest.json", d / "net-4.manifest.json"),
         "manifest is that of rank_0/net_rank_0-3.bin"),
    ],
    ids=["dropped", "cut", "foreign", "another's manifest"],
)  # fmt: skip
def test_damage_is_named(tmp_path: Path, spoil: object, reason: str) -> None:
    put_scattered(tmp_path, 3)
    path = put_scattered(tmp_path, 4)
    assert callable(spoil)
    spoil(tmp_path)
    assert reason in "\n".join(verify(path, SCATTERED).reasons)


def test_old_gasps_are_removed_with_all_their_files(tmp_path: Path) -> None:
    paths = [put_scattered(tmp_path, step) for step in (1, 2, 3)]
    assert apply([tmp_path], SCATTERED, 1, protected=[paths[2]]) == [paths[1], paths[0]]
    assert list(SCATTERED.discover(tmp_path)) == [paths[2]]
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file() and not p.name.startswith(".")) == [
        "net-3.manifest.json", "net_rank_0-3.bin", "net_rank_1-3.bin", "newest", "newest",
    ]  # fmt: skip


def test_manifests_for_what_the_framework_wrote(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank_{rank}").mkdir()
        (tmp_path / scattered_name(rank, 9)).write_bytes(NEW[rank])
    path = tmp_path / "net-9"
    assert [c.problem for c in candidates([tmp_path], SCATTERED)] == [
        "no manifest: not written by lastgasp, or never finished"
    ]
    entries = [entry for rank in (0, 1) for entry in read_entries(path, SCATTERED, (rank, 2))]
    write_manifest(path, SCATTERED, provenance(9), entries)
    assert verify(path, SCATTERED).ok
    assert remove_orphans(tmp_path, SCATTERED) == []
    corrupt.drop(tmp_path / scattered_name(0, 9))
    assert remove_orphans(tmp_path, SCATTERED) == []  # one file is left: somebody is at work here
    corrupt.drop(tmp_path / scattered_name(1, 9))
    assert remove_orphans(tmp_path, SCATTERED) == [path]
    assert list(SCATTERED.discover(tmp_path)) == []


def test_a_manifest_that_waits_goes_only_when_another_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while the manifest of what a killed commit has left is written anew."""
    path = put_scattered(tmp_path, 4)
    SCATTERED.manifest_path(path).rename(next_path(SCATTERED.manifest_path(path)))
    entries = read_entries(path, SCATTERED)

    def dies(*_: object) -> None:
        raise Died("write")

    with monkeypatch.context() as patch:
        patch.setattr(adopt, "write_atomically", dies)
        with pytest.raises(Died):
            write_manifest(path, SCATTERED, provenance(4), entries)
    assert verify(path, SCATTERED).ok
    write_manifest(path, SCATTERED, provenance(4), entries)
    assert verify(path, SCATTERED).ok
    assert not next_path(SCATTERED.manifest_path(path)).exists()


def test_an_empty_temporary_that_cannot_go_does_not_spoil_a_commit(tmp_path: Path) -> None:
    class Stubborn(Disk):
        """As NFS, which keeps removed files under other names while somebody reads them."""

        def remove(self, path: Path) -> None:
            """Refused."""
            raise OSError(errno.ENOTEMPTY, "not empty")

    path = put_scattered(tmp_path, 4, NEW, Stubborn())
    assert verify(path, SCATTERED).ok
    assert SCATTERED.manifest_path(path).exists()
    assert _newest(tmp_path) == "4"
