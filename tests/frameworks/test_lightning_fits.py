"""Several fits in one script: folds, sweeps, tuners, the same trainer twice. Each resumes from its own steps alone."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning as L
import msgspec
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint, ModelPruning
from lightning.pytorch.tuner.tuning import Tuner
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from frameworks.fit_rig import Boom, Job, Small, data, fit, seed, weights
from lastgasp.checkpoint import Manifest, SingleFile
from lastgasp.checkpoint import manifest as manifests
from lastgasp.errors import CheckpointMismatch, ConfigError, NothingLoads
from lastgasp_lightning import last_good
from support.launchers import incidents

Weights = dict[str, Tensor]


def unequal(a: Weights, b: Weights) -> list[str]:
    return [name for name in a if not torch.equal(a[name], b[name])]


def folds(job: Job, strikes: dict[int, int], periodic: bool = True) -> list[Weights]:
    """A script that trains one model per fold, from its first line; ends at the first fault."""
    job.restart()
    seed(3)
    found = []
    for fold in range(2):
        model = Small()
        parts = [i for i in range(24) if i % 3 != fold]
        saves = [ModelCheckpoint(job.folder / "ckpts", save_top_k=-1)] if periodic else []
        trainer = job.make(*saves, strike=strikes.get(fold), enable_checkpointing=periodic)
        if not fit(trainer, model, DataLoader(Subset(data(), parts), 4, shuffle=True)):
            break
        found.append(weights(model))
        trainer.validate(model, DataLoader(data(), 8), verbose=False)
    return found


@pytest.mark.parametrize("periodic", [True, False])
def test_each_fold_resumes_from_its_own_steps(
    tmp_path: Path, periodic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    straight = folds(Job(tmp_path / "straight"), {}, periodic)
    assert ("fit 0 of this script is in no checkpoint" in caplog.text) is not periodic
    job = Job(tmp_path / "faulted")
    assert len(folds(job, {1: 5}, periodic)) == 1
    assert (job.folder / "ckpts/gasp-fit=1-step=00000005.ckpt").exists()
    notes = " ".join(incidents(job.folder / "ckpts")[-1].notes)
    assert ("fit 0 of this script is in no checkpoint" in notes) is not periodic, notes
    found = folds(job, {}, periodic)
    assert [unequal(a, b) for a, b in zip(straight, found, strict=True)] == [[], []]


@pytest.fixture
def broken_off(tmp_path: Path) -> Job:
    """A script whose first fit was broken off after step 5."""
    job = Job(tmp_path)
    assert not fit(job.make(strike=5), Small())
    job.restart()
    return job


class Shared(torch.optim.SGD):
    """Each rank holds a part of its state, as of a ZeroRedundancyOptimizer."""

    def consolidate_state_dict(self) -> None:
        """A collective."""
        raise AssertionError("called")


def test_an_optimizer_that_no_rank_holds_completely_is_refused(tmp_path: Path) -> None:
    """It would train, and no survivor of a fault could save it."""

    class Zero(Small):
        def configure_optimizers(self) -> Any:
            return Shared(self.parameters(), lr=self.lr)

    with pytest.raises(ConfigError, match="optimizer='Shared' is not allowed"):
        fit(Job(tmp_path).make(), Zero())


class Sgd(Small):
    """Another optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def test_a_fit_of_another_model_optimizer_or_data_is_refused(broken_off: Job) -> None:
    for model, loader, why in (
        (Small(width=7), None, "model's parameters differ"),
        (Sgd(), None, "optimizers are of other types"),
        (Small(), DataLoader(data(seed=2), 4), "training data differ"),
    ):
        broken_off.restart()
        with pytest.raises(CheckpointMismatch, match=why):
            fit(broken_off.make(), model, loader)
        assert model.trained == []
    broken_off.restart()
    model = Small()
    assert fit(broken_off.make(), model)
    assert model.trained[0] == 5


def test_settings_that_the_script_has_changed_are_named(broken_off: Job, caplog: pytest.LogCaptureFixture) -> None:
    assert fit(broken_off.make(), Small())
    assert "the script" not in caplog.text
    broken_off.restart()
    assert fit(broken_off.make(max_epochs=3), Small(lr=0.5))
    assert caplog.text.count("lr of optimizer is 0.02 (the script: 0.5)") == 1


