"""What is captured when: before each update and backward pass, at the boundary, per rank, of callbacks and data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from frameworks.fit_rig import AsOneOfSeveral, Boom, Job, Small, data, fit, gasp_of, seed, weights
from lastgasp.adapter import NotSaveable, RankStatus
from lastgasp.errors import ConfigError
from lastgasp.pytorch import rng
from lastgasp.pytorch.aux_state import decode_aux
from lastgasp.testing.faults import FaultKit, install, parse_faults
from lastgasp_lightning import LastGasp
from lastgasp_lightning.buffers import Exchange
from lastgasp_lightning.testing import FaultCallback
from support.launchers import incidents


def left_by_a_kill(trainer: Any) -> tuple[dict[str, Tensor], bytes]:
    """Buffers and random state that others find of the step under way, were this rank killed now."""
    found = gasp_of(trainer)._run.state.aux(trainer.global_step + 1)
    assert found is not None
    aux = decode_aux(found)
    return aux.buffers, aux.rng.torch


def now(module: nn.Module) -> tuple[dict[str, Tensor], bytes]:
    drawn = rng.decode(rng.RngRecorder().snapshot()).torch
    return {name: buffer.clone() for name, buffer in module.named_buffers()}, drawn


def assert_same(a: tuple[dict[str, Tensor], bytes], b: tuple[dict[str, Tensor], bytes]) -> None:
    assert a[0].keys() == b[0].keys()
    assert [name for name in a[0] if not torch.equal(a[0][name], b[0][name])] == []
    assert a[1] == b[1]


class Adversaries(L.LightningModule):
    """Manual optimization: the second network's forward pass changes statistics after the first one's update."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
        self.two = nn.Sequential(nn.Linear(4, 1), nn.BatchNorm1d(1), nn.Dropout(0.3))
        self.looks = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
            self.manual_backward(self.two(self.one(batch[0]) + torch.randn(1)).pow(2).mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.one, self.two)]

    def look(self, *_: object) -> None:
        assert_same(left_by_a_kill(self.trainer), now(self))
        self.looks += 1

    def on_after_backward(self) -> None:
        self.look()


class LooksLate(L.Callback):
    """Looks after LastGasp's own hooks: those of an optimizer run in the order in which they were made."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_pre_hook(pl_module.look)  # type: ignore[arg-type]


def test_a_kill_leaves_the_state_of_before_each_update_and_each_backward_pass(tmp_path: Path) -> None:
    model = Adversaries()
    assert fit(Job(tmp_path).make(AsOneOfSeveral(), LooksLate(), max_steps=8), model)
    assert model.looks == 16, "after each backward pass and before each update"


def mean_of(trainer: L.Trainer) -> float:
    return float(trainer.callback_metrics["loss_epoch"])


def test_each_rank_gets_its_own_accumulators_back(tmp_path: Path) -> None:
    job = Job(tmp_path, {"max_epochs": 1})
    seed(6)
    straight = job.make(AsOneOfSeveral())
    assert fit(straight, Small())
    job = Job(tmp_path / "faulted", {"max_epochs": 1})
    seed(6)
    job.restart()
    assert not fit(job.make(AsOneOfSeveral(), strike=4), Small())
    (gasp,) = (job.folder / "ckpts").glob("gasp*.ckpt")
    checkpoint = torch.load(gasp, weights_only=False)
    for row in checkpoint["lastgasp"]["results"]:
        row["states"] = {name: value * 3 for name, value in row["states"].items()}
    checkpoint["lastgasp"]["results_rank"] = 1
    torch.save(checkpoint, tmp_path / "of-rank-1.ckpt")
    job.restart()
    resumed: Any = job.make()
    ours = LastGasp(tmp_path / "other", resume=tmp_path / "of-rank-1.ckpt", marks=False)
    resumed.callbacks = [*resumed.callbacks[:-1], ours]
    assert fit(resumed, Small())
    assert mean_of(resumed) == mean_of(straight)


class Counting(Small):
    """Counts batches where no boundary sees it: in the module's extra state, and in the datamodule."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        self.trainer.datamodule.seen += 1  # type: ignore[attr-defined]
        if self.seen == 6:
            raise Boom
        return super().training_step(batch, batch_idx)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Counted(L.LightningDataModule):
    seen = 0

    def train_dataloader(self) -> Any:
        return DataLoader(data(), 4)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}


