"""A trainer between two entries of `fit`, in one process; and which fits are not entered again."""

from __future__ import annotations

import logging
import random
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, LearningRateFinder
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lastgasp.adapter.torch import Unsaved
from lastgasp.gasp.again import INCARNATION
from lastgasp.pytorch import ElasticLoader
from lastgasp.pytorch.loop.kept_random import KeptRandom
from lastgasp_lightning import again
from lastgasp_lightning.kept import KeptTrainer
from lastgasp_lightning.uservalues import unsaved_study, values_of


class Net(LightningModule):
    """Raises in the validation that follows its second batch, once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.net[0].bias.requires_grad_(False)
        self.mean, self.broken, self.hooks = MeanMetric(), False, [""]

    def setup(self, stage: str) -> None:
        """Draws from the process's random state."""
        self.hooks.append(f"setup {stage} {random.random()} {torch.rand(1).item()}")

    def teardown(self, stage: str) -> None:
        """Noted."""
        self.hooks.append(f"teardown {stage}")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Squared error."""
        loss: Tensor = ((self.net(batch[0]) - 1) ** 2).mean()
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """In the middle of an evaluation, with gradients that have not been used."""
        if not self.broken:
            self.broken = True
            with torch.enable_grad():
                self.net(batch[0]).sum().backward()
            raise RuntimeError("a collective failed")
        self.log("error", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        """Plain."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Own(Callback):
    """A user's, with no state."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *args: Any) -> None:
        """Counts."""
        self.batches += 1


class Stopping(EarlyStopping):
    """As a user derives it."""

    seen = 0

    def on_train_batch_start(self, *args: Any) -> None:
        """Counts, too."""
        self.seen += 1
        self.wait_count = self.seen


def trainer_of(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    """Six batches in two epochs."""
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "val_check_interval": 2, "logger": False,
        "num_sanity_val_steps": 0, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "default_root_dir": folder, "callbacks": list(callbacks),
    }  # fmt: skip
    return Trainer(**settings | options)


def data() -> DataLoader[Any]:
    """Three batches."""
    return DataLoader(TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(1))), batch_size=4)


def look(trainer: Trainer) -> dict[str, Any]:
    """Counters and flags that a fit leaves."""
    fit: Any = trainer.fit_loop
    names = ("_restarting", "_loaded_from_state_dict", "_data_fetcher")
    found: dict[str, Any] = {name: getattr(fit, name) for name in names}
    metrics = {name: dict(getattr(trainer, name)) for name in ("callback_metrics", "logged_metrics")}
    found |= {"loops": dict(fit.state_dict()), "results": dict(fit.epoch_loop._results), "stop": trainer.should_stop}
    return {**found, **metrics}


def test_a_trainer_is_renewed_and_its_next_fit_is_that_of_a_new_one(tmp_path: Path) -> None:
    own, stopping = Own(), Stopping("error", patience=100)
    model, trainer = Net(), trainer_of(tmp_path, own, stopping)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.strategy._lightning_module = model
    before, callbacks = look(trainer), list(trainer.callbacks)  # type: ignore[attr-defined]
    random.seed(5)
    torch.manual_seed(5)
    kept, drawn = KeptTrainer(trainer, model), KeptRandom()
    with pytest.raises(RuntimeError, match="a collective failed"):
        trainer.fit(model, data(), data())
    trainer.strategy.model = model
    assert model.net[2].weight.grad is not None and not model.net.training and (stopping.seen, own.batches) == (2, 2)
    kept.renew(None)
    drawn.renew()
    assert look(trainer) == before
    assert trainer.callbacks == callbacks  # type: ignore[attr-defined]
    assert [p.grad for p in model.parameters()] == [None] * 4
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert all(module.training for module in model.net.modules())
    assert not model.mean.update_called
    assert (stopping.seen, stopping.wait_count, own.batches) == (0, 0, 2)
    assert (trainer.optimizers, trainer.lr_scheduler_configs) == ([], [])

    model.load_state_dict(weights)
    trainer.fit(model, data(), data())
    assert model.hooks[1] == model.hooks[3] and model.hooks[1].startswith(f"setup {TrainerFn.FITTING}")
    assert model.hooks[2] == model.hooks[4] == f"teardown {TrainerFn.FITTING}"
    other = Net()
    other.broken = True
    random.seed(5)
    torch.manual_seed(5)
    trainer_of(tmp_path, Own(), Stopping("error", patience=100)).fit(other, data(), data())
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
    assert stopping.seen == 6


def test_buffers_that_training_changes_and_no_checkpoint_holds_are_named() -> None:
    """A queue of features (MoCo): the fit goes on in place, where no file is read that would say so."""
    module = Net()
    module.net.register_buffer("queue", torch.zeros(3), persistent=False)
    module.net.register_buffer("mask", torch.zeros(3), persistent=False)
    notes: list[str] = []
    unsaved = Unsaved(module, [])
    session = SimpleNamespace(note=notes.append)
    run = SimpleNamespace(unsaved=unsaved, session=session, note_lost=lambda: None)
    here: Any = SimpleNamespace(run=run, steps=None)
    again.LightningAgain.before_dump(here, 5)
    assert notes == []
    module.net.queue.add_(1)  # type: ignore[operator]
    again.LightningAgain.before_dump(here, 5)
    (note,) = notes
    assert "(register_buffer(..., persistent=False)): net.queue. A rank that takes another one's place" in note


def test_a_study_that_a_callback_reports_to_is_named() -> None:
    """It begins anew, or another trial of it does: what the epochs before the fault have reported is gone."""
    callback = type("Pruning", (Callback,), {"__module__": "optuna_integration.pytorch_lightning"})
    trainer = SimpleNamespace(callbacks=[Own(), type("Adjusted", (callback,), {})()])
    assert "Optuna's study is in no checkpoint" in unsaved_study(trainer)
    assert unsaved_study(SimpleNamespace(callbacks=[Own()])) == ""


def test_a_hook_that_raises_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, trainer = Net(), trainer_of(tmp_path)
    kept = KeptTrainer(trainer, model)
    with pytest.raises(RuntimeError, match="a collective failed"):
        trainer.fit(model, data(), data())

    def teardown(stage: str) -> None:
        raise ValueError("a bug of the user's")

    model.teardown = teardown  # type: ignore[method-assign]
    trainer.strategy.model = model
    kept.renew(None)
    assert "a teardown hook raised" in caplog.text
    assert trainer.global_step == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "its strategy is SingleDeviceStrategy"),
        ({"devices": 2, "strategy": "ddp"}, "no launcher of lastgasp's"),
        ({"devices": 2, "strategy": "ddp", "profiler": "advanced"}, "a profiler is on (AdvancedProfiler)"),
        ({"devices": 2, "strategy": "ddp", "profiler": "simple"}, ""),
        ({"devices": 2, "strategy": "ddp", "callbacks": [LearningRateFinder()]}, "LearningRateFinder tunes"),
        ({"devices": 2, "strategy": "ddp"}, ""),
    ],
)
def test_what_cannot_be_entered_again_is_told(
    options: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not why.startswith("no launcher"):
        monkeypatch.setenv("LASTGASP_LAUNCHER", "1")
    else:
        monkeypatch.delenv("LASTGASP_LAUNCHER", raising=False)
    trainer = trainer_of(tmp_path, **options)
    assert isinstance(trainer.strategy, DDPStrategy) == ("devices" in options)
    found = again.cannot(trainer, LightningModule())
    assert found.startswith(why) and bool(found) == bool(why)


@pytest.mark.parametrize(("asked", "level"), [(True, logging.WARNING), (False, logging.INFO)])
def test_who_has_not_asked_is_not_warned(
    asked: bool, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    caplog.set_level(logging.DEBUG, "lastgasp")
    again.tell("its loops are not Lightning's own", asked)
    assert [one.levelno for one in caplog.records if "loops" in one.message] == [level]


@pytest.mark.parametrize(
    ("strategy", "launcher", "asked", "found"),
    [
        ("ddp", "run", None, "auto"),
        ("ddp", "run", "restart", "restart"),
        ("ddp", "", None, "restart"),
        ("ddp", "", "auto", "auto"),
        (DDPStrategy(process_group_backend="nccl"), "run", None, "restart"),
        (DDPStrategy(process_group_backend="nccl"), "run", "retry", "retry"),
        (ModelParallelStrategy(2, 1), "run", None, "auto"),
        (ModelParallelStrategy(2, 1), "", None, "restart"),
        (ModelParallelStrategy(2, 1, process_group_backend="nccl"), "run", None, "restart"),
        ("ddp_spawn", "run", None, "auto"),
        ("auto", "run", None, "restart"),
    ],
)
def test_the_default_is_that_of_device_and_groups(
    strategy: Any, launcher: str, asked: Any, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTGASP_LAUNCHER", launcher)
    trainer = trainer_of(tmp_path, strategy=strategy, devices=1 if strategy == "auto" else 2)
    assert again.recovery_for(trainer, asked) == found


def test_mindio_is_told_of_fewer_ranks_unless_the_loader_is_known_to_be_another(tmp_path: Path) -> None:
    """A module and a datamodule give theirs when MindIO has been told."""
    ddp, alone = trainer_of(tmp_path, devices=2, strategy="ddp"), trainer_of(tmp_path)
    samples = TensorDataset(torch.ones(8, 1))
    elastic = ElasticLoader(samples, torch.nn.Linear(1, 1), batch_size=2, ranks=2, seed=1)
    assert again.may_have_fewer(ddp) and again.may_have_fewer(ddp, elastic)
    assert again.may_have_fewer(ddp, datamodule=LightningDataModule())
    assert not again.may_have_fewer(ddp, DataLoader(samples)) and not again.may_have_fewer(alone)


def test_a_config_that_was_saved_is_not_saved_by_a_new_process() -> None:
    parser = MagicMock()
    callback = SaveConfigCallback(parser, MagicMock())
    again._done_before([Own(), callback])
    callback.setup(MagicMock(), MagicMock(), "fit")
    parser.save.assert_not_called()


def test_the_configuration_of_a_cli_is_nothing_that_a_step_changes(tmp_path: Path) -> None:
    """Else each recovery in place of a LightningCLI notes that it may have the repeated step twice."""
    callback = SaveConfigCallback(MagicMock(), Namespace(fit=Namespace(seed=1)))
    trainer = trainer_of(tmp_path, callback)
    trainer.strategy._lightning_module = Net()
    values = values_of(trainer)
    values.take()
    assert values.note() == ""


def test_a_step_that_ddp_never_came_to_does_not_stay_in_the_place_of_forward(tmp_path: Path) -> None:
    """Lightning redirects `forward` to a step; a peer's death is raised by DDP before: `self(x)` would be the step."""
    module = Net()
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    trainer.strategy._lightning_module = module
    kept = KeptTrainer(trainer, module)

    class Raises(nn.Module):
        """As DDP, when a peer is gone."""

        def forward(self, *args: Any) -> None:
            raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        trainer.strategy._forward_redirection(Raises(), module, "training_step", [torch.ones(2, 4)], 0)
    assert vars(module)["forward"] != Net.forward
    kept._renew_module()
    assert "forward" not in vars(module)


def test_a_start_with_fewer_hosts_than_the_trainer_asks_for_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--nnodes MIN:MAX` restarts with those that are there."""
    again.watch_fits("auto")
    environment = TorchElasticEnvironment()
    for name, value in {"WORLD_SIZE": "1", "LASTGASP_LAUNCHER": "run"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(INCARNATION, raising=False)
    with pytest.raises(ValueError, match=r"does not match the world size .*--min-ranks and --nnodes 2, not MIN:MAX"):
        environment.validate_settings(num_devices=1, num_nodes=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"does not match the world size \(4\)\.?$"):
        environment.validate_settings(num_devices=1, num_nodes=2)
    monkeypatch.setenv(INCARNATION, "1")
    environment.validate_settings(num_devices=1, num_nodes=2)
