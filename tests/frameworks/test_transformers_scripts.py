"""What scripts do around Hugging Face's Trainer, on one device in this process: it resumes as plain Trainer does."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

import torch
from transformers import Trainer, TrainerCallback

from frameworks.transformers_rig import Breaks, new_process, outcome, trainer
from lastgasp.checkpoint import verify
from lastgasp.errors import ConfigError
from lastgasp.testing.faults import InjectedFault
from lastgasp_transformers import LastGasp, state
from lastgasp_transformers.files import LAYOUT

pytestmark = [pytest.mark.usefixtures("restored_environ", "first_training"), pytest.mark.timeout(300)]


@pytest.fixture
def first_training() -> None:
    """Of its script, whatever other tests have trained."""
    new_process()


def _differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in {**one, **other} if not torch.equal(one[name], other[name])]


def _trained(one: Trainer, **given: Any) -> dict[str, torch.Tensor]:
    return outcome(one, one.train(**given).training_loss)


class Peeks(Trainer):  # type: ignore[misc,unused-ignore]
    """Counts its steps in a loader that nobody trains on."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """After Trainer has made its own loader."""
        assert len(self.get_train_dataloader()) == 6
        return super().create_scheduler(num_training_steps, optimizer)


class PeeksFirst(Trainer):  # type: ignore[misc,unused-ignore]
    """The same before Trainer makes its own."""

    def _inner_training_loop(self, *args: Any, **options: Any) -> Any:
        assert len(self.get_train_dataloader()) == 6
        return super()._inner_training_loop(*args, **options)


@pytest.mark.parametrize("kind", [Peeks, PeeksFirst])
def test_the_loader_that_is_trained_is_the_one_that_is_resumed(tmp_path: Path, kind: type[Trainer]) -> None:
    expected = _trained(trainer(tmp_path / "plain", kind=kind))
    with pytest.raises(InjectedFault):
        trainer(tmp_path / "d", LastGasp(), Breaks(5), kind=kind).train()
    new_process()
    assert _differences(_trained(trainer(tmp_path / "d", LastGasp(), kind=kind)), expected) == []


class Averages(torch.optim.Optimizer):
    """As a schedule-free one: `eval` puts other weights into the model, `train` takes them out."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "train_mode": True})

    def _swap(self, mode: bool) -> None:
        for group in self.param_groups:
            for one in group["params"] if group["train_mode"] != mode else ():
                if (other := self.state[one].get("other")) is not None:
                    kept = one.detach().clone()
                    one.data.copy_(other)
                    other.copy_(kept)
            group["train_mode"] = mode

    def train(self) -> None:
        """Trainer calls it."""
        self._swap(True)

    def eval(self) -> None:
        """As well."""
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Of the weights, and of their average."""
        for group in self.param_groups:
            for one in group["params"]:
                one.add_(one.grad, alpha=-group["lr"])
                self.state[one].setdefault("other", one.detach().clone()).lerp_(one, 0.3)


def _with(optimizer: Any, folder: Path, *callbacks: Any, **changed: Any) -> Trainer:
    one = trainer(folder, *callbacks, **changed)
    one.optimizer = optimizer(one.model.parameters())
    inner = getattr(one.optimizer, "optimizer", one.optimizer)
    one.lr_scheduler = torch.optim.lr_scheduler.StepLR(inner, 4)
    return one


def test_a_schedule_free_optimizer_goes_on_with_the_weights_that_it_trains(tmp_path: Path) -> None:
    """Trainer saves the others, which it has just evaluated."""
    expected = _trained(_with(Averages, tmp_path / "plain"))
    _with(Averages, tmp_path / "d", LastGasp(), max_steps=4).train()
    new_process()
    assert _differences(_trained(_with(Averages, tmp_path / "d", LastGasp())), expected) == []


class Adds(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Writes beside the weights when they are saved, and removes what is of no use to it."""

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """What was measured."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        (folder / "metrics.json").write_text("{}")
        (folder / "training_args.bin").unlink(missing_ok=True)


@pytest.mark.parametrize("after", [8, 9])
def test_files_that_a_callback_adds_or_removes_cost_no_checkpoint(tmp_path: Path, after: int) -> None:
    expected = _trained(trainer(tmp_path / "plain"))
    with pytest.raises(InjectedFault):
        trainer(tmp_path / "d", Adds(), LastGasp(), Breaks(after)).train()
    for path in (tmp_path / "d").glob("checkpoint-[0-9]"):  # of the gasp, too
        (path / "evaluated.json").touch()
    new_process()
    assert _differences(_trained(trainer(tmp_path / "d", Adds(), LastGasp())), expected) == []


def test_a_gasp_with_an_added_file_is_resumed_where_its_save_was_due(tmp_path: Path) -> None:
    class Breaking(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            raise InjectedFault("before the save")

    with pytest.raises(InjectedFault):
        trainer(tmp_path, LastGasp(), Breaking()).train()
    (tmp_path / "checkpoint-4/notes.txt").touch()
    new_process()
    one = trainer(tmp_path, LastGasp(), Breaks(6))
    with pytest.raises(InjectedFault):
        one.train()
    assert one.state.global_step == 6


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "adapter/adapter_model.safetensors", "scaler.pt", "optimizer.bin", "rng_state_1.pth"]
)
def test_an_added_file_that_trainer_would_load_is_damage(tmp_path: Path, name: str) -> None:
    trainer(tmp_path, LastGasp(), max_steps=4).train()
    (tmp_path / "checkpoint-4/metrics.json").touch()
    assert verify(tmp_path / "checkpoint-4", LAYOUT).ok
    (tmp_path / "checkpoint-4/training_args.bin").unlink()
    assert verify(tmp_path / "checkpoint-4", LAYOUT).ok
    added = tmp_path / "checkpoint-4" / name
    added.parent.mkdir(exist_ok=True)
    added.touch()
    assert [one.kind for one in verify(tmp_path / "checkpoint-4", LAYOUT).damages] == ["foreign"]