def test_masks_of_pruned_weights_are_noted_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lightning makes pruning permanent in its checkpoints, and prunes anew at the end of the next epoch."""
    job = Job(tmp_path)
    for strike, noted in ((8, 0), (None, 1)):
        model = Small()
        prune = ModelPruning("l1_unstructured", parameters_to_prune=[(model.net[0], "weight")], amount=0.3)
        assert fit(job.make(prune, strike=strike), model) is (strike is None)
        job.restart()
        assert caplog.text.count("the masks of ModelPruning are in no checkpoint") == noted


def test_a_sweep_in_another_order_does_not_resume_another_trial(tmp_path: Path) -> None:
    """Trials of one model that differ in the learning rate alone, as a study gives them that goes on where it was."""
    job = Job(tmp_path)
    saves = ModelCheckpoint(job.folder / "ckpts", save_top_k=-1)
    assert fit(job.make(saves, enable_checkpointing=True), Small(lr=0.1))
    assert not fit(job.make(strike=5), Small(lr=0.2))
    job.restart()
    model = Small(lr=0.2)
    with pytest.raises(CheckpointMismatch, match=r"lr of optimizer is 0.1 \(the script: 0.2\): it may be of another"):
        fit(job.make(), model)
    assert model.trained == []


class Picky(Small):
    """Refuses what it is given at some steps."""

    def __init__(self, *refused: int) -> None:
        super().__init__()
        self.refused = refused

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint["global_step"] in self.refused:
            raise KeyError("a key that this version of the model wants")


def test_a_checkpoint_that_does_not_load_is_set_aside_when_an_older_one_does(broken_off: Job) -> None:
    assert not fit(broken_off.make(strike=7), Small())
    folder = broken_off.folder / "ckpts"
    broken_off.restart()
    with pytest.raises(NothingLoads, match="a key that this version"):
        fit(broken_off.make(), Picky(5, 7))
    assert len(list(folder.glob("*.ckpt"))) == 2, "nothing was moved"
    broken_off.restart()
    model = Picky(7)
    assert fit(broken_off.make(), model)
    assert model.trained[0] == 5
    (moved,) = folder.glob("*.unfit")
    assert "KeyError: 'a key that" in moved.with_name(f"{moved.name}.reason.json").read_text()


def test_what_is_named_is_loaded_whatever_it_is_of(broken_off: Job) -> None:
    gasp, model = last_good(broken_off.folder / "ckpts"), Small()
    assert gasp is not None
    trainer = broken_off.make()
    trainer.callbacks = [*trainer.callbacks[:-1], type(trainer.callbacks[-1])(gasp.rpartition("/")[0], resume=gasp)]  # type: ignore[attr-defined]
    fit(trainer, model, DataLoader(data(seed=2), 4))
    assert model.trained[0] == 5


def test_last_good_is_of_the_fit_that_comes_next(broken_off: Job) -> None:
    directory = broken_off.folder / "ckpts"
    first, second = Small(), Small()
    assert fit(broken_off.make(), first, ckpt_path=last_good(directory))
    assert first.trained[0] == 5
    assert last_good(directory) is None
    assert fit(broken_off.make(), second, ckpt_path=last_good(directory))
    assert second.trained[0] == 0


def test_another_model_after_a_fit_that_did_not_end_well_starts_from_scratch(
    broken_off: Job, caplog: pytest.LogCaptureFixture
) -> None:
    again, other = Small(), Small()
    trainer = broken_off.make(strike=7)
    assert not fit(trainer, again)
    assert fit(broken_off.make(strike=None), again), "the same model: the same fit once more"
    assert again.trained == [5, 6, 7, 8, 9, 10, 11]
    broken_off.restart()
    assert not fit(broken_off.make(strike=7), Small())
    assert fit(broken_off.make(), other)
    assert other.trained[0] == 0
    assert "fit 0 of this script did not end well" in caplog.text


def twice(job: Job, strike: int | None) -> Weights:
    """One trainer and one model, trained on."""
    job.restart()
    seed(4)
    model, trainer = Small(), job.make()
    assert fit(trainer, model)
    trainer.validate(model, DataLoader(data(), 8), verbose=False)
    trainer.fit_loop.max_epochs = 4
    trainer.callbacks[0].step = strike  # type: ignore[attr-defined]
    fit(trainer, model)
    return weights(model)


def test_the_same_trainer_trains_on(tmp_path: Path) -> None:
    straight = twice(Job(tmp_path / "straight"), None)
    job = Job(tmp_path / "faulted")
    twice(job, 15)
    assert (job.folder / "ckpts/gasp-fit=1-step=00000015.ckpt").exists()
    assert unequal(straight, twice(job, None)) == []


def without_number(path: Path) -> None:
    """As an older lastgasp wrote it."""
    where = SingleFile(".ckpt").manifest_path(path)
    found = manifests.read(where)
    assert isinstance(found, Manifest)
    old = msgspec.structs.replace(found, version=1, fit=msgspec.UNSET, self_digest="")
    where.write_bytes(manifests.encode(msgspec.structs.replace(old, self_digest=manifests._own_digest(old))))


def test_a_checkpoint_that_does_not_say_its_fit_is_the_first_ones(broken_off: Job) -> None:
    without_number(broken_off.folder / "ckpts/gasp-step=00000005.ckpt")
    model = Small()
    assert fit(broken_off.make(), model)
    assert model.trained[0] == 5
    with pytest.raises(ConfigError, match="directory of its own"):
        fit(broken_off.make(), Small())


def test_a_tuner_takes_part_in_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for strike in (5, None):
        job.restart()
        model = Small()
        trainer = job.make(strike=strike)
        Tuner(trainer).lr_find(model, DataLoader(data(), 4), num_training=8)
        assert not (tmp_path / "ckpts").exists() or strike is None
        model.trained.clear()
        assert fit(trainer, model) == (strike is None)
    assert model.trained == [5, 6, 7, 8, 9, 10, 11]
    assert [path.name for path in (tmp_path / "ckpts").glob("*.ckpt")] == ["gasp-step=00000005.ckpt"]


def test_a_smoke_test_is_neither_saved_nor_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A crash of it would otherwise be where the real training begins, and the training's checkpoints its own start."""
    job, steps = Job(tmp_path), list(range(12))
    caplog.set_level("INFO", "lastgasp")
    for strike, smoke in ((2, 5), (7, False), (None, 3), (None, False)):
        job.restart()
        model = Small()
        caplog.clear()
        assert fit(job.make(strike=strike, fast_dev_run=smoke), model) == (strike is None)
        assert ("LastGasp does nothing in this fit" in caplog.text) == bool(smoke)
        assert (tmp_path / "ckpts").exists() == (strike != 2)
        assert model.trained == {2: steps[:2], 7: steps[:7], None: steps[:3] if smoke else steps[7:]}[strike]


