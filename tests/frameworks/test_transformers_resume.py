"""Hugging Face's Trainer on one device, in this process: from what it resumes, and what it does then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

import torch
from click.testing import CliRunner
from torch.utils.data import DataLoader, RandomSampler
from transformers import Trainer, TrainerCallback

from frameworks.transformers_rig import Breaks, new_process, outcome, trainer
from lastgasp.cli import main
from lastgasp.errors import DamagedCheckpoint, NoGoodCheckpoint
from lastgasp.testing.faults import InjectedFault
from lastgasp_transformers import LastGasp
from lastgasp_transformers.loading import REREAD
from lastgasp_transformers.own import OwnSaves
from support.train_transformers import VOCABULARY, Tokens

pytestmark = [pytest.mark.usefixtures("restored_environ", "first_training"), pytest.mark.timeout(300)]


@pytest.fixture
def first_training() -> None:
    """Of its script, whatever other tests have trained."""
    new_process()


class StopsInEvaluation(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Raises in an evaluation, before the save of that step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Raise once."""
        if state.global_step == self._step:
            self._step = -1
            raise InjectedFault("between the evaluation and the save")


def _differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in {**one, **other} if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What a Trainer without lastgasp comes to."""
    one = trainer(tmp_path_factory.mktemp("plain"))
    return outcome(one, one.train().training_loss)


def test_a_save_that_was_due_is_done_in_another_directory(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Of a checkpoint named by its path. What was saved anew can be resumed from just as well."""
    trainer(tmp_path / "a", LastGasp()).train()
    one = trainer(tmp_path / "b", LastGasp(), Breaks(4))
    with pytest.raises(InjectedFault):
        one.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-4"))
    (tmp_path / "a").rename(tmp_path / "gone")
    new_process()
    found = trainer(tmp_path / "b", LastGasp())
    assert _differences(outcome(found, found.train().training_loss), undisturbed) == []
    listed = CliRunner().invoke(main, ["verify", str(tmp_path / "b")])
    assert listed.exit_code == 0, listed.output
    assert "checkpoint-4" in listed.output


def test_a_good_checkpoint_is_not_written_over_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    with pytest.raises(InjectedFault):
        trainer(tmp_path / "link", LastGasp(), Breaks(4)).train()
    before = (tmp_path / "a/checkpoint-4/model.safetensors").stat().st_mtime_ns
    new_process()
    one = trainer(tmp_path / "link", LastGasp(), Breaks(4))
    with pytest.raises(InjectedFault):
        one.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-4"))
    assert (tmp_path / "a/checkpoint-4/model.safetensors").stat().st_mtime_ns == before


