"""OnRequestExit and BackupAndRestore, by stand-ins: what they would load over a resumed training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lastgasp_mindformers.left_files import LeftFiles
from support.mindspore_files import state, write


class OnRequestExit:
    """As MindSpore's in name."""

    def __init__(self, folder: Path) -> None:
        self.train_name, self.eval_name = str(folder / "net_train"), str(folder / "net_eval")


OnRequestExit.__module__ = "mindspore.train.callback._on_request_exit"


class BackupAndRestore:
    """As MindSpore's in name."""

    def __init__(self, folder: Path) -> None:
        self.backup_file = str(folder / "backup.ckpt")


BackupAndRestore.__module__ = "mindspore.train.callback._backup_and_restore"


class Other:
    """Has such a name, and is something else."""

    def __init__(self, folder: Path) -> None:
        self.train_name = str(folder / "net_train")


def test_what_it_has_left_is_out_of_its_sight_while_it_may_load(tmp_path: Path) -> None:
    files, other = LeftFiles(), Other(tmp_path)
    one: Any = OnRequestExit(tmp_path)
    before = dict(vars(one))
    assert files.hide([other, one], 2) == [] and vars(one) == before
    for name in ("net_train", "net_eval"):
        (tmp_path / f"{name}.ckpt").touch()
    for _ in range(2):  # twice without a word in between
        told = files.hide([other, one], 2)
        assert "/net_train.ckpt over step 2" in told[0] and "/net_eval.ckpt over step 2" in told[1]
        assert not any(Path(f"{path}.ckpt").exists() for path in vars(one).values())
    assert Path(f"{other.train_name}.ckpt").exists()
    for _ in range(2):
        files.show()
        assert vars(one) == before


@pytest.mark.parametrize(
    ("holds", "evaluation", "newer"), [(1, False, False), (2, False, False), (16, False, True), (16, True, False)]
)
def test_what_is_newer_is_kept_from_the_next_save(tmp_path: Path, holds: int, evaluation: bool, newer: bool) -> None:
    files, one = LeftFiles(), OnRequestExit(tmp_path)
    data = write(tmp_path / "net_train.ckpt", state(holds, 1)).read_bytes()
    (told,) = files.hide([one], 2, evaluation=evaluation)
    assert not Path(f"{one.train_name}.ckpt").exists() and ("step 16, which is newer" in told) is newer
    files.show()
    kept = tmp_path / ("net_train.ckpt.step-16" if newer else "net_train.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == [kept.name] and kept.read_bytes() == data


def test_a_backup_is_out_of_sight_too(tmp_path: Path) -> None:
    files, one = LeftFiles(), BackupAndRestore(tmp_path)
    assert files.hide([one], 2) == []
    (tmp_path / "backup.ckpt").touch()
    (told,) = files.hide([one], 2)
    assert f"{tmp_path}/backup.ckpt over step 2" in told and not Path(one.backup_file).exists()
    files.show()
    assert one.backup_file == str(tmp_path / "backup.ckpt")
