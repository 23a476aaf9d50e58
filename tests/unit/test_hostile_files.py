"""Files that are not what their names say: pipes, devices, gigabytes, locks of others, links, terminal escapes."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from lastgasp import _fs
from lastgasp.checkpoint import Provenance, SingleFile, Staged, candidates, verify
from lastgasp.checkpoint import manifest as manifests
from lastgasp.checkpoint.adopt import read_entries
from lastgasp.cli import main
from lastgasp.cli._console import escape, printable
from lastgasp.errors import NoGoodCheckpoint, grouped
from lastgasp.events import Fault, Incident, encode_incident

LAYOUT = SingleFile()


def publish(directory: Path, step: int) -> Path:
    """A checkpoint that verifies."""
    path = directory / f"step={step}.ckpt"
    with Staged(path, LAYOUT) as staged:
        staged.open().write(b"x" * 100)
        staged.publish(Provenance(format="test", step=step, kind="periodic", job="j"))
    return path


def put(path: Path, kind: str) -> None:
    """Something that is not a file of ours."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(3 << 30)  # takes no space
    else:
        path.mkdir()


# -- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pipe", "device", "huge", "directory"])
def test_a_manifest_that_is_none_is_a_verdict(tmp_path: Path, kind: str) -> None:
    good, bad = publish(tmp_path, 1), publish(tmp_path, 2)
    put(LAYOUT.manifest_path(bad), kind)
    verdict = verify(bad, LAYOUT)
    assert not verdict.ok and not verdict.proven, "it may be put right again, so it is not quarantined"
    assert "manifest cannot be read" in verdict.reasons[0]
    assert ("more than" if kind == "huge" else "regular file") in verdict.reasons[0] or kind == "directory"
    done = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert done.exit_code == 1 and "manifest cannot be read" in done.output
    assert CliRunner().invoke(main, ["manifest", str(tmp_path)]).exit_code in (0, 1)
    assert verify(good, LAYOUT).ok


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_data_that_is_not_a_file(tmp_path: Path, kind: str) -> None:
    path = publish(tmp_path, 1)
    put(path, kind)
    assert "is not a regular file" in verify(path, LAYOUT).reasons[0]
    other = tmp_path / "step=2.ckpt"
    put(other, kind)
    with pytest.raises(OSError, match="is not a regular file"):
        read_entries(other, LAYOUT)
    for command in ("verify", "manifest"):
        assert CliRunner().invoke(main, [command, str(tmp_path)]).exit_code == 1


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_record_that_is_not_a_file(tmp_path: Path, kind: str) -> None:
    (tmp_path / "incidents").mkdir()
    put(tmp_path / "incidents" / "1.json", kind)
    done = CliRunner().invoke(main, ["incident", str(tmp_path)])
    assert done.exit_code == 2 and "is not a regular file" in done.output


def test_the_bound_holds_for_a_file_that_grows(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    assert _fs.read_bounded(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than the 4 bytes"):
        _fs.read_bounded(path, 4)
    assert isinstance(manifests.read(tmp_path / "none"), manifests.ManifestProblem)


# -- the lock -------------------------------------------------------------------------------------


def test_the_lock_is_this_users_alone_also_an_old_one(tmp_path: Path) -> None:
    lock = tmp_path / _fs.LOCK_NAME
    lock.touch(0o644)
    with _fs.locked(tmp_path) as got:
        assert got and stat.S_IMODE(lock.stat().st_mode) == 0o600


def test_a_link_in_place_of_the_lock_makes_nothing(tmp_path: Path) -> None:
    target = tmp_path / "made-by-the-lock"
    (tmp_path / _fs.LOCK_NAME).symlink_to(target)
    with _fs.locked(tmp_path) as got:
        assert not got
    assert not target.exists()


def test_a_pipe_in_place_of_the_lock(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / _fs.LOCK_NAME)
    with _fs.locked(tmp_path) as got:
        assert not got


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's file")
def test_another_users_lock_is_not_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / _fs.LOCK_NAME
    lock.touch(0o666)
    os.chown(lock, 12345, 12345)
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with _fs.locked(tmp_path, wait_s=30) as got:
            assert not got


# -- links ----------------------------------------------------------------------------------------


def test_a_link_to_another_checkpoint_is_that_checkpoint(tmp_path: Path) -> None:
    """ModelCheckpoint(save_last="link")."""
    for step in (1, 2):
        publish(tmp_path, step)
    (tmp_path / "last.ckpt").symlink_to("step=2.ckpt")
    done = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert [found.step for found in candidates([tmp_path], LAYOUT)] == [2, 1]
    (tmp_path / "step=2.ckpt").unlink()
    assert CliRunner().invoke(main, ["verify", str(tmp_path)]).exit_code == 1, "what it led to is gone"


# -- words ----------------------------------------------------------------------------------------


def test_what_a_terminal_would_obey_is_shown() -> None:
    assert printable("a\x1b[2J\x07\u202eb\x9b1m\td\n\udc80") == "a\\x1b[2J\\x07\\u202eb\\x9b1m\td\n\\udc80"
    assert escape("[bold]\x1b") == "\\[bold]\\x1b"
    assert printable("Schöne Schritte 步骤") == "Schöne Schritte 步骤"


def test_a_cause_that_would_clear_the_screen(tmp_path: Path) -> None:
    cause = "\x1b[2J\x1b]0;owned\x07 gone"
    fault = Fault(kind="exception", rank=0, cause=cause, step=1, seen_ns=1)
    record = Incident(id="1", job="\x1b[31mj", attempt=0, world_size=1, faults=[fault], notes=[cause], reason=cause)
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / "1.json").write_bytes(encode_incident(record))
    done = CliRunner().invoke(main, ["incident", str(tmp_path), "--png", str(tmp_path / "t.png")])
    assert done.exit_code == 0 and "\x1b" not in done.output and "\\x1b[2J" in done.output


@pytest.mark.parametrize("command", ["verify", "manifest"])
def test_a_name_that_would_clear_the_screen(tmp_path: Path, command: str) -> None:
    (tmp_path / "step=1\x1b[2J.ckpt").write_bytes(b"x")
    done = CliRunner().invoke(main, [command, str(tmp_path)])
    assert "\x1b" not in done.output and "\\x1b[2J" in done.output


def test_two_hundred_old_checkpoints_are_one_line_and_a_remedy(tmp_path: Path) -> None:
    reasons = {f"ckpts/step={n}.ckpt": "no manifest: not written by lastgasp, or never finished" for n in range(200)}
    reasons["ckpts/step=7.ckpt"] = "step=7.ckpt bytes 0-5: content differs from its digest"
    text = str(NoGoodCheckpoint("ckpts", reasons))
    assert len(text.splitlines()) == 5 and text.count("step=0.ckpt") == 1
    assert "199 checkpoints, ckpts/step=0.ckpt to ckpts/step=199.ckpt: no manifest" in text
    assert "step=7.ckpt bytes 0-5" in text and "lastgasp manifest DIR" in text
    assert grouped({"a": "x", "b": "x"}, " was not used") == ["a was not used: x", "b was not used: x"]
