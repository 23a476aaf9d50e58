"""Hugging Face's Trainer on one device, in this process: what is refused, saved, resumed, and left alone."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch.optim.lr_scheduler import ExponentialLR
from transformers import Seq2SeqTrainer, T5Config, T5ForConditionalGeneration, Trainer, TrainerCallback
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from frameworks.test_loop_schedulers import WarmUp
from frameworks.transformers_rig import Breaks, new_process, outcome, trainer
from lastgasp.cli import main
from lastgasp.errors import CheckpointMismatch, ConfigError
from lastgasp.testing.faults import InjectedFault
from lastgasp_transformers import LastGasp
from lastgasp_transformers.run import Run
from support.launchers import incidents
from support.train_transformers import Tokens, arguments, model

pytestmark = [pytest.mark.usefixtures("restored_environ"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What a Trainer without lastgasp comes to."""
    one = trainer(tmp_path_factory.mktemp("plain"))
    return outcome(one, one.train().training_loss)


def test_the_same_training_continues_after_an_exception(tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    """Without a launcher, in the same process: the step before is saved, and the next call resumes from it."""
    one = trainer(tmp_path, Breaks(5), LastGasp())
    with pytest.raises(InjectedFault):
        one.train()
    assert json.loads((tmp_path / "checkpoint-5.manifest.json").read_text())["kind"] == "gasp"
    found = outcome(one, one.train().training_loss)
    assert found.keys() == undisturbed.keys()
    assert [name for name in found if not torch.equal(found[name], undisturbed[name])] == []
    listed = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert listed.exit_code == 0, listed.output
    assert all(f"checkpoint-{step}" in listed.output for step in (4, 5, 8, 12))


def test_a_parameter_that_moves_before_the_update_is_saved_as_it_was(tmp_path: Path) -> None:
    """As momentum encoders do, in each forward pass."""
    one = trainer(tmp_path, Breaks(5), LastGasp())
    net: Any = one.model
    weight = net.get_parameter("transformer.ln_f.weight").requires_grad_(False)
    values = []

    def moves(*_: Any) -> None:
        if net.training:
            values.append(weight.data.clone())
            weight.data = weight.data * 0.9

    net.register_forward_pre_hook(moves)
    with pytest.raises(InjectedFault):
        one.train()
    saved = load_file(tmp_path / "checkpoint-5/model.safetensors")["transformer.ln_f.weight"]
    assert torch.equal(saved, values[-1])


def test_an_update_within_the_backward_pass_is_not_saved_for_the_step_before(tmp_path: Path) -> None:
    """As LOMO's: nobody calls its `step`."""

    def updates(p: torch.Tensor) -> None:
        p.data.sub_(cast("torch.Tensor", p.grad), alpha=0.1)

    def of(folder: str, *callbacks: Any) -> Trainer:
        one = trainer(tmp_path / folder, *callbacks)
        net: Any = one.model
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(updates)
        one.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        one.optimizer.step = lambda *_: None  # type: ignore[method-assign,misc,unused-ignore]
        return one

    plain = of("plain")
    wanted = outcome(plain, plain.train().training_loss)
    one = of("kept", Breaks(5), LastGasp())
    with pytest.raises(InjectedFault):
        one.train()
    found = outcome(one, one.train().training_loss)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert "parameters" not in " ".join(note for incident in incidents(tmp_path / "kept") for note in incident.notes)


class Averaging(Trainer):  # type: ignore[misc,unused-ignore]
    """Evaluates other weights than it trains; raises in the second evaluation."""

    own: dict[str, torch.Tensor]

    def evaluate(self, *args: Any, **more: Any) -> Any:
        """With half of each."""
        weights: Any = self.model
        self.own = {name: p.detach().clone() for name, p in weights.named_parameters()}
        for p in weights.parameters():
            p.data.mul_(0.5)
        found = super().evaluate(*args, **more)
        if self.state.global_step == 8:
            raise InjectedFault("while the others are in the model")
        for name, p in weights.named_parameters():
            p.data.copy_(self.own[name])
        return found


def test_weights_that_an_evaluation_exchanges_are_not_saved_for_the_models(tmp_path: Path) -> None:
    given: Any = arguments(str(tmp_path), "plain")
    one = Averaging(model(), given, train_dataset=Tokens(12, True), eval_dataset=Tokens(8), callbacks=[LastGasp()])
    with pytest.raises(InjectedFault):
        one.train()
    saved = load_file(tmp_path / "checkpoint-8/model.safetensors")
    assert [name for name in one.own if not torch.equal(saved[name], one.own[name])] == []
    assert not [note for incident in incidents(tmp_path) for note in incident.notes if "parameters" in note]


class Weighed(Tokens):
    """Counts how often each row was read."""

    def __init__(self) -> None:
        super().__init__(12, True)
        self.reads = torch.zeros(12)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.reads[index] += 1
        return super().__getitem__(index)


def test_what_a_resumed_run_gets_of_its_data_is_said(tmp_path: Path) -> None:
    """What training has changed in the data set is in no checkpoint; ignore_data_skip begins the epoch once more."""
    one = trainer(tmp_path, Breaks(5), LastGasp(), ignore_data_skip=True)
    one.train_dataset = Weighed()
    with pytest.raises(InjectedFault):
        one.train()
    one.add_callback(Breaks(6))
    with pytest.raises(InjectedFault):
        one.train()
    first, second = (" ".join(incident.notes) for incident in incidents(tmp_path))
    assert "training has changed what gives its data: Weighed.reads" in first
    assert "ignore_data_skip=True" in second
    assert "ignore_data_skip" not in first


def test_a_gasp_that_trainer_was_to_save_as_well_becomes_its_own(tmp_path: Path) -> None:
    class Stops(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if not (tmp_path / "checkpoint-8").exists() and state.global_step == 8:
                raise InjectedFault("between the evaluation and the save")

    one = trainer(tmp_path, Stops(), LastGasp(keep=1))
    with pytest.raises(InjectedFault):
        one.train()
    before = (tmp_path / "checkpoint-8/model.safetensors").stat().st_mtime_ns
    one.train()
    assert json.loads((tmp_path / "checkpoint-8.manifest.json").read_text())["kind"] == "periodic"
    assert (tmp_path / "checkpoint-8/model.safetensors").stat().st_mtime_ns == before, "written over a good one"


def test_a_further_training_resumes_from_nothing_of_the_first(tmp_path: Path) -> None:
    trainer(tmp_path, LastGasp(), max_steps=4).train()
    other = trainer(tmp_path, Breaks(1), LastGasp(), max_steps=4)
    with pytest.raises(InjectedFault):
        other.train()
    assert other.state.global_step == 1
    assert (tmp_path / "fit-1/checkpoint-1/lastgasp.pt").exists()


def test_a_finished_training_does_no_step_more(tmp_path: Path) -> None:
    """Trainer alone does one where max_steps ended it in the middle of an epoch (docs/facts/transformers.md §3)."""
    one = trainer(tmp_path, Breaks(7), LastGasp(), max_steps=8, save_steps=8)
    with pytest.raises(InjectedFault):
        one.train()
    one.train()
    assert one.state.global_step == 8
    again = trainer(tmp_path, LastGasp(), max_steps=8, save_steps=8)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert again.state.global_step == 8


class Record(Trainer):  # type: ignore[misc,unused-ignore]
    """A data class, as TRL's DistillationTrainer is: it has no hash."""

    __hash__ = None  # type: ignore[assignment]


def test_a_trainer_without_a_hash_is_protected(tmp_path: Path) -> None:
    one = trainer(tmp_path, Breaks(5), LastGasp(), kind=Record)
    with pytest.raises(InjectedFault):
        one.train()
    one.train()
    assert (tmp_path / "checkpoint-5/lastgasp.pt").exists() and one.state.global_step == 12


def test_an_evaluation_that_generates_goes_on_as_after_the_first(tmp_path: Path) -> None:
    """Trainer gives the model's `generation_config` a length in its first one, which later ones generate less for."""

    def lengths(folder: Path, *callbacks: Any) -> list[int]:
        torch.manual_seed(7)
        net = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2,
                                                  decoder_start_token_id=0, eos_token_id=49))  # fmt: skip
        asked: Any = {"predict_with_generate": True, "generation_config": None, "generation_max_length": None,
                      "generation_num_beams": None, "metric_for_best_model": None}  # fmt: skip
        one = trainer(folder, *callbacks, net=net, kind=Seq2SeqTrainer, **asked)
        one.compute_metrics = lambda found: {"length": found.predictions.shape[1]}
        one.train()
        return [row["eval_length"] for row in one.state.log_history if "eval_length" in row]

    expected = lengths(tmp_path / "plain")
    assert len(expected) == 3 and expected[0] != expected[1] == expected[2]
    with pytest.raises(InjectedFault):
        lengths(tmp_path / "own", Breaks(6), LastGasp())
    new_process()
    assert lengths(tmp_path / "own", LastGasp()) == expected


