"""What Trainer's own files lack: trained parameters beside an adapter, what subclasses and callbacks have kept."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

import torch
from safetensors.torch import save_file
from transformers import GPT2LMHeadModel, TrainerCallback

from frameworks.transformers_rig import Breaks, new_process, outcome, trainer
from lastgasp.errors import CheckpointMismatch
from lastgasp.testing.faults import InjectedFault
from lastgasp_transformers import LastGasp
from lastgasp_transformers.beside import left_out, put_back
from support.launchers import incidents
from support.train_transformers import Counting, model

pytestmark = [pytest.mark.usefixtures("restored_environ"), pytest.mark.timeout(300)]


def _differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


class Filtering(GPT2LMHeadModel):  # type: ignore[misc,unused-ignore]
    """As PEFT's models do, it writes a part of what is trained: here all but the norms."""

    def save_pretrained(self, save_directory: Any, state_dict: Any = None, **more: Any) -> None:
        """Write it."""
        own = {name: value for name, value in (state_dict or self.state_dict()).items() if ".ln_" not in name}
        super().save_pretrained(save_directory, state_dict=own, **more)


def _filtering() -> Filtering:
    net: Any = model()
    net.__class__ = Filtering
    return net  # type: ignore[no-any-return]


@pytest.mark.parametrize("resumed", [5, 4], ids=["gasp", "periodic"])
def test_trained_parameters_that_the_model_does_not_save_come_back(resumed: int, tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", net=_filtering())
    expected = outcome(plain, plain.train().training_loss)
    one = trainer(tmp_path / "d", Breaks(5), LastGasp(), net=_filtering())
    with pytest.raises(InjectedFault):
        one.train()
    new_process()
    path = tmp_path / f"d/checkpoint-{resumed}"
    other = trainer(tmp_path / "d", LastGasp(resume=path), net=_filtering())
    found = outcome(other, other.train().training_loss)
    assert _differences(found, expected) == []


class Renaming(GPT2LMHeadModel):  # type: ignore[misc,unused-ignore]
    """Writes the names of the published checkpoints, as ViT does: Trainer passes over them."""

    def save_pretrained(self, save_directory: Any, state_dict: Any = None, **more: Any) -> None:
        """Write it."""
        own = state_dict or self.state_dict()
        renamed = {name.replace(".attn.", ".attention."): value for name, value in own.items()}
        super().save_pretrained(save_directory, state_dict=renamed, **more)


@pytest.mark.parametrize("resumed", [5, 4], ids=["gasp", "periodic"])
def test_parameters_that_are_written_under_other_names_come_back(resumed: int, tmp_path: Path) -> None:
    def train(folder: str, *callbacks: Any) -> dict[str, torch.Tensor]:
        net: Any = model()
        net.__class__ = Renaming
        one = trainer(tmp_path / folder, *callbacks, net=net)
        return outcome(one, one.train().training_loss)

    expected = train("plain")
    with pytest.raises(InjectedFault):
        train("d", Breaks(5), LastGasp())
    new_process()
    found = train("d", LastGasp(resume=tmp_path / f"d/checkpoint-{resumed}"))
    assert _differences(found, expected) == []


class Adapter(torch.nn.Module):
    """As PEFT has them: its name has that of the adapter in it, the name in the file has not."""

    def __init__(self) -> None:
        super().__init__()
        self.lora = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 2, bias=False)})
        self.other, self.norm, self.frozen = [torch.nn.Linear(2, 2, bias=False) for _ in range(3)]
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.ones(2))


def test_of_an_adapter_only_what_its_files_lack_is_kept(tmp_path: Path) -> None:
    one, path = Adapter(), tmp_path / "adapter_model.safetensors"
    optimizer = torch.optim.SGD(one.parameters())
    weight = one.get_parameter("lora.default.weight").detach()
    save_file({"lora.weight": weight.clone()}, path)
    optimizer.param_groups[0]["params"] = [p for p in one.parameters() if p is not one.frozen.weight]
    found = left_out(tmp_path, one, one.state_dict(), optimizer, by_name=True)
    assert set(found) == {"other.weight", "norm.weight", "mean"}
    with torch.no_grad():  # one of two alike was written: which of them is not known
        one.norm.weight.copy_(weight)
    both = left_out(tmp_path, one, one.state_dict(), optimizer, by_name=True)
    assert {"lora.default.weight", "norm.weight"} <= set(both)
    other = Adapter()
    put_back(tmp_path, other, both)
    assert torch.equal(other.norm.weight, weight) and torch.equal(other.get_parameter("lora.default.weight"), weight)