class Manual(Small):
    """One optimizer; raises behind its update of step 5, once."""

    raises = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.raises and self.trainer.global_step == 5:
            raise Boom
        return loss


def test_what_manual_optimization_loses_on_one_rank_is_said_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lastgasp")
    assert not fit(Job(tmp_path).make(), Manual())
    assert "an exception in training_step behind an optimizer.step() cannot be answered with a save" in caplog.text
    [incident] = incidents(tmp_path / "ckpts")
    assert (incident.ending, incident.steps_lost) == ("gave_up", 4)
    caplog.clear()
    assert fit(Job(tmp_path / "other").make(), Small())
    assert "cannot be answered with a save" not in caplog.text


class Batches(Small):
    """Makes its own loader, of the size that a finder has found."""

    batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(data(), self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(data(), 8)


def tuned(job: Job, strike: int | None) -> Batches:
    job.restart()
    seed(5)
    model = Batches()
    finders = [BatchSizeFinder(max_trials=2, steps_per_trial=1), LearningRateFinder(num_training_steps=6)]
    trainer = job.make(*finders, strike=strike)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "train_dataloader", model.train_dataloader)
        trainer.fit(model) if strike is None else fit_from_module(trainer, model)
    return model


def fit_from_module(trainer: L.Trainer, model: L.LightningModule) -> None:
    with pytest.raises(Boom):
        trainer.fit(model)


def test_finders_inside_a_fit_run_once(tmp_path: Path) -> None:
    straight = tuned(Job(tmp_path / "straight"), None)
    job = Job(tmp_path / "faulted")
    before = tuned(job, 5)
    after = tuned(job, None)
    assert (after.lr, after.batch_size) == (before.lr, before.batch_size) == (straight.lr, straight.batch_size)
    assert after.trained[0] == 5, "neither a trial nor a step that was saved"
    assert unequal(weights(straight), weights(after)) == []


class Exits(L.Callback):
    """User code that ends the script in the middle of training."""

    def __init__(self, code: object) -> None:
        self.code = code

    def on_train_batch_start(self, trainer: L.Trainer, *args: object) -> None:
        if trainer.global_step == 3:
            raise SystemExit(self.code)


