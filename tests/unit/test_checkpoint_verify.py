"""Verdicts, candidates, quarantine, retention and the single-process restore."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lastgasp.checkpoint import (
    Candidate,
    Counted,
    Damage,
    apply,
    candidates,
    newest_good,
    quarantine,
    to_remove,
    verify,
)
from lastgasp.checkpoint import adopt as adopt_module
from lastgasp.checkpoint import chunks as chunks_module
from lastgasp.checkpoint.progress import progress_bar
from lastgasp.checkpoint.verdict import merge
from lastgasp.errors import ConfigError, NoGoodCheckpoint
from lastgasp.testing import corrupt
from support.checkpoint_kit import FILES, FOLDERS, provenance, publish, put_file, put_folder

CHUNK = 4 << 20


def test_adjacent_damages_are_one_range(tmp_path: Path) -> None:
    path = put_file(tmp_path, 1, os.urandom(6 * CHUNK))
    for chunk in (1, 2, 4):
        corrupt.flip_bit(path, chunk * CHUNK + 5)
    ranges = [(d.kind, d.offset, d.length) for d in verify(path, FILES).damages]
    assert ranges == [("digest", CHUNK, 2 * CHUNK), ("digest", 4 * CHUNK, CHUNK)]


def test_merge_keeps_what_differs() -> None:
    one = Damage(file="a", kind="digest", offset=0, length=4, detail="x")
    other = msgspec.structs.replace(one, file="b", offset=4)
    assert merge([one, other]) == [one, other]


def test_shares_cover_all_and_nothing_twice(tmp_path: Path) -> None:
    path = put_file(tmp_path, 1, os.urandom(5 * CHUNK))
    corrupt.flip_bit(path, 3 * CHUNK)
    seen = [0, 0]
    verdicts = [
        verify(path, FILES, share=(i, 2), progress=lambda done, _, i=i: seen.__setitem__(i, done))  # type: ignore[misc]
        for i in range(2)
    ]
    assert [verdict.ok for verdict in verdicts] == [True, False]
    assert seen == [3 * CHUNK, 2 * CHUNK]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_agree(tmp_path: Path, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[verify.__module__], "THREADS", threads)
    path = put_file(tmp_path, 1, os.urandom(10 * CHUNK + 3))
    assert verify(path, FILES).ok
    corrupt.flip_bit(path, -1)
    (damage,) = verify(path, FILES).damages
    assert (damage.offset, damage.length, damage.proven) == (10 * CHUNK, 3, True)


def test_a_failed_read_is_a_verdict_and_proves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put_file(tmp_path, 1)

    def fail(*_: object) -> tuple[str, int]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(chunks_module, "hash_range", fail)
    verdict = verify(path, FILES)
    assert [damage.kind for damage in verdict.damages] == ["unreadable"]
    assert not verdict.proven
    assert "Input/output error" in verdict.reasons[0]


@pytest.mark.parametrize("share", [(1, 1), (-1, 2), (0, 0)])
def test_shares_that_make_no_sense(tmp_path: Path, share: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="share"):
        verify(tmp_path / "x", FILES, share=share)


def test_hidden_files_are_not_foreign(tmp_path: Path) -> None:
    path = put_folder(tmp_path, 1)
    corrupt.add_foreign(path, ".nfs0000001")
    assert verify(path, FOLDERS).ok
    corrupt.add_foreign(path)
    assert [d.kind for d in verify(path, FOLDERS).damages] == ["foreign"]
    assert not verify(path, FOLDERS).proven


def test_candidates_newest_first_by_step_then_time(tmp_path: Path) -> None:
    other = tmp_path / "other"
    paths = [put_file(tmp_path, 3), put_file(tmp_path, 12), put_file(tmp_path, 5)]
    later = put_file(other, 12)
    found = candidates([tmp_path, other, tmp_path / "none"], FILES)
    assert [c.path for c in found] == [later, paths[1], paths[2], paths[0]]
    assert candidates([tmp_path, tmp_path], FILES)[0].step == 12
    assert len(candidates([tmp_path, tmp_path], FILES)) == 3


def test_candidates_of_another_job_and_without_manifest_have_a_problem(tmp_path: Path) -> None:
    put_file(tmp_path, 1, job="mine")
    (tmp_path / "step-2.ckpt").write_bytes(b"x")
    foreign, ours = candidates([tmp_path], FILES, job="other")
    assert (foreign.step, ours.step) == (2, 1)
    assert "no manifest" in str(foreign.problem)
    assert ours.problem == "belongs to job 'mine', not to 'other'"
    assert not foreign.proven
    assert not ours.proven


def test_a_directory_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="Check the path"):
        candidates([tmp_path / "file"], FILES)


def _first(directory: Path) -> Candidate:
    return candidates([directory], FILES)[0]


def test_quarantine_keeps_everything_and_says_why(tmp_path: Path) -> None:
    for turn, name in enumerate(["step-00000001.ckpt.corrupt", "step-00000001.ckpt.corrupt-1"]):
        path = put_file(tmp_path, 1, b"version %d" % turn)
        home = quarantine(_first(tmp_path), ["bytes 0-4: bad"], proven=True)
        assert home == tmp_path / name
        assert home.read_bytes() == b"version %d" % turn
        reason = msgspec.json.decode((tmp_path / f"{name}.reason.json").read_bytes())
        assert (reason["name"], reason["step"], reason["reasons"]) == (path.name, 1, ["bytes 0-4: bad"])
        assert (tmp_path / f"{name}.manifest.json").exists()
        assert candidates([tmp_path], FILES) == []


def test_quarantine_leaves_alone_what_is_not_proven_gone_or_new(tmp_path: Path) -> None:
    path = put_file(tmp_path, 1)
    judged = _first(tmp_path)
    assert quarantine(judged, ["EIO"], proven=False) is None
    publish(path, b"anew", provenance(1))
    assert quarantine(judged, ["digest"], proven=True) is None
    assert verify(path, FILES).ok
    now = _first(tmp_path)
    assert quarantine(now, ["digest"], proven=True) is not None
    assert quarantine(now, ["digest"], proven=True) is None


def test_retention_removes_old_gasps_only(tmp_path: Path) -> None:
    periodic = put_file(tmp_path, 1, kind="periodic")
    gasps = [put_file(tmp_path, step) for step in (2, 3, 4)]
    bare = tmp_path / "step-0.ckpt"
    bare.write_bytes(b"")
    others = put_file(tmp_path, 5, job="other")
    assert apply([tmp_path], FILES, 1, Counted(job="job")) == [gasps[1], gasps[0]]
    left = {c.path for c in candidates([tmp_path], FILES)}
    assert left == {periodic, gasps[2], bare, others}
    assert not FILES.manifest_path(gasps[0]).exists()


def test_retention_never_removes_the_newest_good_one(tmp_path: Path) -> None:
    paths = [put_file(tmp_path, step) for step in (1, 2, 3, 4)]
    for path in paths[2:]:
        corrupt.flip_bit(path, 5)
    assert apply([tmp_path], FILES, 1, Counted(job="job")) == [paths[2], paths[0]]
    good = newest_good([tmp_path], FILES)
    assert good is not None
    assert good.path == paths[1]
    corrupt.flip_bit(paths[1], 5)
    assert apply([tmp_path], FILES, 1, Counted(job="job")) == []


def test_retention_finishes_what_a_crash_left(tmp_path: Path) -> None:
    paths = [put_file(tmp_path, step) for step in (1, 2)]
    paths[0].unlink()
    assert apply([tmp_path], FILES, 1, Counted(job="job")) == [paths[0]]
    assert not FILES.manifest_path(paths[0]).exists()


def test_the_manifest_of_what_is_out_of_reach_for_a_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale handle of NFS is no removal."""
    path = put_folder(tmp_path, 1)

    def stale(one: Path) -> Any:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(os.path, "lexists", lambda one: False)
        patch.setattr(Path, "lstat", stale)
        assert adopt_module.remove_orphans(tmp_path, FOLDERS) == []
    shutil.rmtree(path)
    assert adopt_module.remove_orphans(tmp_path, FOLDERS) == [path]


