"""Manual optimization: what is saved when a fault comes between two updates of one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from frameworks.fit_rig import AsOneOfSeveral, Boom, Job, fit, gasp_of, seed, weights
from lastgasp.pytorch.aux_state import decode_aux
from lastgasp_lightning.extra import split_extra
from support.launchers import incidents


class Gan(L.LightningModule):
    """Two optimizers and a schedule in turn; raises in its fourth batch, behind so many updates."""

    def __init__(self, raises: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization, self.raises = False, raises
        self.one = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
        self.two = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1), nn.Dropout(0.3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        schedules: Any = self.lr_schedulers()
        for number, (optimizer, schedule) in enumerate(zip(optimizers, schedules, strict=True)):
            if batch_idx == 3 and self.raises == number:
                raise Boom
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = self.two(self.one(batch[0]) + torch.randn(1)).pow(2).mean()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            schedule.step()
            self.log(f"loss-{number}", loss, on_epoch=True)
        if batch_idx == 3 and self.raises == 2:
            raise Boom

    def configure_optimizers(self) -> Any:
        found = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.one, self.two)]
        return found, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in found]


@pytest.mark.parametrize("raises", [0, 1, 2])
@pytest.mark.parametrize("kind", ["plain", "scaled", "averaged"])
def test_a_batch_that_raised_between_its_updates_is_done_again(tmp_path: Path, raises: int, kind: str) -> None:
    def trainer_of(job: Job) -> Any:
        scaler: Any = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=3))
        return job.make(*[EMAWeightAveraging()] * (kind == "averaged"), plugins=[scaler] * (kind == "scaled"))

    found = []
    for folder, at in (("straight", None), ("faulted", raises)):
        job = Job(tmp_path / folder)
        job.restart()
        seed(6)
        trainer, model = trainer_of(job), Gan(at)
        ended = fit(trainer, model)
        assert ended == (at is None)
        if not ended:
            [incident] = incidents(job.folder / "ckpts")
            assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 6, 0)
            job.restart()
            trainer, model = trainer_of(job), Gan()
            assert fit(trainer, model)
        states = [optimizer.state_dict() for optimizer in trainer.optimizers]
        scales = trainer.precision_plugin.state_dict()
        found.append((weights(model), states, scales, {k: float(v) for k, v in trainer.callback_metrics.items()}))
    straight, faulted = found
    torch.testing.assert_close(faulted, straight, rtol=0, atol=0)


class Newton(L.LightningModule):
    """LBFGS, which moves the weights between calls of its closure; raises in its fourth batch, in such a call."""

    def __init__(self, raises: int | None = None) -> None:
        super().__init__()
        self.raises, self.calls = raises, 0
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def on_train_batch_start(self, batch: list[Tensor], batch_idx: int) -> None:
        self.calls = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.raises == self.calls:
            raise Boom
        self.calls += 1
        loss: Tensor = (self.net(batch[0]) + torch.randn(1)).pow(2).mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        found = torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)
        return [found], [torch.optim.lr_scheduler.ExponentialLR(found, 0.9)]


@pytest.mark.parametrize("raises", [0, 1, 2])
def test_a_step_of_lbfgs_that_raised_in_its_closure_is_done_again(tmp_path: Path, raises: int) -> None:
    found = []
    for folder, at in (("straight", None), ("faulted", raises)):
        job = Job(tmp_path / folder)
        job.restart()
        seed(6)
        trainer, model = job.make(), Newton(at)
        ended = fit(trainer, model)
        assert ended == (at is None)
        if not ended:
            [incident] = incidents(job.folder / "ckpts")
            assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 3, 0)
            job.restart()
            trainer, model = job.make(), Newton()
            assert fit(trainer, model)
        states = [optimizer.state_dict() for optimizer in trainer.optimizers]
        found.append((weights(model), states, {k: float(v) for k, v in trainer.callback_metrics.items()}))
    straight, faulted = found
    torch.testing.assert_close(faulted, straight, rtol=0, atol=0)


@pytest.mark.parametrize("first", [True, False])
def test_one_rank_says_that_a_copy_is_kept(
    tmp_path: Path, first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(L.Trainer, "is_global_zero", first)
    caplog.set_level("INFO", "lastgasp")
    assert fit(Job(tmp_path).make(max_epochs=1), Newton())
    assert ("a copy of the state is kept" in caplog.text) == first


class OwnStep(Newton):
    """Raises behind the update, in code of the user's."""

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        super().optimizer_step(*args, **options)
        if self.raises is not None and self.trainer.fit_loop.epoch_loop.batch_idx == 3:
            raise Boom


def test_a_step_of_lbfgs_that_was_complete_is_saved_as_it_is(tmp_path: Path) -> None:
    """Not the copy of the step before, under the number of the one that was complete."""
    found = []
    for folder, raises in (("straight", None), ("faulted", 99)):
        job = Job(tmp_path / folder)
        job.restart()
        seed(6)
        trainer, model = job.make(), OwnStep(raises)
        if not fit(trainer, model):
            [incident] = incidents(job.folder / "ckpts")
            assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 4, 0)
            job.restart()
            trainer, model = job.make(), OwnStep()
            assert fit(trainer, model)
        found.append((weights(model), [optimizer.state_dict() for optimizer in trainer.optimizers]))
    straight, faulted = found
    torch.testing.assert_close(faulted, straight, rtol=0, atol=0)


class Late(L.LightningModule):
    """One optimizer, logged behind its update or before; notes what others would find, were this rank killed in it."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.late = False, late
        self.net, self.found = nn.Linear(4, 1), list[bool]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.net(batch[0]).pow(2).mean()
        if not self.late:
            self.log("loss", loss, on_epoch=True)
        self.manual_backward(loss)
        optimizer.step()
        aux = gasp_of(self.trainer)._run.state.aux(self.global_step)
        self.found.append(aux is not None and bool(split_extra(decode_aux(aux).extra)[1]))
        if self.late:
            self.log("loss", loss, on_epoch=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("late", [False, True])
def test_a_killed_rank_leaves_no_sums_that_lack_what_it_logs_behind_its_update(tmp_path: Path, late: bool) -> None:
    assert fit(Job(tmp_path).make(AsOneOfSeveral(), max_epochs=1), model := Late(late))
    assert model.found == ([False] * 6 if late else [True] * 6)


class Seldom(L.LightningModule):
    """One optimizer uses the gradients of two batches, the other one those of each: a step ends between the two."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.raises = False, raises
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.two(self.one(batch[0])).pow(2).mean())
        if batch_idx == 5 and self.raises:
            raise Boom
        optimizers: Any = self.optimizers()
        for optimizer in optimizers if batch_idx % 2 else optimizers[1:]:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.one, self.two)]


def test_gradients_that_are_lost_between_two_batches_are_named(tmp_path: Path) -> None:
    seed(1)
    assert not fit(Job(tmp_path).make(), Seldom(raises=True))
    [incident] = incidents(tmp_path / "ckpts")
    assert any("leaves for an update of a later one" in one and "one.weight, one.bias" in one for one in incident.notes)