def test_a_further_training_resumes_where_its_save_was_due(
    tmp_path: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Its gasp is in fit-1, and Trainer saves in output_dir."""
    trainer(tmp_path, LastGasp(), max_steps=1).train()
    other = trainer(tmp_path, LastGasp(), StopsInEvaluation(4))
    with pytest.raises(InjectedFault):
        other.train()
    assert (tmp_path / "fit-1/checkpoint-4/lastgasp.pt").exists()
    assert _differences(outcome(other, other.train().training_loss), undisturbed) == []


def test_a_finished_training_continues_with_more_epochs(tmp_path: Path) -> None:
    """As Trainer alone does; what is resumed is the last checkpoint of a training that has come to its end."""

    def train(folder: Path, *callbacks: Any) -> dict[str, torch.Tensor]:
        for epochs in (2.0, 3.0):
            new_process()
            one = trainer(folder, *callbacks, num_train_epochs=epochs)
            one.train_dataset = Tokens(12)
            one.train(resume_from_checkpoint=epochs > 2)
        assert one.state.global_step == 18
        return {name: value.clone() for name, value in one.model.state_dict().items()}

    assert _differences(train(tmp_path / "d", LastGasp()), train(tmp_path / "plain")) == []


class Budget(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Ends a job in time, with a save."""

    def __init__(self) -> None:
        self._left = 3

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """After three of its steps."""
        self._left -= 1
        if self._left == 0:
            control.should_save = control.should_training_stop = True


def test_a_training_that_a_callback_has_stopped_continues_in_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTGASP_JOB", "night")  # the same for all
    plain = trainer(tmp_path / "plain", max_steps=8)
    expected, ends = outcome(plain, plain.train().training_loss), []
    for _ in range(3):
        new_process()
        one = trainer(tmp_path / "d", LastGasp(), Budget(), max_steps=8)
        found = outcome(one, one.train().training_loss)
        ends.append(one.state.global_step)
    assert ends == [3, 6, 8]
    assert _differences(found, expected) == []


def test_a_restart_of_the_job_that_a_callback_has_stopped_ends_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Undisturbed it would have ended there. Of what another job has stopped, nothing is to end."""
    monkeypatch.setenv("LASTGASP_JOB", "one")
    trainer(tmp_path, LastGasp(), Budget()).train()
    monkeypatch.setenv("LASTGASP_ATTEMPT", "1")
    for job, last in (("one", 3), ("two", 4)):
        monkeypatch.setenv("LASTGASP_JOB", job)
        new_process()
        one = trainer(tmp_path, LastGasp(), max_steps=4)
        one.train()
        assert one.state.global_step == last
        assert caplog.text.count("its callbacks had ended the training") == 1


def test_no_evaluation_is_due_for_a_script_without_one(tmp_path: Path) -> None:
    with pytest.raises(InjectedFault):
        trainer(tmp_path, LastGasp(), Breaks(4)).train()
    new_process()
    one = trainer(tmp_path, LastGasp(), eval_strategy="no", max_steps=5)
    one.eval_dataset = None
    one.train()
    assert one.state.global_step == 5


def test_the_older_checkpoint_stays_until_the_new_one_is_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With save_total_limit=1 it is the only one for as long as the new one has no manifest."""
    whole, there = OwnSaves.add_aux, list[str]()

    def refuses(saves: OwnSaves, save: Any, aux: Any) -> None:
        there.extend(sorted(path.name for path in tmp_path.glob("checkpoint-*")))
        if save.step == 8:
            raise OSError("no space left on device")
        whole(saves, save, aux)

    monkeypatch.setattr(OwnSaves, "add_aux", refuses)
    with pytest.raises(InjectedFault):
        trainer(tmp_path, LastGasp(), Breaks(9), save_total_limit=1, metric_for_best_model=None).train()
    assert there[-3:] == ["checkpoint-4", "checkpoint-4.manifest.json", "checkpoint-8"]
    assert (tmp_path / "checkpoint-4/lastgasp.pt").exists()
    new_process()
    trainer(tmp_path, LastGasp(), save_total_limit=1, metric_for_best_model=None).train()
    left = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert left == {"checkpoint-12", "checkpoint-12.manifest.json"}


def test_a_path_may_be_any_path(tmp_path: Path) -> None:
    trainer(tmp_path, LastGasp()).train()
    new_process()
    one = trainer(tmp_path, LastGasp(), Breaks(4))
    with pytest.raises(InjectedFault):
        one.train(resume_from_checkpoint=tmp_path / "checkpoint-4")
    assert one.state.global_step == 4


class OwnSaving(torch.nn.Module):
    """No model of transformers; its way to be saved is not theirs, as that of `PyTorchModelHubMixin`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.head = torch.nn.Embedding(VOCABULARY, 4), torch.nn.Linear(4, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """As Trainer wants it."""
        logits = self.head(self.embedding(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    def save_pretrained(self, folder: Path) -> None:
        """Trainer does not call it."""
        raise AssertionError


def test_a_model_with_a_save_pretrained_of_its_own_is_saved_as_trainer_saves_it(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", net=OwnSaving())
    expected = outcome(plain, plain.train().training_loss)
    one = trainer(tmp_path / "d", LastGasp(), Breaks(5), net=OwnSaving())
    with pytest.raises(InjectedFault):
        one.train()
    assert (tmp_path / "d/checkpoint-5/model.safetensors").exists()
    assert _differences(outcome(one, one.train().training_loss), expected) == []


def test_weights_alone_are_not_written_into_a_good_checkpoint(tmp_path: Path) -> None:
    """save_only_model: a gasp is resumed from where Trainer was to save."""
    one = trainer(tmp_path, LastGasp(), StopsInEvaluation(4), Breaks(6), save_only_model=True)
    for _ in range(2):
        with pytest.raises(InjectedFault):
            one.train()
    listed = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert listed.exit_code == 0, listed.output
    assert "checkpoint-4" in listed.output


def test_weights_alone_are_no_part_of_an_abandoned_checkpoint(tmp_path: Path) -> None:
    """They are of another run than its optimizer."""
    with pytest.raises(InjectedFault):
        trainer(tmp_path, LastGasp(), StopsInEvaluation(4)).train()
    new_process()
    trainer(tmp_path, LastGasp(resume="never"), save_only_model=True, max_steps=4).train()
    assert not (tmp_path / "checkpoint-4.manifest.json").exists()
    names = {path.name for path in (tmp_path / "checkpoint-4").iterdir()}
    assert "model.safetensors" in names
    assert not names & {"optimizer.pt", "lastgasp.pt"}


def test_checkpoints_of_weights_alone_are_not_passed_over_unseen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainer resumes from them, without the optimizer: asked to, lastgasp refuses, and does it for a path."""
    trainer(tmp_path, save_only_model=True, max_steps=4).train()
    one = trainer(tmp_path, LastGasp())
    with pytest.raises(NoGoodCheckpoint, match=r"weights alone") as refused:
        one.train(resume_from_checkpoint=True)
    assert "checkpoint-4" in str(refused.value)
    assert "resume_from_checkpoint=<path>" in str(refused.value)
    new_process()
    trainer(tmp_path, LastGasp(), max_steps=1).train()
    assert caplog.text.count("weights alone") == 1
    new_process()
    named = trainer(tmp_path, LastGasp(), Breaks(6))
    with pytest.raises(InjectedFault):
        named.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert named.state.global_step == 6


def test_an_incomplete_checkpoint_is_not_loaded_by_its_name(tmp_path: Path) -> None:
    trainer(tmp_path, LastGasp(), max_steps=4).train()
    (tmp_path / "checkpoint-4.manifest.json").unlink()
    (tmp_path / "checkpoint-4/checkpoint-is-incomplete.txt").touch()
    new_process()
    with pytest.raises(DamagedCheckpoint, match="incomplete"):
        trainer(tmp_path, LastGasp()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_trainer_that_trains_on_resumes_from_what_it_has_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With resume_from_checkpoint=True, as Trainer does; also in a restart of the job."""

    def train(folder: Path, *callbacks: Any) -> dict[str, torch.Tensor]:
        new_process()
        one = trainer(folder, *callbacks, num_train_epochs=1.0)
        one.train_dataset = Tokens(12)
        one.train()
        assert one.state.global_step == 6
        one.args.num_train_epochs = 3.0
        losses = one.train(resume_from_checkpoint=True)
        assert one.state.global_step == 18
        return outcome(one, losses.training_loss)

    expected = train(tmp_path / "plain")
    monkeypatch.setenv("LASTGASP_JOB", "one")
    for after in (6, 9):
        folder = tmp_path / f"d{after}"
        monkeypatch.setenv("LASTGASP_ATTEMPT", "0")
        with pytest.raises(InjectedFault):
            train(folder, LastGasp(), Breaks(after))
        monkeypatch.setenv("LASTGASP_ATTEMPT", "1")
        found = train(folder, LastGasp())
        assert [name for name in _differences(found, expected) if name not in ("loss", "logged")] == []
        assert torch.equal(found["logged"][:-1], expected["logged"][:-1])


class BestAt2(Trainer):  # type: ignore[misc,unused-ignore]
    """Whose best model is that of step 2."""

    best = 2

    def evaluate(self, *args: Any, **more: Any) -> Any:
        """Step 1 is not evaluated."""
        return super().evaluate(*args, **more) | {"eval_loss": float(abs(self.state.global_step - self.best))}


class BestAt4(BestAt2):
    """Whose best model is that of step 4."""

    best = 4


def _differences_of_best(folder: Path, kind: type[Trainer], fault: TrainerCallback) -> list[str]:
    """In the weights at the end, between a training that was disturbed and one that was not. Saved every four steps."""

    def train(one: Trainer) -> dict[str, torch.Tensor]:
        one.train()
        return {name: value.clone() for name, value in one.model.state_dict().items()}

    wanted = {"eval_steps": 2, "load_best_model_at_end": True}
    expected = train(trainer(folder / "plain", kind=kind, **wanted))
    with pytest.raises(InjectedFault):
        trainer(folder / "d", LastGasp(), fault, kind=kind, **wanted).train()
    new_process()
    return _differences(train(trainer(folder / "d", LastGasp(), kind=kind, **wanted)), expected)


def test_a_gasp_between_two_saves_is_not_the_best_model(tmp_path: Path) -> None:
    """Nothing is loaded at the end of an undisturbed training, whose best step was not saved."""
    assert _differences_of_best(tmp_path, BestAt2, Breaks(2)) == []
    assert (tmp_path / "d/checkpoint-2.manifest.json").exists()
    states = [json.loads((tmp_path / run / "checkpoint-12/trainer_state.json").read_text()) for run in ("plain", "d")]
    of_best = [{name: value for name, value in one.items() if name.startswith("best_")} for one in states]
    assert of_best[0] == of_best[1] and of_best[1]["best_global_step"] == 2


@pytest.mark.parametrize("fault", [Breaks(4), StopsInEvaluation(4)])
def test_a_gasp_in_place_of_a_save_is_the_best_model(fault: TrainerCallback, tmp_path: Path) -> None:
    assert _differences_of_best(tmp_path, BestAt4, fault) == []


def test_what_trainer_removes_at_the_end_leaves_no_manifest(tmp_path: Path) -> None:
    """With save_total_limit=1 all but the best one."""
    wanted = {"load_best_model_at_end": True, "save_total_limit": 1}
    trainer(tmp_path, LastGasp(), kind=BestAt4, **wanted).train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-4.manifest.json"]
    listed = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert listed.exit_code == 0, listed.output


class Evaluated(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Knows after which steps there were evaluations."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Count it."""
        self.steps.append(state.global_step)


@pytest.mark.parametrize(("job", "steps"), [("one", [0, 4, 8]), ("two", [0, 2, 4, 8])])
def test_the_start_of_a_job_is_evaluated(
    job: str, steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With eval_on_start. Loggers would get a point more in each restart; a new job is evaluated as by Trainer."""
    seen = Evaluated()
    wanted: dict[str, Any] = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 4, "max_steps": 8}
    monkeypatch.setenv("LASTGASP_JOB", "one")
    with pytest.raises(InjectedFault):
        trainer(tmp_path, LastGasp(), seen, Breaks(2), **wanted).train()
    monkeypatch.setenv("LASTGASP_JOB", job)
    monkeypatch.setenv("LASTGASP_ATTEMPT", "1")
    new_process()
    trainer(tmp_path, LastGasp(), seen, **wanted).train()
    assert seen.steps == steps


class OwnLoader(Trainer):  # type: ignore[misc,unused-ignore]
    """Gives torch's own loader, whose order is drawn from torch's random numbers."""

    def get_train_dataloader(self) -> Any:
        """Shuffled."""
        return DataLoader(Tokens(12), self.args.train_batch_size, shuffle=True, collate_fn=self.data_collator)


def test_a_loader_of_the_scripts_own_has_the_order_that_trainer_alone_gives_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the first epoch of a start: it is drawn under the random state of then, not of the step that was saved."""
    one = trainer(tmp_path / "plain", kind=OwnLoader)
    straight = outcome(one, one.train().training_loss)
    new_process()
    with pytest.raises(InjectedFault):
        trainer(tmp_path / "a", LastGasp(), Breaks(1), kind=OwnLoader).train()
    new_process()
    found = trainer(tmp_path / "a", LastGasp(), kind=OwnLoader)
    assert _differences(outcome(found, found.train().training_loss), straight) == []
    assert REREAD in caplog.text


class OwnSampler(Trainer):  # type: ignore[misc,unused-ignore]
    """The order depends on one random number, and the loader's own generator gives the seed of each pass."""

    def get_train_dataloader(self) -> Any:
        """Shuffled."""
        tokens, own = Tokens(12), torch.Generator()
        return DataLoader(tokens, self.args.train_batch_size, sampler=RandomSampler(tokens), generator=own,
                          collate_fn=self.data_collator)  # fmt: skip


def test_an_order_that_one_number_decides_is_noted_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the second epoch it is that of the first one, as with Trainer alone."""
    with pytest.raises(InjectedFault):
        trainer(tmp_path, LastGasp(), Breaks(8), kind=OwnSampler).train()
    new_process()
    trainer(tmp_path, LastGasp(), kind=OwnSampler).train()
    assert REREAD in caplog.text
