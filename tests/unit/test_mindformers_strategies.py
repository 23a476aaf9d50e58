"""Strategy files are kept under changed names before a start overwrites them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp_mindformers.strategies import files_of, keep


def _folder(tmp_path: Path) -> Path:
    folder = tmp_path / "output" / "strategy"
    folder.mkdir(parents=True)
    for rank in (0, 1):
        (folder / f"ckpt_strategy_rank_{rank}.ckpt").write_bytes(b"strategy of %d" % rank)
    (folder / "notes_rank_0.txt").touch()
    return folder


def test_a_rank_keeps_its_own_once_for_each_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _folder(tmp_path)
    groups = tmp_path / "groups" / "group_info.pb"
    groups.parent.mkdir()
    groups.write_bytes(b"groups")
    monkeypatch.setenv("GROUP_INFO_FILE", str(groups))
    files = files_of({"output_dir": str(tmp_path / "output")}, 0)
    assert files == [folder / "ckpt_strategy_rank_0.ckpt", groups]
    home = tmp_path / "output" / "strategy.kept"
    assert keep(files, "step-4") == [
        home / "step-4" / files[0].name, tmp_path / "groups.kept" / "step-4" / groups.name,
    ]  # fmt: skip
    assert keep(files, "step-8") == []
    files[0].write_bytes(b"another")
    assert keep(files, "step-4") == [home / "step-4-1" / files[0].name]
    assert sorted(path.read_bytes() for path in home.rglob("*.ckpt")) == [b"another", b"strategy of 0"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "ckpt_strategy_rank_0.ckpt", "ckpt_strategy_rank_1.ckpt", "notes_rank_0.txt",
    ]  # fmt: skip


def test_what_is_not_there_or_cannot_be_kept_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert files_of({"output_dir": str(tmp_path / "none")}, 0) == []
    assert keep([tmp_path / "none"], "step-4") == []
    folder = _folder(tmp_path)
    folder.with_name("strategy.kept").touch()
    assert keep([folder / "ckpt_strategy_rank_0.ckpt"], "step-4") == []
    assert "could not be kept" in caplog.text
