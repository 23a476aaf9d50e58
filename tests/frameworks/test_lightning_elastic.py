"""A fit over an `ElasticLoader` in one process, which does all micro-batches: what a step is, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("lightning")

import lightning as L
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision

from frameworks.fit_rig import Boom, Strike, data
from lastgasp.errors import ConfigError, UsageError
from lastgasp.pytorch import ElasticLoader, newest_good
from lastgasp.pytorch.elastic.plan import Plan
from lastgasp_lightning import LastGasp
from support import logged

SIZE = 22
"""Two steps of eight samples, and one of six."""


class Net(L.LightningModule):
    """Notes what is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)
        self.settings = {"batch_size": 2, "ranks": 4, "seed": 3} | settings
        self.calls: list[str] = []
        self.options: dict[str, Any] = {}

    def train_dataloader(self) -> Any:
        return ElasticLoader(data(size=SIZE), self, **self.settings)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.calls.append(f"train {len(batch[0])}")
        loss: Tensor = ((self.net(batch[0]) - batch[1]) ** 2).mean()
        self.log("loss", loss, **self.options)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("zero")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("moved")
        return batch

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(f"end {len(batch)}")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, model: Net, *callbacks: L.Callback, resume: str | None = None, **options: Any) -> L.Trainer:
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 2, "enable_model_summary": False, "logger": False,
        "enable_progress_bar": False, "enable_checkpointing": False, "log_every_n_steps": 1,
    }  # fmt: skip
    trainer = L.Trainer(callbacks=[*callbacks, LastGasp(folder, resume=resume)], **(settings | options))
    trainer.fit(model)
    return trainer


def by_hand(epochs: int) -> Tensor:
    """The weights that plain gradient descent over the same samples ends with."""
    plan, rows = Plan(samples=SIZE, batch_size=2, ranks=4, seed=3), data(size=SIZE)
    net = Net().net
    for epoch in range(epochs):
        order = plan.order(epoch)
        for begin in range(0, SIZE, 8):
            x, y = (torch.stack(column) for column in zip(*(rows[n] for n in order[begin : begin + 8]), strict=True))
            net.zero_grad()
            ((net(x) - y) ** 2).mean().backward()
            with torch.no_grad():
                for p in net.parameters():
                    assert p.grad is not None
                    p.sub_(0.1 * p.grad)
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_a_batch_of_lightnings_is_a_step_of_all_ranks(tmp_path: Path) -> None:
    model = Net()
    trainer = fit(tmp_path / "d", model, logger=CSVLogger(tmp_path / "logs"))
    assert (trainer.global_step, trainer.num_training_batches) == (6, 3)
    assert model.calls[:10] == ["zero", *["moved", "train 2"] * 4, "end 4"]
    assert [one for one in model.calls if one.startswith("train")][8:12] == ["train 2", "train 1"] * 2
    found = torch.cat([p.detach().flatten() for p in model.net.parameters()])
    torch.testing.assert_close(found, by_hand(2))
    rows = logged.rows(tmp_path / "logs")
    assert [row["step"] for row in rows if "loss" in row] == ["0", "1", "2", "3", "4", "5"]
    assert len([row for row in rows if "epoch_loss" in row]) == 2


def test_a_resumed_fit_uses_each_sample_once(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        fit(tmp_path / "d", Net(canonical=True), Strike(4))
    path = newest_good(tmp_path / "d")
    assert path is not None
    used = torch.load(path, weights_only=False)["lastgasp"]["elastic"]
    assert (used["steps"], used["samples"]) == (4, SIZE + 8)
    resumed, whole = Net(canonical=True), Net(canonical=True)
    fit(tmp_path / "d", resumed, resume=str(path))
    fit(tmp_path / "other", whole)
    ends = [[one for one in net.calls if one.startswith("end")] for net in (resumed, whole)]
    assert ends[0] == ends[1] == ["end 4"] * len(ends[1])
    assert all(map(torch.equal, resumed.parameters(), whole.parameters()))


def test_what_a_rank_accumulates_for_itself_does_not_depend_on_how_many_ranks_there_are(tmp_path: Path) -> None:
    model = Net()
    model.options = {"on_step": True, "on_epoch": True}
    fit(tmp_path / "d", model, logger=CSVLogger(tmp_path / "logs"), max_epochs=1)
    rows = logged.rows(tmp_path / "logs")
    steps = [float(row["loss_step"]) for row in rows if "loss_step" in row]
    [found] = [float(row["loss_epoch"]) for row in rows if "loss_epoch" in row]
    sizes = (2, 2, 1)  # of the first micro-batch of each step
    assert found == pytest.approx(sum(n * one for n, one in zip(sizes, steps, strict=True)) / 5)


@pytest.mark.parametrize(
    ("settings", "options", "field"),
    [
        ({}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ({"batch": "scaled"}, {}, "batch"),
        ({"ranks": SIZE + 1}, {}, "dataset"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], options: dict[str, Any], field: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{field}.*with an ElasticLoader"):
        fit(tmp_path, Net(**settings), **options)


def test_other_models_and_loaders_are_refused(tmp_path: Path) -> None:
    model = Net()
    vars(model)["train_dataloader"] = lambda: ElasticLoader(data(size=SIZE), model.net, 2, 4)
    with pytest.raises(ConfigError, match="Give it self"):
        fit(tmp_path, model)
    vars(model)["train_dataloader"] = lambda: [ElasticLoader(data(size=SIZE), model, 2, 4), DataLoader(data())]
    with pytest.raises(ConfigError, match="the ElasticLoader alone"):
        fit(tmp_path, model)
    model = Net()
    model.automatic_optimization = False
    with pytest.raises(ConfigError, match="automatic_optimization"):
        fit(tmp_path, model)


@pytest.mark.parametrize("given", [{"sync_dist": True}, {"sync_dist": True, "on_epoch": True}])
def test_ranks_do_not_meet_within_a_micro_batch(given: dict[str, Any], tmp_path: Path) -> None:
    model = Net()
    model.options = given
    with pytest.raises(UsageError, match="within training_step"):
        fit(tmp_path, model)


def test_a_closure_is_called_once(tmp_path: Path) -> None:
    model = Net()
    vars(model)["configure_optimizers"] = lambda: torch.optim.LBFGS(model.parameters(), max_iter=2)
    with pytest.raises(UsageError, match="LBFGS"):
        fit(tmp_path, model)


def test_an_update_that_the_scaler_skips_ends_nothing(tmp_path: Path) -> None:
    """Its first scale is too large for most losses."""
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    trainer = fit(tmp_path, model, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    assert trainer.current_epoch == 2 and scaler.get_scale() < 2.0**127


def test_gradients_that_the_module_keeps_are_refused(tmp_path: Path) -> None:
    model = Net()
    vars(model)["optimizer_zero_grad"] = lambda *args: None
    vars(model)["optimizer_step"] = lambda epoch, batch_idx, optimizer, closure: closure()
    with pytest.raises(UsageError, match="no update has used them"):
        fit(tmp_path, model)


def test_accumulation_that_begins_later_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="accumulate_grad_batches"):
        fit(tmp_path, Net(), GradientAccumulationScheduler({1: 2}))


def test_without_last_gasp_nothing_is_trained(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(UsageError, match="LastGasp among the callbacks"):
        trainer.fit(Net())