_OTHERS = {"other.weight", "norm.weight", "mean"}


@pytest.mark.parametrize(
    ("lacking", "by_name", "kept"), [("", False, set[str]()), ("norm", False, _OTHERS), ("", True, _OTHERS)]
)
def test_weights_under_other_names_count_as_written_unless_trainer_loads_by_name(
    lacking: str, by_name: bool, kept: set[str], tmp_path: Path
) -> None:
    """As `save_pretrained` writes experts: of names that the model has not, and in other shapes. One is tied."""
    one: Any = Adapter()
    one.again = one.other
    optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad])
    written = {f"model.{name}": value.detach().clone().reshape(-1, 1) for name, value in one.state_dict().items()
               if not name.startswith(("again", "lora", lacking or "-"))}  # fmt: skip
    save_file(written | {"lora.default.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    assert set(left_out(tmp_path, one, one.state_dict(), optimizer, by_name=by_name)) == kept
    one.peft_config = {}
    assert set(left_out(tmp_path, one, one.state_dict(), optimizer, by_name=by_name)) == _OTHERS


_PACKAGE = '''
"""As TRL has them."""
import collections
import copy

import torch
from transformers import Trainer, TrainerCallback


class PolicyTrainer(Trainer):
    """Trains for three steps on what it has drawn; logs means; its reference follows the model."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self._step, self._buffered_inputs = 0, None
        self._metrics = {"train": collections.defaultdict(list), "eval": collections.defaultdict(list)}
        self.ref_model = copy.deepcopy(self.model)
        self.hook = lambda: None
        self.add_callback(Follows(self.ref_model))

    def compute_loss(self, model, inputs, *args, **more):
        if model.training:
            if self._step % 3 == 0:
                self._buffered_inputs = [{"weight": torch.rand(2)} for _ in range(3)]
            weight = self._buffered_inputs[self._step % 3]["weight"].sum()
            self._step += 1
            with torch.no_grad():
                distance = self.ref_model(**inputs).loss
            self._metrics["train"]["distance"].append(distance.item())
        loss = super().compute_loss(model, inputs, *args, **more)
        return loss * (weight + distance) if model.training else loss

    def log(self, logs, *args, **more):
        sums = self._metrics["train"]
        super().log(logs | {name: sum(all) / len(all) for name, all in sums.items()}, *args, **more)
        sums.clear()


class Follows(TrainerCallback):
    """Mixes the model into another one, in a way that torch does not count."""

    def __init__(self, ref_model):
        self.ref_model = ref_model

    def on_step_end(self, args, state, control, model=None, **more):
        if state.global_step % 2 == 0:
            for one, other in zip(self.ref_model.parameters(), model.parameters(), strict=True):
                one.data.mul_(0.5).add_(other.data, alpha=0.5)


class Averages(TrainerCallback):
    """Begins with the weights that the training begins with."""

    def __init__(self):
        self.first, self.means, self.copy = [], [], None

    def on_train_begin(self, args, state, control, model=None, **more):
        self.copy = copy.deepcopy(model.lm_head)
        for one in model.lm_head.parameters():
            self.first.append(one.detach().clone())
            self.means.append(one.detach().clone())

    def on_step_end(self, args, state, control, model=None, **more):
        with torch.no_grad():
            for first, mean, one in zip(self.first, self.means, model.lm_head.parameters(), strict=True):
                mean.mul_(0.9).add_(one, alpha=0.1)
                if state.global_step == 11:
                    self.copy.weight.copy_(mean - first)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its module, which counts as one of an installed package."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "policies.py").write_text(_PACKAGE)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("policies")
    del sys.modules["policies"]


def _policy(package: Any, folder: Path, *callbacks: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    averages = package.Averages()
    one = trainer(folder, averages, *callbacks, kind=package.PolicyTrainer)
    found = outcome(one, one.train().training_loss)
    state: Any = one
    found |= {f"reference.{name}": value for name, value in state.ref_model.state_dict().items()}
    found |= {f"mean.{i}": value for i, value in enumerate((*averages.first, *averages.means, averages.copy.weight))}
    return one, found


@pytest.mark.parametrize("resumed", [5, 4], ids=["gasp", "periodic"])
def test_what_a_package_adds_to_trainer_goes_on(
    resumed: int, package: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Draws that further steps are trained on, sums for the log, a reference and averages that follow the model."""
    expected = _policy(package, tmp_path / "plain")[1]
    with pytest.raises(InjectedFault):
        _policy(package, tmp_path / "d", Breaks(5), LastGasp())
    new_process()
    caplog.clear()
    path = tmp_path / f"d/checkpoint-{resumed}"
    found = _policy(package, tmp_path / "d", LastGasp(resume=path))[1]
    assert _differences(found, expected) == []
    assert "training has changed" not in caplog.text and "begins with the script" not in caplog.text


class Reading(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Has what only its process can have."""

    stream: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Open it anew."""
        self.stream = iter([state.global_step])


def test_what_cannot_be_had_again_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the fault, and where a run begins without."""
    with pytest.raises(InjectedFault):
        trainer(tmp_path, Reading(), Breaks(5), LastGasp()).train()
    [incident] = incidents(tmp_path)
    assert "training has changed what cannot be saved: Reading.stream (it cannot be written)" in incident.notes
    new_process()
    caplog.clear()
    trainer(tmp_path, Reading(), LastGasp()).train()
    assert "begins with the script's value (Reading.stream: it cannot be written)" in caplog.text


@pytest.mark.parametrize(("attempt", "steps"), [(1, 12), (0, 7)], ids=["restart", "new job"])
def test_callbacks_of_the_user_go_on_in_a_restart_alone(
    attempt: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that ends each job in time counts anew in the next one."""
    monkeypatch.setenv("LASTGASP_JOB", "night")
    with pytest.raises(InjectedFault):
        trainer(tmp_path, Counting(), Breaks(5), LastGasp()).train()
    new_process()
    monkeypatch.setenv("LASTGASP_ATTEMPT", str(attempt))
    counting = Counting()
    trainer(tmp_path, counting, LastGasp()).train()
    assert counting.steps == steps
    assert ("Counting.steps: is of another job" in caplog.text) is (attempt == 0)


class Unreadable(torch.nn.Linear):
    """Its tensors do not come to the host, as those of some kinds do not."""

    def named_parameters(self, *_: Any, **more: Any) -> Any:
        """What has no numbers that can be read."""
        yield "weight", torch.ones(2).to_sparse()


class Holding(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """A reference that was put aside, one that has no shapes as yet, one that cannot be read, one that changes."""

    def __init__(self) -> None:
        self.aside = torch.nn.Linear(3, 3, device="meta")
        self.lazy, self.unreadable = torch.nn.LazyLinear(3), Unreadable(2, 2)
        self.counting = torch.nn.Linear(1, 1)
        self.counting.weight.data.zero_()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Change it."""
        self.counting.weight.data.add_(1.0)


def test_modules_that_cannot_be_read_do_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGASP_JOB", "night")
    with pytest.raises(InjectedFault):
        trainer(tmp_path, Holding(), Breaks(5), LastGasp()).train()
    [incident] = incidents(tmp_path)
    assert any(note.startswith("Holding.unreadable is not saved, since") for note in incident.notes)
    assert not any("Holding.aside" in note or "Holding.lazy" in note for note in incident.notes)
    new_process()
    monkeypatch.setenv("LASTGASP_ATTEMPT", "1")
    holding = Holding()
    trainer(tmp_path, holding, LastGasp()).train()
    assert holding.counting.weight.item() == 12.0


def test_a_model_that_cannot_be_resumed_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """AdaLoRA's matrices have other shapes in the checkpoint than in the model of the script."""
    net: Any = model()
    net.peft_config = {"default": SimpleNamespace(peft_type="PeftType.ADALORA")}
    trainer(tmp_path, LastGasp(), net=net, max_steps=1).train()
    assert "AdaLoRA gives its matrices other ranks" in caplog.text


def test_an_optimizer_of_other_parameters_is_told_with_the_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path, LastGasp(), max_steps=1, save_steps=1).train()
    new_process()
    other = trainer(tmp_path, LastGasp())
    next(other.model.parameters()).requires_grad_(False)
    with pytest.raises(CheckpointMismatch, match=r"checkpoint-1 .*(?s:.*)Are the same parameters trained"):
        other.train()
