"""What sentence-transformers adds to Trainer: models with files of their own, losses whose weights a callback sets."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

import torch

from frameworks.transformers_rig import Breaks, new_process, outcome, trainer
from lastgasp.testing.faults import InjectedFault
from lastgasp_transformers import LastGasp
from lastgasp_transformers.kept import KeptTrainer
from support.launchers import incidents
from support.train_transformers import VOCABULARY

pytestmark = [pytest.mark.usefixtures("restored_environ"), pytest.mark.timeout(300)]

_PACKAGE = '''
"""As sentence-transformers has them."""
import json
import os

import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback


class Encoder(torch.nn.Module):
    """Its two parts are written apart, under other names; the weights of the first one are tied."""

    def __init__(self, size):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.head = torch.nn.Embedding(size, 4), torch.nn.Linear(4, 4)
        self.out = torch.nn.Linear(4, size, bias=False)
        self.out.weight = self.body.weight
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, input_ids, labels=None):
        if self.training:
            self.passes += 1
        return self.out(self.head(self.body(input_ids)))

    def save_pretrained(self, path, create_model_card=True):
        assert not create_model_card or os.environ.get("CARDS")
        os.makedirs(os.path.join(path, "1_Head"), exist_ok=True)
        save_file({"weight": self.body.state_dict()["weight"]}, os.path.join(path, "model.safetensors"))
        rest = self.head.state_dict() | {"passes": self.state_dict()["passes"]}
        save_file(rest, os.path.join(path, "1_Head", "model.safetensors"))
        with open(os.path.join(path, "modules.json"), "w") as file:
            json.dump(["", "1_Head"], file)


class Loss(torch.nn.Module):
    """Has a weight that is set while it trains."""

    def __init__(self, model):
        super().__init__()
        self.model, self.weight = model, 0.5

    def forward(self, input_ids, labels):
        logits = self.model(input_ids)
        found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return found + self.weight * logits.square().mean(), logits


class Weight(TrainerCallback):
    """Sets it where it has changed."""

    def __init__(self, loss):
        self.loss, self.most, self.current = loss, loss.weight, 0.0

    def on_train_begin(self, args, state, control, **more):
        self.loss.weight = self.current

    def on_step_begin(self, args, state, control, **more):
        weight = self.most * min(state.global_step / 3, 1)
        if weight != self.current:
            self.loss.weight = self.current = weight


class EncoderTrainer(Trainer):
    """Ends with the model of step 4, as with load_best_model_at_end."""

    def __init__(self, model, *args, **more):
        super().__init__(model, *args, **more)
        self.loss = Loss(model)
        self.add_callback(Weight(self.loss))

    def _finalize_training(self, *args, **more):
        self.last = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._load_from_checkpoint(os.path.join(self.args.output_dir, "checkpoint-4"))
        return super()._finalize_training(*args, **more)

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        loss, logits = self.loss(**inputs)
        return (loss, {"logits": logits}) if return_outputs else loss

    def _save(self, output_dir=None, state_dict=None):
        self.model.save_pretrained(output_dir, create_model_card=bool(os.environ.get("CARDS")))

    def _load_from_checkpoint(self, path):
        with open(os.path.join(path, "modules.json")) as file:
            body, rest = (load_file(os.path.join(path, part, "model.safetensors")) for part in json.load(file))
        passes = rest.pop("passes")
        head = {f"head.{name}": value for name, value in rest.items()}
        tied = {"body.weight": body["weight"], "out.weight": body["weight"], "passes": passes}
        self.model.load_state_dict(head | tied)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its module, which counts as one of an installed package."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "sentences.py").write_text(_PACKAGE)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("sentences")
    del sys.modules["sentences"]


@pytest.mark.parametrize("resumed", [5, 4], ids=["gasp", "periodic"])
def test_an_encoder_with_files_and_a_loss_of_its_own_goes_on(resumed: int, package: Any, tmp_path: Path) -> None:
    def train(folder: str, *callbacks: Any) -> dict[str, torch.Tensor]:
        net = package.Encoder(VOCABULARY)
        one = trainer(tmp_path / folder, *callbacks, net=net, kind=package.EncoderTrainer, save_steps=2)
        ended: Any = one
        found = outcome(one, one.train().training_loss)
        return found | {f"last.{name}": value for name, value in ended.last.items()}

    expected = train("plain")
    with pytest.raises(InjectedFault):
        train("d", Breaks(5), LastGasp())
    assert [incident.ending for incident in incidents(tmp_path / "d")] == ["saved"]
    new_process()
    found = train("d", LastGasp(resume=tmp_path / f"d/checkpoint-{resumed}"))
    differ = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not differ, differ


def test_a_loss_that_is_entered_again_has_the_bare_model(package: Any, tmp_path: Path) -> None:
    """As in a new process: in its first step it was given the model in DDP."""
    net = package.Encoder(VOCABULARY)
    one: Any = trainer(tmp_path, net=net, kind=package.EncoderTrainer)
    kept = KeptTrainer(one)
    one.loss.model = torch.nn.Sequential(net)
    kept.reset()
    assert one.loss.model is net
