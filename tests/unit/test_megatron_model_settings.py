"""--use-checkpoint-args: settings come from a checkpoint that can be read, or the job does not end well."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'lastgasp[megatron]'")

from torch.distributed.checkpoint.api import CheckpointException

from lastgasp_megatron.exits import NotLoaded
from lastgasp_megatron.model_settings import around_load_args
from lastgasp_megatron.tracker import NAME


@pytest.fixture(autouse=True)
def _megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in which `load_args` below looks the tracker's name up, as Megatron does."""
    package, module = ModuleType("megatron.training"), ModuleType("megatron.training.checkpointing")
    vars(module)["get_checkpoint_tracker_filename"] = lambda folder: f"{folder}/{NAME}"
    vars(package)["checkpointing"] = module
    for name, one in {"megatron": ModuleType("megatron"), package.__name__: package, module.__name__: module}.items():
        monkeypatch.setitem(sys.modules, name, one)


def load_args(args: Any, load_arg: str = "load") -> str:
    """As Megatron's: the settings, or an exit with code 0."""
    module: Any = sys.modules["megatron.training.checkpointing"]
    tracker = Path(module.get_checkpoint_tracker_filename(getattr(args, load_arg)))
    if not tracker.exists() and not args.ckpt_step:
        return "the user's"
    if not tracker.read_text().isdigit():
        sys.exit()
    settings = Path(getattr(args, load_arg), f"iter_{args.ckpt_step or int(tracker.read_text()):07d}", "settings")
    if settings.read_text() == "damaged":
        sys.exit()
    if settings.read_text() == "damaged torch_dist":
        raise CheckpointException("metadata is None", {})
    return settings.read_text()


def stored(directory: Path, tracker: str | None = "20", *, newest: str = "of 20", older: str = "of 10") -> Path:
    for step, text in ((10, older), (20, newest)):
        path = directory / f"iter_{step:07d}"
        path.mkdir()
        (path / "settings").write_text(text)
    if tracker is not None:
        (directory / NAME).write_text(tracker)
    return directory


def settings(directory: Path, ckpt_step: int | None = None, load_arg: str = "load") -> Any:
    given = SimpleNamespace(**{load_arg: str(directory), "ckpt_step": ckpt_step})
    return around_load_args(load_args, (given,), {"load_arg": load_arg})


def test_those_of_the_newest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert settings(stored(tmp_path)) == "of 20"
    assert settings(tmp_path, ckpt_step=10) == "of 10" and not caplog.text


@pytest.mark.parametrize("newest", ["damaged", "damaged torch_dist"])
def test_what_cannot_be_read_is_passed_over(
    newest: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert settings(stored(tmp_path, newest=newest)) == "of 10"
    assert "the model's settings are taken from" in caplog.text and "iter_0000010" in caplog.text


@pytest.mark.parametrize("tracker", ["", None, "30"])
def test_so_is_a_tracker_that_names_nothing(tracker: str | None, tmp_path: Path) -> None:
    assert settings(stored(tmp_path, tracker)) == "of 20"


@pytest.mark.parametrize(("ckpt_step", "older"), [(None, "damaged"), (20, "of 10")])
def test_where_there_is_no_other_it_is_a_failure(ckpt_step: int | None, older: str, tmp_path: Path) -> None:
    with pytest.raises(NotLoaded):
        settings(stored(tmp_path, newest="damaged", older=older), ckpt_step)


def test_a_start_without_checkpoints_is_megatrons_own_business(tmp_path: Path) -> None:
    assert settings(tmp_path) == "the user's"
    with pytest.raises(NotLoaded):
        settings(stored(tmp_path, newest="damaged"), load_arg="pretrained_checkpoint")
