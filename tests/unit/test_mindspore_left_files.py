"""OnRequestExit and BackupAndRestore, by stand-ins: what they would load over a resumed training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lastgasp_mindformers.left_files import LeftFiles


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
    assert files.hide([other, one]) == [] and vars(one) == before
    for name in ("net_train", "net_eval"):
        (tmp_path / f"{name}.ckpt").touch()
    told = [f"{tmp_path}/net_train.ckpt", f"{tmp_path}/net_eval.ckpt"]
    for _ in range(2):  # twice without a word in between
        assert files.hide([other, one]) == told
        assert not any(Path(f"{path}.ckpt").exists() for path in vars(one).values())
    assert Path(f"{other.train_name}.ckpt").exists()
    for _ in range(2):
        files.show()
        assert vars(one) == before


def test_a_backup_is_out_of_sight_too(tmp_path: Path) -> None:
    files, one = LeftFiles(), BackupAndRestore(tmp_path)
    assert files.hide([one]) == []
    (tmp_path / "backup.ckpt").touch()
    assert files.hide([one]) == [f"{tmp_path}/backup.ckpt"] and not Path(one.backup_file).exists()
    files.show()
    assert one.backup_file == str(tmp_path / "backup.ckpt")