def test_retention_of_directories(tmp_path: Path) -> None:
    paths = [put_folder(tmp_path, step) for step in (1, 2)]
    assert apply([tmp_path], FOLDERS, 1, Counted(job="job"), protected=[paths[1]]) == [paths[0]]
    assert [c.path for c in candidates([tmp_path], FOLDERS)] == [paths[1]]


@pytest.mark.parametrize("keep", [0, -1])
def test_keep_is_at_least_one(keep: int) -> None:
    with pytest.raises(ConfigError, match="keep"):
        to_remove([], keep)


def test_newest_good_of_nothing_is_none(tmp_path: Path) -> None:
    assert newest_good([tmp_path, tmp_path / "none"], FILES) is None


def test_newest_good_falls_back_and_quarantines(tmp_path: Path) -> None:
    old, new = put_file(tmp_path, 1), put_file(tmp_path, 2)
    corrupt.flip_bit(new, 100)
    chosen = newest_good([tmp_path], FILES)
    assert chosen is not None
    assert chosen.path == old
    assert not new.exists()
    assert new.with_name(new.name + ".corrupt").exists()


def test_without_a_good_one_nothing_moves_and_all_are_listed(tmp_path: Path) -> None:
    bad = put_file(tmp_path, 1)
    corrupt.flip_bit(bad, 100)
    (tmp_path / "step-2.ckpt").write_bytes(b"from elsewhere")
    for _ in range(2):
        with pytest.raises(NoGoodCheckpoint, match="resume=<path>") as caught:
            newest_good([tmp_path], FILES)
        assert "no manifest" in caught.value.reasons[str(tmp_path / "step-2.ckpt")]
        assert "bytes 0-" in caught.value.reasons[str(bad)]


def test_the_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("x") as none:
        assert none is None
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("verifying x", appears_after_s=0.0) as tell:
        assert tell is not None
        tell(1, 2)
    assert "verifying" in capsys.readouterr().err
    with progress_bar("verifying x") as tell:
        assert tell is not None
        tell(1, 2)
    assert capsys.readouterr().err == ""