def test_a_count_of_the_users_is_that_of_the_boundary(tmp_path: Path) -> None:
    with pytest.raises(Boom):
        Job(tmp_path).make().fit(Counting(), datamodule=Counted())
    (gasp,) = (tmp_path / "ckpts").glob("gasp*.ckpt")
    checkpoint = torch.load(gasp, weights_only=False)
    assert checkpoint["global_step"] == 5
    assert checkpoint["Counted"] == {"seen": 5}
    assert checkpoint["state_dict"]["_extra_state"] == {"seen": 5}


class Spoils(L.Callback):
    """Changes the averaged model's buffers, as on another rank they are others."""

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: object) -> None:
        if trainer.global_step == 5:
            (ema,) = (cb for cb in trainer.callbacks if isinstance(cb, EMAWeightAveraging))  # type: ignore[attr-defined]
            assert ema._average_model is not None
            self.right = {n: b.clone() for n, b in ema._average_model.module.named_buffers()}
            for buffer in ema._average_model.module.buffers():
                buffer.add_(7)
            raise Boom


def test_buffers_of_an_averaged_model_are_those_of_the_boundary(tmp_path: Path) -> None:
    spoils = Spoils()
    assert not fit(Job(tmp_path).make(EMAWeightAveraging(decay=0.5), spoils), Small())
    (gasp,) = (tmp_path / "ckpts").glob("gasp*.ckpt")
    checkpoint = torch.load(gasp, weights_only=False)
    assert [n for n, b in spoils.right.items() if not torch.equal(checkpoint["state_dict"][n], b)] == []
    assert not torch.equal(checkpoint["current_model_state"]["net.1.running_mean"], spoils.right["net.1.running_mean"])


class Freezes(L.Callback):
    """Once, in the step in which it is due."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *args: object) -> None:
        if trainer.global_step == 3:
            module.get_submodule("net.0").requires_grad_(False)
            module.get_submodule("net.1").eval()
        if trainer.global_step == 7:
            module.get_submodule("net.0").requires_grad_(True)


class OwnNoise(Dataset[list[Tensor]]):
    """Draws from a random generator that it holds."""

    def __init__(self) -> None:
        self._rows, self._random = data(), np.random.default_rng(5)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[Tensor]:
        return [value + float(self._random.normal()) for value in self._rows[index]]


def changing(job: Job, strike: int | None) -> dict[str, Tensor]:
    job.restart()
    seed(7)
    model = Small()
    fit(job.make(Freezes(), strike=strike), model, DataLoader(OwnNoise(), 4, shuffle=True))
    return weights(model)


@pytest.mark.parametrize("step", [5, 9])
def test_what_is_frozen_and_the_random_numbers_of_a_data_set_go_on(tmp_path: Path, step: int) -> None:
    straight = changing(Job(tmp_path / "straight"), None)
    job = Job(tmp_path / "faulted")
    changing(job, step)
    resumed = changing(job, None)
    assert [n for n in straight if not torch.equal(straight[n], resumed[n])] == []


class Finetuning(BaseFinetuning):
    """Of a layer and a norm, as Lightning's documents have it: norms stay out of the optimizer."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[:2], train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[:2], optimizer, train_bn=False)


class Head(Small):
    """Trains what is not frozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def finetuned(job: Job, strike: int | None) -> dict[str, Tensor]:
    job.restart()
    seed(7)
    model = Head()
    fit(job.make(Finetuning(), strike=strike), model)
    return weights(model)


@pytest.mark.parametrize("step", [3, 8])
def test_norms_that_finetuning_has_unfrozen_go_on_with_their_statistics(tmp_path: Path, step: int) -> None:
    straight = finetuned(Job(tmp_path / "straight"), None)
    job = Job(tmp_path / "faulted")
    finetuned(job, step)
    resumed = finetuned(job, None)
    assert [n for n in straight if not torch.equal(straight[n], resumed[n])] == []
    assert straight["net.1.num_batches_tracked"] == 6


class Momentum(Small):
    """A second net follows the first one before each update, as MoCo's does."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 1).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for p in self.second.parameters():
            p.data = p.data * 0.9 + batch[0].mean()
        return super().training_step([batch[0], batch[1] + self.second(batch[0])], batch_idx)


