"""FaultCallback in a real Lightning loop, one process: each fault happens inside the phase that it names."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lastgasp.errors import ConfigError
from lastgasp.testing import faults
from lastgasp.testing.faults import FaultKit, FaultSpec, InjectedFault, parse_faults
from lastgasp_lightning import entry
from lastgasp_lightning.testing import FaultCallback, fault_callbacks

pytestmark = pytest.mark.usefixtures("restored_environ")

# A function that must be on the stack, and one that must not, where the fault happens.
INSIDE = {
    "data": ("__next__", "training_step"),
    "forward": ("training_step", "backward"),
    "backward": ("_engine_run_backward", "on_after_backward"),
    "update": ("optimizer_step", "_engine_run_backward"),
    "after_update": ("optimizer_step", "_half_step"),
    "step_end": ("on_train_batch_end", "optimizer_step"),
    "periodic_save": ("write_record", "optimizer_step"),
    "validation": ("on_validation_batch_start", "training_step"),
}


class Tiny(LightningModule):
    """Two layers; `manual` takes the optimizer in its own hands."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        """Squared error."""
        loss: Tensor = (self.net(batch[0]) ** 2).mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Nothing but a forward pass."""
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, whose state makes a doubled update visible."""
        return torch.optim.Adam(self.parameters(), lr=0.1)


class Witness:
    """The kit's act: notes the stack and the weights, then does what the fault says."""

    def __init__(self, model: Tiny) -> None:
        self.model, self.stacks = model, list[list[str]]()
        self.weights = list[dict[str, Tensor]]()

    def __call__(self, spec: FaultSpec) -> None:
        self.stacks.append([frame.name for frame in traceback.extract_stack()])
        self.weights.append({k: v.detach().clone() for k, v in self.model.state_dict().items()})
        faults.perform(spec)


@pytest.fixture(autouse=True)
def no_kit() -> Iterator[None]:
    yield
    faults.install(None)


def fit(model: Tiny, where: Path, *callbacks: Callback, **options: Any) -> Trainer:
    seed_everything(7, verbose=False)
    torch.manual_seed(7)
    for layer in (model.net[0], model.net[3]):
        layer.reset_parameters()  # type: ignore[operator]
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=6, logger=False, enable_progress_bar=False,
        enable_model_summary=False, val_check_interval=2, num_sanity_val_steps=1, limit_val_batches=1,
        callbacks=[ModelCheckpoint(where, every_n_train_steps=2, save_top_k=-1), *callbacks], **options,
    )  # fmt: skip
    data = DataLoader(TensorDataset(torch.arange(64.0).view(16, 4) / 64), batch_size=2)
    trainer.fit(model, data, data)
    return trainer


def kit_for(text: str, model: Tiny, log: Path | None = None) -> tuple[FaultKit, Witness]:
    witness = Witness(model)
    return FaultKit(parse_faults(text), log=log, act=witness), witness


@pytest.mark.parametrize("phase", sorted(INSIDE))
def test_a_fault_happens_inside_its_phase_at_its_step(phase: str, tmp_path: Path) -> None:
    model, log = Tiny(), tmp_path / "log"
    kit, witness = kit_for(f"kind=exception,phase={phase},step=3", model, log)
    with pytest.raises(InjectedFault, match=phase):
        fit(model, tmp_path, FaultCallback(kit))
    (line,) = faults.read_log(log)
    assert line["at_step"] == (4 if phase in faults.LATER_PHASES else 3)
    inside, outside = INSIDE[phase]
    assert any(inside in name for name in witness.stacks[0])
    assert outside not in witness.stacks[0]


@pytest.mark.parametrize("manual", [False, True])
def test_in_an_update_half_of_the_parameters_have_changed(manual: bool, tmp_path: Path) -> None:
    model = Tiny(manual)
    kit, witness = kit_for("kind=sleep:0,phase=backward,step=3;kind=exception,phase=update,step=3", model)
    with pytest.raises(InjectedFault):
        fit(model, tmp_path, FaultCallback(kit))
    before, during = witness.weights
    assert [not torch.equal(before[k], during[k]) for k in before] == [True, True, False, False]


@pytest.mark.parametrize("manual", [False, True])
def test_an_update_that_continues_ends_as_if_nothing_had_been(manual: bool, tmp_path: Path) -> None:
    undisturbed, disturbed = Tiny(manual), Tiny(manual)
    fit(undisturbed, tmp_path / "a")
    kit, witness = kit_for("kind=sleep:0,phase=update,step=3;kind=sleep:0,phase=after_update,step=3", disturbed)
    fit(disturbed, tmp_path / "b", FaultCallback(kit))
    assert len(witness.stacks) == 2
    for name, value in undisturbed.state_dict().items():
        assert torch.equal(value, disturbed.state_dict()[name])


