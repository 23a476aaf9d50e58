"""OnRequestExit, by a stand-in: what it would load over a resumed training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lastgasp_mindformers.exit_files import ExitFiles


class OnRequestExit:
    """As MindSpore's in name."""

    def __init__(self, folder: Path) -> None:
        self.train_name, self.eval_name = str(folder / "net_train"), str(folder / "net_eval")


OnRequestExit.__module__ = "mindspore.train.callback._on_request_exit"


class Other:
    """Has such a name, and is something else."""

    def __init__(self, folder: Path) -> None:
        self.train_name = str(folder / "net_train")


def test_what_it_has_left_is_out_of_its_sight_while_it_may_load(tmp_path: Path) -> None:
    files, other = ExitFiles(), Other(tmp_path)
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