class Late(L.Callback):
    """Raises behind the forward pass of the step that follows five."""

    def on_before_backward(self, trainer: L.Trainer, *args: object) -> None:
        if trainer.global_step == 5:
            raise Boom


def with_momentum(job: Job, *callbacks: L.Callback) -> dict[str, Tensor]:
    job.restart()
    seed(7)
    model = Momentum()
    assert fit(job.make(*callbacks), model) is not bool(callbacks)
    return weights(model)


def test_a_momentum_encoder_is_that_of_the_boundary(tmp_path: Path) -> None:
    straight = with_momentum(Job(tmp_path / "straight"))
    job = Job(tmp_path / "faulted")
    with_momentum(job, Late())
    resumed = with_momentum(job)
    assert [n for n in straight if not torch.equal(straight[n], resumed[n])] == []


def swa(job: Job, strike: int | None) -> tuple[dict[str, Tensor], float]:
    job.restart()
    seed(7)
    model = Small()
    trainer = job.make(StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1), strike=strike, max_epochs=4)
    fit(trainer, model)
    return weights(model), trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("step", [3, 9])
def test_stochastic_weight_averaging_continues_with_its_learning_rate(tmp_path: Path, step: int) -> None:
    straight = swa(Job(tmp_path / "straight"), None)
    job = Job(tmp_path / "faulted")
    swa(job, step)
    resumed = swa(job, None)
    assert resumed[1] == straight[1]
    assert [n for n in straight[0] if not torch.equal(straight[0][n], resumed[0][n])] == []


class InValidation(L.Callback):
    """Raises while the averaged weights are in the module."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_validation_batch_start(self, trainer: L.Trainer, *args: object) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            raise Boom


class Averages(L.Callback):
    """As in many repositories: an average of its own, in the module while that validates."""

    def __init__(self) -> None:
        self.average, self.own = dict[str, Tensor](), dict[str, Tensor]()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.average = {n: (self.average.get(n, p) + p).detach() / 2 for n, p in module.named_parameters()}

    def put(self, module: L.LightningModule, values: dict[str, Tensor]) -> None:
        for name in values:
            module.get_parameter(name).data.copy_(values[name])

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.own = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.put(module, self.average)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.put(module, self.own)

    def state_dict(self) -> dict[str, Any]:
        return self.average

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict


AVERAGES: dict[str, Any] = {"lightning's": lambda: EMAWeightAveraging(decay=0.5), "own": Averages}


def averaged(job: Job, whose: str, *more: L.Callback) -> dict[str, Tensor]:
    job.restart()
    seed(7)
    model, loader = Small(), DataLoader(data(), 4)
    fit(job.make(AVERAGES[whose](), *more), model, loader, val_dataloaders=loader)
    return weights(model)


@pytest.mark.parametrize(("whose", "step"), [("lightning's", 6), ("own", 12)])
def test_a_fault_while_averaged_weights_validate_saves_the_models_own(tmp_path: Path, whose: str, step: int) -> None:
    """Each is in its place, with nothing to note; a callback of the user's is known from its first validation on."""
    straight = averaged(Job(tmp_path / "straight"), whose)
    job = Job(tmp_path / "faulted")
    averaged(job, whose, InValidation(step))
    [incident] = incidents(tmp_path / "faulted/ckpts")
    assert (incident.step_saved, [note for note in incident.notes if "parameters" in note]) == (step, [])
    resumed = averaged(job, whose)
    assert [n for n in straight if not torch.equal(straight[n], resumed[n])] == []