@pytest.mark.parametrize(("code", "faults"), [(0, 0), (None, 0), (3, 1)])
def test_an_exit_with_code_0_is_a_good_end(tmp_path: Path, code: object, faults: int) -> None:
    with pytest.raises(SystemExit):
        fit(Job(tmp_path).make(Exits(code)), Small())
    assert len(list((tmp_path / "ckpts").glob("incidents/*.json"))) == faults
    assert len(list((tmp_path / "ckpts").glob("gasp-*.ckpt"))) == faults


class Ending(Small):
    """Does something at the end of each batch, those without an update included."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            next(self.parameters()).mul_(1.0)
        if getattr(self, "strike", -1) == batch_idx:
            self.strike = -2  # in the next forward pass


class StrikeLater(L.Callback):
    """Raises after a batch that only accumulated gradients."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if getattr(module, "strike", -1) == -2:
            raise Boom


def test_gradients_of_a_batch_without_an_update_are_made_again_where_the_module_ends_batches(tmp_path: Path) -> None:
    ends = []
    for name, strikes in (("straight", [-1]), ("faulted", [2, -1])):
        job = Job(tmp_path / name, {"accumulate_grad_batches": 2})
        for strike in strikes:
            job.restart()
            seed(3)
            model = Ending()
            model.strike = strike
            assert fit(job.make(StrikeLater()), model) == (strike == -1)
        ends.append(weights(model))
    assert unequal(*ends) == []


class Keeping(Small):
    """Keeps a list in plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.kept.append(self.trainer.global_step)
        return super().training_step(batch, batch_idx)


def test_values_that_a_gasp_holds_go_on(tmp_path: Path) -> None:
    """Within an epoch; on one rank, without a launcher."""
    job = Job(tmp_path)
    for strike in (5, None):
        job.restart()
        model = Keeping()
        assert fit(job.make(strike=strike), model) is (strike is None)
    assert (model.trained[0], model.kept) == (5, list(range(12)))


def test_values_that_lightnings_own_checkpoint_lacks_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To who resumes from a checkpoint of ModelCheckpoint's; a gasp has them."""
    lost = "what objects keep beside their state: Keeping.kept. No checkpoint holds it"
    job = Job(tmp_path)
    for strike in (5, None):
        seed(3)
        saves = ModelCheckpoint(tmp_path / "ckpts", save_top_k=-1, every_n_train_steps=2)
        assert fit(job.make(saves, strike=strike, enable_checkpointing=True), Keeping()) is (strike is None)
        assert caplog.text.count(lost) == (strike is None)
        caplog.clear()
        job.restart()
        for path in (tmp_path / "ckpts").glob("gasp-*"):
            path.unlink()
    assert not any(lost in note for note in incidents(tmp_path / "ckpts")[-1].notes)


class Sampled(Small):
    """Draws its data anew in each epoch, as recommenders draw their negatives."""

    own = np.random.default_rng(0)

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def train_dataloader(self) -> DataLoader[Any]:
        draws = {"torch": lambda: torch.rand(24, 1), "numpy": lambda: torch.tensor(np.random.rand(24, 1)).float(),
                 "own": lambda: torch.tensor(self.own.random((24, 1))).float()}  # fmt: skip
        x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, draws[self.how]()), 4, shuffle=True)

    def configure_optimizers(self) -> Any:
        """As most schedules are set up; Lightning makes the loaders for it, and makes them again for the epoch."""
        assert self.trainer.estimated_stepping_batches == 18
        return super().configure_optimizers()


def trained_on_samples(folder: Path, how: str, *strikes: int) -> dict[str, Tensor]:
    job = Job(folder, {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1})
    for strike in (*strikes, None):
        job.restart()
        seed(1)
        model = Sampled(how)
        trainer = job.make(strike=strike)
        with contextlib.suppress(Boom):
            trainer.fit(model)
    assert trainer.global_step == 18
    return weights(model)


@pytest.mark.parametrize("how", ["torch", "numpy"])
def test_data_that_are_drawn_anew_in_each_epoch_are_those_that_were_due(tmp_path: Path, how: str) -> None:
    straight = trained_on_samples(tmp_path / "straight", how)
    struck = trained_on_samples(tmp_path / "struck", how, 8, 12, 13)
    assert unequal(straight, struck) == []


def test_data_that_cannot_be_drawn_again_are_named_and_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained_on_samples(tmp_path, "own", 8)
    assert "the data may not be those that were due: train_dataloader is called in each epoch" in caplog.text
