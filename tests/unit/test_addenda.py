"""What the second side knew of a step that the first one has committed: beside it, bound to it, and put together."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.checkpoint import apply, candidates
from lastgasp.checkpoint.addenda import add, added
from support.checkpoint_kit import FILES, put_file


def hidden(directory: Path) -> list[Path]:
    """The files of additions."""
    return sorted(directory.glob(".*.more-*"))


def test_additions_of_several_ranks_are_put_together(tmp_path: Path) -> None:
    path = put_file(tmp_path, 7)
    assert added(path, FILES) == {}
    assert add(path, FILES, {1: b"one"})
    assert add(path, FILES, {2: b"two", 3: b"three"})
    assert added(path, FILES) == {1: b"one", 2: b"two", 3: b"three"}
    assert len(candidates([tmp_path], FILES)) == 1, "they are not checkpoints"


def test_another_commit_of_that_name_has_none(tmp_path: Path) -> None:
    add(put_file(tmp_path, 7), FILES, {1: b"one"})
    assert added(put_file(tmp_path, 7, b"again"), FILES) == {}


def test_without_a_manifest_nothing_is_added(tmp_path: Path) -> None:
    path = put_file(tmp_path, 7)
    FILES.manifest_path(path).unlink()
    assert not add(path, FILES, {1: b"one"})
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("at", [0, 20, -1])
def test_a_damaged_one_is_left_out_and_reported(tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    path = put_file(tmp_path, 7)
    add(path, FILES, {1: b"one"})
    [file] = hidden(tmp_path)
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert added(path, FILES) == {}
    assert "was not used" in caplog.text


def test_they_go_with_their_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        add(put_file(tmp_path, step), FILES, {1: b"one"})
    apply([tmp_path], FILES, keep=1, protected=[tmp_path / "step-00000003.ckpt"])
    assert [file.name.split(".more-")[0] for file in hidden(tmp_path)] == [".step-00000003.ckpt"]