class EndsAnEpoch(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Ends the first epoch before its data are used up."""

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Step 4 of 6 is its last."""
        control.should_epoch_stop = state.global_step == 4


@pytest.mark.parametrize("after", [4, 5, 9])
def test_an_epoch_that_was_ended_early_stays_ended(after: int, tmp_path: Path) -> None:
    """Trainer alone divides the steps by those of a full epoch, and trains more of them."""
    plain = trainer(tmp_path / "plain", EndsAnEpoch())
    expected = outcome(plain, plain.train().training_loss)
    one = trainer(tmp_path / "d", EndsAnEpoch(), Breaks(after), LastGasp())
    with pytest.raises(InjectedFault):
        one.train()
    found = outcome(one, one.train().training_loss)
    assert one.state.global_step == plain.state.global_step == 10
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_workers_that_persist_are_started_in_the_epoch_that_started_them(tmp_path: Path) -> None:
    """Their start takes a random number, which the next epoch's dropout would lack."""

    def train(folder: Path, *callbacks: Any, broken: bool) -> dict[str, torch.Tensor]:
        one = trainer(folder, *callbacks, dataloader_num_workers=1, dataloader_persistent_workers=True)
        one.train_dataset = Tokens(12)
        with pytest.raises(InjectedFault) if broken else nullcontext():
            one.train()
        return outcome(one, one.train().training_loss if broken else 0.0)

    before = signal.getsignal(signal.SIGCHLD)
    try:
        expected = train(tmp_path / "plain", broken=False)
        found = train(tmp_path / "d", Breaks(6), LastGasp(), broken=True)
    finally:
        gc.collect()  # ends the workers
        signal.signal(signal.SIGCHLD, before)
    assert [name for name in expected.keys() - {"loss"} if not torch.equal(found[name], expected[name])] == []


def test_an_incomplete_save_is_not_a_checkpoint(tmp_path: Path) -> None:
    cut = tmp_path / "checkpoint-9"
    cut.mkdir()
    (cut / "checkpoint-is-incomplete.txt").touch()
    (cut / "optimizer.pt").touch()
    one = trainer(tmp_path, LastGasp(), max_steps=1)
    one.train()
    assert one.state.global_step == 1


def test_other_data_are_refused(tmp_path: Path) -> None:
    one = trainer(tmp_path, Breaks(2), LastGasp())
    with pytest.raises(InjectedFault):
        one.train()
    one.train_dataset = Tokens(14, True)
    with pytest.raises(CheckpointMismatch, match="data"):
        one.train()


def test_settings_that_the_script_has_changed_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = trainer(tmp_path, Breaks(2), LastGasp())
    with pytest.raises(InjectedFault):
        one.train()
    with pytest.raises(InjectedFault):
        trainer(tmp_path, Breaks(3), LastGasp()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "(the script: " not in caplog.text
    other = trainer(tmp_path, Breaks(4), LastGasp(), learning_rate=0.5)
    with pytest.raises(InjectedFault):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "lr of optimizer, group 0 is 0.01 (the script: 0.5)" in caplog.text


@pytest.mark.parametrize(("name", "value"), [("enable_jit_checkpoint", True), ("auto_find_batch_size", True)])
def test_what_cannot_be_protected_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    one = trainer(tmp_path, LastGasp())
    setattr(one.args, name, value)  # with it the constructor takes the signal, and keeps it
    with pytest.raises(ConfigError, match=name):
        one.train()


class Projector:
    """Belongs to the state of a parameter, as GaLore's does."""

    def __init__(self) -> None:
        self.scale = torch.ones(())


class Projects(torch.optim.SGD):
    """Its states have objects in them, and decide the update."""

    def step(self, closure: Any = None) -> Any:
        """A smaller one each time."""
        for group in self.param_groups:
            for one in group["params"]:
                held = self.state[one].setdefault("projector", Projector())
                held.scale = held.scale * 0.9
                if one.grad is not None:
                    one.grad.mul_(held.scale)
        return super().step(closure)


def test_an_optimizer_with_objects_in_its_states_resumes(tmp_path: Path) -> None:
    """torch.load(weights_only=True), by which Trainer reads them, refuses their classes."""

    def of(folder: str, *callbacks: Any) -> Trainer:
        one = trainer(tmp_path / folder, *callbacks)
        one.optimizer = Projects(cast("Any", one.model).parameters(), lr=0.1)
        return one

    plain = of("plain")
    wanted = outcome(plain, plain.train().training_loss)
    one = of("kept", Breaks(5), LastGasp())
    with pytest.raises(InjectedFault):
        one.train()
    one = of("kept", LastGasp())
    new_process()
    found = outcome(one, one.train().training_loss)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def test_a_scheduler_that_holds_another_one_sets_the_rates_of_the_optimizer(tmp_path: Path) -> None:
    """What a checkpoint has of the other one is a copy."""

    def of(folder: str, *callbacks: Any) -> Trainer:
        one = trainer(tmp_path / folder, *callbacks)
        optimizer = torch.optim.SGD(cast("Any", one.model).parameters(), lr=0.1)
        one.optimizer, one.lr_scheduler = optimizer, WarmUp(optimizer, 3, ExponentialLR(optimizer, 0.8))
        return one

    plain = of("plain")
    wanted = outcome(plain, plain.train().training_loss)
    one = of("kept", Breaks(5), LastGasp())
    with pytest.raises(InjectedFault):
        one.train()
    one = of("kept", LastGasp())
    new_process()
    found = outcome(one, one.train().training_loss)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    assert one.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]


def test_optimizers_of_single_parameters_that_no_checkpoint_has_are_named(tmp_path: Path) -> None:
    """Layerwise GaLore and Apollo: Trainer has one of their kind that does nothing, and saves its state alone."""
    one = trainer(tmp_path, Breaks(5), LastGasp())
    each = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in cast("Any", one.model).parameters()}

    def updates(p: torch.Tensor) -> None:
        each[p].step()
        each[p].zero_grad()

    for p in each:
        p.register_post_accumulate_grad_hook(updates)
    one.optimizer = LayerWiseDummyOptimizer(optimizer_dict=each, lr=0.1)
    with pytest.raises(InjectedFault):
        one.train()
    (incident,) = incidents(tmp_path)
    assert "LayerWiseDummyOptimizer.optimizer_dict. " in " ".join(incident.notes)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """Has what is asked of torch's."""

    _overlap_with_ddp, process_group = False, None

    @property
    def optim(self) -> torch.optim.Optimizer:
        """What holds this rank's part of the state."""
        return self