def test_others_are_not_told_that_a_half_update_is_complete(tmp_path: Path) -> None:
    model, told = Tiny(), list[int]()

    class Listener(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.optimizers[0].register_step_post_hook(lambda *_: told.append(trainer.global_step))

    kit, _ = kit_for("kind=exception,phase=update,step=3", model)
    with pytest.raises(InjectedFault):
        fit(model, tmp_path, Listener(), FaultCallback(kit))
    assert told == [0, 1, 2]


def test_accumulated_batches_end_no_step(tmp_path: Path) -> None:
    model, batches = Tiny(), list[int]()

    class Counter(Callback):
        def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
            batches.append(trainer.global_step)

    kit, _ = kit_for("kind=exception,phase=step_end,step=1", model)
    with pytest.raises(InjectedFault):
        fit(model, tmp_path, Counter(), FaultCallback(kit), accumulate_grad_batches=2)
    assert batches == [0, 1, 1, 2]


def test_a_save_that_is_cut_off_leaves_the_others_alone(tmp_path: Path) -> None:
    model = Tiny()
    kit, _ = kit_for("kind=exception,phase=periodic_save,step=4", model)
    with pytest.raises(InjectedFault):
        fit(model, tmp_path, FaultCallback(kit))
    assert [p.name for p in tmp_path.glob("*.ckpt") if "step=2" in p.name] != []


@pytest.mark.parametrize("text", ["kind=exception,phase=step_end,step=2", "kind=exception,phase=data,step=99"])
def test_everything_is_put_back(text: str, tmp_path: Path) -> None:
    model, save, seen = Tiny(), torch.serialization._save, list[Trainer]()

    class Keeper(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append(trainer)

    kit, _ = kit_for(text, model)
    try:
        fit(model, tmp_path, Keeper(), FaultCallback(kit))
    except InjectedFault:
        pass
    (trainer,) = seen
    assert torch.serialization._save is save
    owners: list[tuple[Any, str]] = [
        (trainer.strategy, "save_checkpoint"),
        (trainer.fit_loop.epoch_loop, "_on_before_fetch"),
        *((optimizer, "step") for optimizer in trainer.optimizers),
    ]
    assert [name for owner, name in owners if name in vars(owner)] == []
    assert [m for m in model.modules() if m._forward_hooks] == []


def test_the_environment_brings_faults_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LASTGASP", raising=False)
    monkeypatch.delenv("LASTGASP_FAULT", raising=False)
    assert entry.callbacks() == []
    assert fault_callbacks() == []
    monkeypatch.setenv("LASTGASP_FAULT", "kind=sigkill,phase=data")
    assert [type(c) for c in entry.callbacks()] == [FaultCallback]


@pytest.mark.parametrize(("name", "value"), [("LASTGASP_FAULT", "kind=nuke"), ("LASTGASP", "maybe")])
def test_a_wrong_environment_lets_trainers_be_made_and_refuses_to_fit(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("LASTGASP", raising=False)
    monkeypatch.setenv(name, value)
    (refusal,) = entry.callbacks()
    monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=name):
        fit(Tiny(), tmp_path, refusal)


@pytest.mark.parametrize("own", [True, False])
def test_the_environment_adds_last_gasp_unless_the_user_gave_one(
    own: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = list[str]()

    class Fake(Callback):
        def __init__(self, by: str = "environment") -> None:
            made.append(by)

        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            made.append("set up")

    monkeypatch.setattr("lastgasp_lightning.LastGasp", Fake, raising=False)
    monkeypatch.setenv("LASTGASP", "1")
    monkeypatch.delenv("LASTGASP_FAULT", raising=False)
    extra: list[Callback] = [Fake("user")] if own else []
    trainer = fit(Tiny(), tmp_path, *extra, *entry.callbacks())
    assert made == (["user", "set up"] if own else ["environment", "set up"])
    left: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    assert [type(c) for c in left].count(Fake) == 1
    assert not any(isinstance(c, entry.AutoLastGasp) for c in left)


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "update", "step_end"])
def test_an_exit_reaches_the_user_from_every_phase(phase: str, tmp_path: Path) -> None:
    kit = FaultKit(parse_faults(f"kind=exit3,phase={phase},step=1"))
    with pytest.raises(SystemExit) as caught:
        fit(Tiny(), tmp_path, FaultCallback(kit))
    assert caught.value.code == 3
