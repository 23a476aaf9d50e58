"""Both sides of a cut network may save one step: whoever commits first is believed, and is never replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lastgasp.checkpoint import Manifest, Provenance, Staged, candidates, verify
from lastgasp.checkpoint.manifest import Fit
from support.checkpoint_kit import FILES, FOLDERS, provenance, put_folder

FIRST, SECOND = b"of the cut-off side " * 100, b"of the controller's side " * 100


def commit(path: Path, data: bytes, stood: frozenset[str] | None = frozenset(), **about: Any) -> Staged:
    """Commit step 7 at `path`; `about` changes its provenance."""
    made_by = Provenance(**{"format": "test", "step": 7, "kind": "gasp", "job": "job", "attempt": 1, **about})
    with Staged(path, FILES) as staged:
        staged.open().write(data)
        staged.publish(made_by, present=stood)
    return staged


def test_the_second_of_one_attempt_keeps_the_first(tmp_path: Path) -> None:
    path = tmp_path / "gasp.ckpt"
    first, second = commit(path, FIRST), commit(path, SECOND)
    assert path.read_bytes() == FIRST
    assert verify(path, FILES).ok
    assert first.kept == ""
    assert "step 7 had been committed already, by process" in second.kept
    assert "gasp.ckpt is kept as it is" in second.kept


@pytest.mark.parametrize(
    "about", [{"attempt": 0}, {"job": "another"}, {"step": 6}, {"kind": "periodic"}, {"fit": Fit(number=1)}]
)
def test_what_is_not_of_this_attempt_is_replaced(tmp_path: Path, about: dict[str, Any]) -> None:
    path = tmp_path / "gasp.ckpt"
    commit(path, FIRST, **about)
    assert commit(path, SECOND).kept == ""
    assert path.read_bytes() == SECOND


def test_what_stood_there_when_the_attempt_began_is_replaced(tmp_path: Path) -> None:
    """A new run of the same name in the same directory (`resume="never"`) saves the step again."""
    path = tmp_path / "gasp.ckpt"
    commit(path, FIRST)
    [old] = candidates([tmp_path], FILES)
    assert isinstance(old.manifest, Manifest)
    assert commit(path, SECOND, frozenset([old.manifest.self_digest])).kept == ""
    assert path.read_bytes() == SECOND


def test_what_is_incomplete_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "gasp.ckpt"
    commit(path, FIRST)
    path.write_bytes(FIRST[:-1])
    assert commit(path, SECOND).kept == ""
    assert path.read_bytes() == SECOND


def test_without_a_memory_of_the_start_the_last_one_wins(tmp_path: Path) -> None:
    """Periodic checkpoints (`last.ckpt`) are written over."""
    path = tmp_path / "last.ckpt"
    commit(path, FIRST, None)
    commit(path, SECOND, None)
    assert path.read_bytes() == SECOND


def test_of_directories_the_first_is_kept_too_and_is_named(tmp_path: Path) -> None:
    path = put_folder(tmp_path, 7)
    with Staged(path, FOLDERS) as staged:
        staged.open(f"{path.name}/common.pt").write(SECOND)
        staged.publish(provenance(7), aside=True)
    assert "step 7 had been committed already" in staged.kept
    assert (path / "common.pt").read_bytes() == b"common"


@pytest.mark.parametrize("how", ["older", "incomplete"])
def test_a_directory_that_is_no_commit_of_this_attempt_is_not_kept(how: str, tmp_path: Path) -> None:
    """Training began before that step although it stood there: it was damaged, could not be read, or was not wanted."""
    path = put_folder(tmp_path, 7)
    [old] = candidates([tmp_path], FOLDERS)
    assert isinstance(old.manifest, Manifest)
    present = {old.manifest.self_digest} if how == "older" else set()
    if how == "incomplete":
        next(file for file in sorted(path.rglob("*")) if file.is_file() and file.name != "common.pt").unlink()
    with Staged(path, FOLDERS) as staged:
        staged.open(f"{path.name}/common.pt").write(SECOND)
        staged.publish(provenance(7), aside=True, present=present)
    assert staged.kept == ""
    assert (path / "common.pt").read_bytes() == SECOND
    assert verify(path, FOLDERS).ok
    assert [one for one in tmp_path.iterdir() if one.name.startswith(".") and one.is_dir()], "it is moved, not removed"
