"""What scripts do around Hugging Face's Trainer, on one device in this process: it resumes as plain Trainer does."""

from __future__ import annotations

import json
import shutil
import time
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

import torch
from transformers import Trainer, TrainerCallback

from frameworks.transformers_rig import Breaks, new_process, outcome, trainer
from lastgasp import adapter
from lastgasp.checkpoint import verify
from lastgasp.errors import ConfigError
from lastgasp.testing.faults import InjectedFault
from lastgasp_transformers import LastGasp, state
from lastgasp_transformers.files import LAYOUT
from support.schedule_free import Averages

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


class Lookahead(torch.optim.Optimizer):
    """Wraps another one, and has a state besides."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.optimizer, self.param_groups = inner, inner.param_groups
        self.slow = [one.detach().clone() for group in self.param_groups for one in group["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Every third one goes half of the way."""
        self.optimizer.step(closure)
        self.count += 1
        if self.count % 3 == 0:
            for slow, one in zip(self.slow, (p for group in self.param_groups for p in group["params"]), strict=True):
                one.copy_(slow.lerp_(one, 0.5))

    def state_dict(self) -> dict[str, Any]:
        """With that of the other."""
        return self.optimizer.state_dict() | {"slow": self.slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The same."""
        self.slow, self.count = state["slow"], state["count"]
        self.optimizer.load_state_dict({name: state[name] for name in ("state", "param_groups")})
        self.param_groups = self.optimizer.param_groups


class Masters(torch.optim.Optimizer):
    """Keeps its weights in more digits than the model has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Of those."""
        for group in self.param_groups:
            for one in group["params"]:
                master = self.state[one].setdefault("master", one.detach().double())
                one.copy_(master.sub_(one.grad.double(), alpha=group["lr"] / 3))


def _with(optimizer: Any, folder: Path, *callbacks: Any, **changed: Any) -> Trainer:
    one = trainer(folder, *callbacks, **changed)
    one.optimizer = optimizer(one.model.parameters())
    inner = getattr(one.optimizer, "optimizer", one.optimizer)
    one.lr_scheduler = torch.optim.lr_scheduler.StepLR(inner, 4)
    return one


def _lookahead(params: Any) -> Lookahead:
    return Lookahead(torch.optim.AdamW(params, lr=1e-2))


def test_a_schedule_free_optimizer_goes_on_with_the_weights_that_it_trains(tmp_path: Path) -> None:
    """Trainer saves the others, which it has just evaluated."""
    expected = _trained(_with(Averages, tmp_path / "plain"))
    _with(Averages, tmp_path / "d", LastGasp(), max_steps=4).train()
    new_process()
    assert _differences(_trained(_with(Averages, tmp_path / "d", LastGasp())), expected) == []


class StopsInPrediction(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Raises in the first batch of the first evaluation."""

    def on_prediction_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Raise."""
        raise InjectedFault("while the averaged weights are in the model")


def test_a_schedule_free_optimizer_goes_on_behind_a_fault_in_its_first_evaluation(tmp_path: Path) -> None:
    expected = _trained(_with(Averages, tmp_path / "plain"))
    with pytest.raises(InjectedFault):
        _with(Averages, tmp_path / "d", StopsInPrediction(), LastGasp()).train()
    assert json.loads((tmp_path / "d/checkpoint-4.manifest.json").read_text())["kind"] == "gasp"
    new_process()
    assert _differences(_trained(_with(Averages, tmp_path / "d", LastGasp())), expected) == []


@pytest.mark.parametrize("optimizer", [_lookahead, Masters])
def test_all_that_an_optimizer_keeps_is_saved_and_comes_back(tmp_path: Path, optimizer: Any) -> None:
    expected = _trained(_with(optimizer, tmp_path / "plain"))
    with pytest.raises(InjectedFault):
        _with(optimizer, tmp_path / "d", LastGasp(), Breaks(5)).train()
    new_process()
    assert _differences(_trained(_with(optimizer, tmp_path / "d", LastGasp())), expected) == []


def test_a_wrapped_update_is_not_complete_before_what_wraps_it_is(tmp_path: Path) -> None:
    """Raised between the two: the step is lost, not saved as complete."""

    def breaks(params: Any) -> Lookahead:
        made = _lookahead(params)
        made.slow = made.slow[:3]  # the third step raises behind that of the inner one
        return made

    with pytest.raises(ValueError, match="longer"):
        _with(breaks, tmp_path, LastGasp()).train()
    assert not [*tmp_path.glob("checkpoint-*")]


def test_an_optimizer_whose_state_cannot_be_put_together_is_refused(tmp_path: Path) -> None:
    class Other(Lookahead):
        def state_dict(self) -> dict[str, Any]:
            return {"slow": self.slow, "base": self.optimizer.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.optimizer.load_state_dict(state["base"])

    with pytest.raises(ConfigError, match="param_groups"):
        _with(lambda params: Other(torch.optim.SGD(params)), tmp_path, LastGasp()).train()


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


def _freezes(one: Trainer) -> Trainer:
    for name, value in one.model.named_parameters():
        value.requires_grad_(".h.0." not in name)
    return one


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2)


def test_what_a_new_job_unfreezes_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """But not in a restart of the one that has frozen it."""
    monkeypatch.setenv("LASTGASP_JOB", "one")
    with pytest.raises(InjectedFault):
        _freezes(_with(_sgd, tmp_path, LastGasp(), Breaks(4))).train()
    for job, attempt, all_trained in (("one", 1, False), ("two", 0, True)):
        monkeypatch.setenv("LASTGASP_JOB", job)
        monkeypatch.setenv("LASTGASP_ATTEMPT", str(attempt))
        new_process()
        one = _with(_sgd, tmp_path, LastGasp(), Breaks(5))
        one.model.eval()  # as `from_pretrained` gives it
        with pytest.raises(InjectedFault):
            one.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert all(value.requires_grad for value in one.model.parameters()) is all_trained
        shutil.rmtree(tmp_path / "checkpoint-5")
    assert "as when the checkpoint was saved" not in caplog.text


def test_what_training_itself_has_unfrozen_stays_so_in_a_new_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unfreezes(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            more["model"].requires_grad_(True)

    _freezes(_with(_sgd, tmp_path, LastGasp(), Unfreezes(), max_steps=4)).train()
    new_process()
    one = _freezes(_with(_sgd, tmp_path, LastGasp(), max_steps=5))
    one.train()
    assert all(value.requires_grad for value in one.model.parameters())
    assert "as when the checkpoint was saved" in caplog.text


class PassesOn(Trainer):  # type: ignore[misc,unused-ignore]
    """Names no parameter."""

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        super()._save_checkpoint(*args, **options)

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        super()._load_from_checkpoint(checkpoint_path)


def test_subclasses_may_name_parameters_in_their_way(tmp_path: Path) -> None:
    for steps in (4, 8):
        new_process()
        one = trainer(tmp_path, LastGasp(), kind=PassesOn, max_steps=steps)
        one.train()
        assert one.state.global_step == steps


def test_the_time_of_earlier_attempts_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As their steps and tokens do, in what is logged of the speed."""
    with monkeypatch.context() as later:
        passed = chain([0.0], repeat(1000.0))
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + next(passed))
        later.setattr(state, "adapter", SimpleNamespace(**vars(adapter) | {"clock": clock}))
        with pytest.raises(InjectedFault):
            trainer(tmp_path, LastGasp(), Breaks(5)).train()
    new_process()
    metrics = trainer(tmp_path, LastGasp()).train().metrics
    assert 1000 < metrics["train_runtime"] < 1300
    assert metrics["train_steps_per_second"] < 0.1
