"""Hugging Face's Trainer on one device, in this process: from what it resumes, and what it does then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

import torch
from click.testing import CliRunner
from transformers import TrainerCallback

from frameworks.transformers_rig import Breaks, new_process, outcome, trainer
from lastgasp.cli import main
from lastgasp.testing.faults import InjectedFault
from lastgasp_transformers import LastGasp

pytestmark = [pytest.mark.usefixtures("restored_environ", "first_training"), pytest.mark.timeout(300)]


@pytest.fixture
def first_training() -> None:
    """Of its script, whatever other tests have trained."""
    new_process()


class StopsInEvaluation(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Raises in an evaluation, before the save of that step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Raise once."""
        if state.global_step == self._step:
            self._step = -1
            raise InjectedFault("between the evaluation and the save")


def _differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in {**one, **other} if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What a Trainer without lastgasp comes to."""
    one = trainer(tmp_path_factory.mktemp("plain"))
    return outcome(one, one.train().training_loss)


def test_a_save_that_was_due_is_done_in_another_directory(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Of a checkpoint named by its path. What was saved anew can be resumed from just as well."""
    trainer(tmp_path / "a", LastGasp()).train()
    one = trainer(tmp_path / "b", LastGasp(), Breaks(4))
    with pytest.raises(InjectedFault):
        one.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-4"))
    (tmp_path / "a").rename(tmp_path / "gone")
    new_process()
    found = trainer(tmp_path / "b", LastGasp())
    assert _differences(outcome(found, found.train().training_loss), undisturbed) == []
    listed = CliRunner().invoke(main, ["verify", str(tmp_path / "b")])
    assert listed.exit_code == 0, listed.output
    assert "checkpoint-4" in listed.output


def test_a_good_checkpoint_is_not_written_over_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(InjectedFault):
        trainer(tmp_path / "link", LastGasp(), Breaks(4)).train()
    before = (tmp_path / "a/checkpoint-4/model.safetensors").stat().st_mtime_ns
    new_process()
    one = trainer(tmp_path / "link", LastGasp(), Breaks(4))
    with pytest.raises(InjectedFault):
        one.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-4"))
    assert (tmp_path / "a/checkpoint-4/model.safetensors").stat().st_mtime_ns == before


def test_a_further_training_resumes_where_its_save_was_due(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Its gasp is in fit-1, and Trainer saves in output_dir."""
    trainer(tmp_path, LastGasp(), max_steps=1).train()
    other = trainer(tmp_path, LastGasp(), StopsInEvaluation(4))
    with pytest.raises(InjectedFault):
        other.train()
    assert (tmp_path / "fit-1/checkpoint-4/lastgasp.pt").exists()
    assert _differences(outcome(other, other.train().training_loss), undisturbed) == []