def test_a_transformers_that_is_too_old_is_refused_at_import(tmp_path: Path) -> None:
    code = "import transformers; transformers.__version__ = '4.57.6'; import lastgasp_transformers"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert "expected transformers 5.5 or newer, found 4.57.6" in done.stderr


def test_an_optimizer_that_no_rank_holds_completely_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: [0])
    one, net = trainer(tmp_path, LastGasp()), model()
    one.model, one.optimizer = net, ZeroRedundancyOptimizer(net.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="optimizer='ZeroRedundancyOptimizer'"):
        one.train()


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep"):
        LastGasp(keep=0)
    with pytest.raises(ConfigError, match="Did you mean 'keep'"):
        LastGasp(kept=3)
    with pytest.raises(ConfigError, match="several LastGasp"):
        trainer(tmp_path, LastGasp(), LastGasp()).train()


def test_a_search_is_left_alone_and_the_training_after_it_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.integrations.hp_params", dict)  # no package for searches is needed
    one = trainer(tmp_path, Breaks(5), LastGasp())
    with pytest.raises(InjectedFault):
        one.train(trial={"learning_rate": 1.0})
    assert not list(tmp_path.rglob("*lastgasp*")) and "is not protected" in caplog.text
    one = trainer(tmp_path / "best", Breaks(5), LastGasp())
    one.model_init, one.model = model, None  # as optuna's leaves it
    with pytest.raises(InjectedFault):
        one.train()
    assert (tmp_path / "best/checkpoint-5/lastgasp.pt").exists()


def test_a_trainer_without_the_callback_is_left_alone(tmp_path: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    LastGasp()
    one = trainer(tmp_path)
    found = outcome(one, one.train().training_loss)
    assert [name for name in found if not torch.equal(found[name], undisturbed[name])] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]


def test_each_batch_of_an_evaluation_is_progress(tmp_path: Path) -> None:
    """Trainer evaluates the model that DDP has wrapped, whose passes nobody sees: a long evaluation is no hang."""
    gasp, said = LastGasp(), list[str]()
    one = trainer(tmp_path, gasp, per_device_eval_batch_size=2)
    gasp.run = run = cast(Any, SimpleNamespace(session=SimpleNamespace(progress=said.append)))
    run.evaluated = partial(Run.evaluated, run)
    one.evaluate()
    assert said == ["validation"] * 4