def test_weights_that_are_being_exchanged_are_not_saved() -> None:
    """Nor does an exchange begin while they are: it waits as an update does."""
    status, waited = RankStatus(), list[bool]()
    exchange = Exchange(status.before_update, status)
    trainer: Any = SimpleNamespace(callbacks=[EMAWeightAveraging()])

    class Averaged(nn.Linear):
        """Looks at what a save would find in the middle of it."""

        def buffers(self, recurse: bool = True) -> Any:
            waited.append(status.inside)
            with pytest.raises(NotSaveable, match="exchanging"):
                assert exchange.done
            return super().buffers(recurse)

    trainer.callbacks[0]._average_model = SimpleNamespace(module=Averaged(1, 1))
    undo = exchange.install(trainer)
    for done in (True, False):
        trainer.callbacks[0]._swap_models(nn.Linear(1, 1))
        assert (exchange.done, status.inside, status.begun) == (done, False, 0)
    assert waited == [True, True]
    undo()


class Weighed(Dataset[tuple[Tensor, Tensor]]):
    """How much each sample counts is changed by training."""

    def __init__(self) -> None:
        self.data, self.weights = data(), np.ones(24)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        self.weights[index] += 1
        return x, y


def test_data_that_training_changes_are_named(tmp_path: Path) -> None:
    """No checkpoint holds them."""
    assert not fit(Job(tmp_path).make(strike=3), Small(), DataLoader(Weighed(), 4))
    [incident] = incidents(tmp_path / "ckpts")
    assert "training has changed what gives its data: Weighed.weights. No checkpoint" in " ".join(incident.notes)


class Inner(torch.optim.SGD):
    """As SAM: another optimizer inside makes the steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.base = torch.optim.SGD(self.param_groups, lr=0.1)

    def second(self) -> None:
        self.base.step()


class CallsTheClosure(Small):
    """Its update begins behind the closure that it calls itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.found = kind, list[tuple[bool, bool, bool]]()
        self.automatic_optimization = kind != "manual"

    def inside(self) -> bool:
        return bool(gasp_of(self.trainer)._run.session.status.inside)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        before = self.inside()
        optimizer.optimizer.step() if self.kind == "raw" else optimizer.second()
        self.found.append((before, self.inside(), gasp_of(self.trainer)._run.state.watch.begun))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.kind == "manual":
            self.manual_backward(loss)
            self.optimizers().second()  # type: ignore[union-attr]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1) if self.kind == "raw" else Inner(self.parameters())


@pytest.mark.parametrize("kind", ["raw", "inner"])
def test_an_update_of_the_modules_own_optimizer_step_is_one(tmp_path: Path, kind: str) -> None:
    """No save can begin in it; what it does before that, with the ranks' gradients, is none."""
    model = CallsTheClosure(kind)
    assert fit(Job(tmp_path).make(max_epochs=1), model)
    assert model.found == [(False, True, True)] * 6


def test_a_batch_of_which_lightning_counts_no_step_is_named(tmp_path: Path) -> None:
    """Nothing is saved of it, and the incident says why."""
    assert not fit(Job(tmp_path).make(InBatch(3)), CallsTheClosure("manual"))
    [incident] = incidents(tmp_path / "ckpts")
    assert incident.ending == "nothing_to_save"
    assert "a batch has changed parameters without optimizer.step() (Inner)" in " ".join(incident.notes)


class InBatch(L.Callback):
    """Raises in a batch, whatever Lightning counts."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            raise Boom


def test_a_drill_with_stochastic_weight_averaging(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kit = FaultKit(parse_faults("kind=exception,phase=update,step=99;kind=exception,rank=3,phase=update,step=1"))
    job = Job(tmp_path)
    assert fit(job.make(StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1), FaultCallback(kit)), Small())
    assert "phase=update,step=99 did not happen" in caplog.text
    assert "rank=3" not in caplog.text
    install(None)


def test_two_of_us_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Leave one of them"):
        fit(Job(tmp_path).make(LastGasp(tmp_path / "other")), Small())


def test_a_misspelt_argument_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keeep=1.*Did you mean 'keep'"):
        LastGasp(tmp_path, keeep=1)
    with pytest.raises(ConfigError, match="Check the spelling"):
        LastGasp(tmp_path, zzz=1)
