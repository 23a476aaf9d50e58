"""Files of training that no layout explains: no directory with such is an empty one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lastgasp.adapter import CheckpointSelector, SelectionPolicy
from lastgasp.checkpoint import DirectoryLayout, SingleFile
from lastgasp.checkpoint.manifest import Fit
from lastgasp.checkpoint.unknown import all_of_training, unknown
from lastgasp.config import GaspConfig
from lastgasp.errors import NoGoodCheckpoint
from lastgasp.topology import Place, data_parallel

LAYOUT = SingleFile(".ckpt")
ITERATIONS = DirectoryLayout("iter_*")


def lay(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


@pytest.mark.parametrize(
    "name",
    ["step=00000012.pt", "gasp-step=00000012.pt", "epoch_3.pth", "checkpoint-500/model.safetensors",
     "iter_0000010/mp_rank_00/model_optim_rng.pt", "saved/__0_0.distcp", "dcp/.metadata", "__0_0.distcp", ".metadata",
     "latest_checkpointed_iteration.txt", "Epoch12-model.tar"],
)  # fmt: skip
def test_what_looks_like_training_is(tmp_path: Path, name: str) -> None:
    lay(tmp_path, name)
    assert list(unknown([tmp_path], LAYOUT)) == [str(tmp_path / name.split("/")[0])]


@pytest.mark.parametrize(
    "name",
    ["final.pt", "model_best.pth", "data.bin", "step=3.ckpt", "step-4.ckpt.corrupt", "config.yaml", "epoch=1.txt",
     "incidents/step-3.json", "profiling/x/0/1", "lightning_logs/version_0/metrics.csv", "notes/epoch_1.pt"],
)  # fmt: skip
def test_what_is_the_users_own_is_not(tmp_path: Path, name: str) -> None:
    lay(tmp_path, name)
    assert unknown([tmp_path, tmp_path / "not there"], LAYOUT) == {}


def test_other_layouts_are_each_others_unknowns(tmp_path: Path) -> None:
    lay(tmp_path, "epoch=0-step=5.ckpt", "iter_0000005/__0_0.distcp")
    assert list(unknown([tmp_path], ITERATIONS)) == [str(tmp_path / "epoch=0-step=5.ckpt")]
    assert len(all_of_training([tmp_path], LAYOUT)) == 2


def selected(
    folder: Path, resume: str = "auto", attempt: int = 0, fit: int | None = None, instead: bool = False
) -> object:
    """What a job of one rank starts from."""
    place = Place(rank=0, world_size=1, replicas=data_parallel(1), job="job", attempt=attempt)
    config = GaspConfig.resolve(folder, resume=resume)
    number = Fit(number=fit) if fit is not None else None
    policy = SelectionPolicy(config, place, [folder], LAYOUT, fit=number, instead=instead)
    return CheckpointSelector(policy, lambda tag, payload: [payload]).select()


def test_a_start_from_scratch_over_them_is_refused(tmp_path: Path) -> None:
    assert selected(tmp_path) is None, "an empty directory"
    lay(tmp_path, "epoch_3.pth")
    with pytest.raises(NoGoodCheckpoint, match=r"(?s)epoch_3.pth: is named like weights of a step.*resume='never'"):
        selected(tmp_path)
    assert selected(tmp_path, instead=True) is None, "the user gave something to start from"
    assert selected(tmp_path, fit=1) is None, "the script has trained before, and may have saved it"


def test_a_restart_of_the_job_that_made_them_is_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lay(tmp_path, "epoch_3.pth")
    assert selected(tmp_path, attempt=1) is None
    assert "training begins from scratch again: 1 files" in caplog.text


def test_never_says_over_what_it_begins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lastgasp")
    assert selected(tmp_path, "never") is None
    assert caplog.text == ""
    lay(tmp_path, "epoch=0-step=5.ckpt", "epoch_3.pth")
    assert selected(tmp_path, "never") is None
    assert "resume='never': training begins from scratch; 2 checkpoints or files of training stay" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=5.ckpt", "epoch_3.pth"]
