"""What ModelCheckpoint saves behind a fault: the same files as without it; and what the optimizer goes on with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning as L
import msgspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from frameworks.fit_rig import Boom, Job, Small, data, fit, seed, weights
from lastgasp.checkpoint import chunks, manifest
from lastgasp.pytorch import one_pass
from lastgasp.pytorch.io import save_verified
from lastgasp_lightning.checkpoint_io import LAYOUT
from support.schedule_free import Averages

pytestmark = pytest.mark.usefixtures("restored_environ")


class Worse(L.Callback):
    """A metric of the validation that was best at its first."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("worse", float(trainer.global_step))


class StrikeAtValidation(L.Callback):
    """Raises when the first validation begins, in the first attempt."""

    def __init__(self, strikes: bool) -> None:
        self.strikes = strikes

    def on_validation_start(self, *args: object) -> None:
        if self.strikes:
            raise Boom


def saves(folder: Path, saving: dict[str, Any], strike: int | None, validation: bool, **options: Any) -> dict[str, Any]:
    """Names, and what they link to or which step they are of, behind one fault."""
    job = Job(folder, {"num_sanity_val_steps": 0, "enable_checkpointing": True, **options})
    for attempt in range(2):
        seed(1)
        job.restart()
        keeps = ModelCheckpoint(folder / "kept", "{step}", **saving)
        strikes = StrikeAtValidation(validation and not attempt)
        first = ModelCheckpoint(folder / "first", every_n_train_steps=4) if strike == 4 else Worse()
        trainer = job.make(Worse(), first, keeps, strikes, strike=None if attempt else strike)
        loaders = DataLoader(data(), 4, shuffle=True), DataLoader(data(2, 8), 4)
        if fit(trainer, Small(), loaders[0], val_dataloaders=loaders[1]):
            break
    files = [path for path in (folder / "kept").iterdir() if path.suffix == ".ckpt"]
    return {
        path.name: path.readlink().name if path.is_symlink()
        else torch.load(path, weights_only=False)["global_step"]
        for path in files
    }  # fmt: skip


@pytest.mark.parametrize("last", [True, "link"])
def test_last_stays_what_it_was(tmp_path: Path, last: Any) -> None:
    """Where nothing has become better since: at its end ModelCheckpoint saves it only if it has never saved."""
    saving = {"monitor": "worse", "save_top_k": 1, "save_last": last}
    assert saves(tmp_path / "straight", saving, None, False) == saves(tmp_path / "struck", saving, 8, False)


@pytest.mark.parametrize("strike", [None, 4])
def test_what_waits_for_a_validation_is_saved_behind_it(strike: int | None, tmp_path: Path) -> None:
    """The metric is not there before; the fault comes in between, in a job that begins with another one's file, too."""
    saving = {"monitor": "worse", "save_top_k": -1, "every_n_train_steps": 4}
    straight = saves(tmp_path / "straight", saving, None, False, val_check_interval=5)
    assert "step=5.ckpt" in straight
    assert saves(tmp_path / "struck", saving, strike, strike is None, val_check_interval=5) == straight


class CutShort(ModelCheckpoint):
    """Raises before or behind its save of step 6, where it `strikes`."""

    strikes = ""

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        for moment in ("before", "behind"):
            if self.strikes == moment and trainer.global_step == 6:
                raise Boom
            if moment == "before":
                super()._save_checkpoint(trainer, filepath)


class Raises(L.Callback):
    """In the hook in which ModelCheckpoint saves, before it is its turn."""

    strikes = False

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        if self.strikes and trainer.global_step == 6:
            raise Boom


def written_already(gasp: Path, file: Path) -> None:
    """As if rank 0 had written its file by then, and waited for a rank that was killed."""
    found = manifest.read(LAYOUT.manifest_path(gasp))
    assert isinstance(found, manifest.Manifest)
    shutil.copy(gasp, file)
    own = manifest.Provenance(format="lightning", step=6, kind="periodic", job=found.job, fit=found.fit)
    files = (msgspec.structs.replace(found.files[0], path=file.name),)
    LAYOUT.manifest_path(file).write_bytes(manifest.encode(manifest.build(own, files)))


@pytest.mark.parametrize("moment", ["before", "behind", "epoch", "callback", "written"])
def test_a_save_that_the_fault_cut_short_is_made_up(tmp_path: Path, moment: str) -> None:
    """The job resumes behind the step whose save was due, of all or of the second alone: nobody else would make it."""
    found: dict[str, dict[str, Any]] = {}
    for name in ("straight", moment):
        epochs = 1 if moment in ("behind", "epoch") else 2  # of one epoch, step 6 is the last that writes last.ckpt
        job = Job(tmp_path / name, {"enable_checkpointing": True, "max_epochs": epochs})
        for attempt in range(2):
            seed(1)
            job.restart()
            saving: dict[str, Any] = {"every_n_epochs": 1} if moment == "epoch" else {"every_n_train_steps": 3}
            saving |= {"save_top_k": 1 if moment == "before" else -1, "save_last": True}
            keeps, raises = CutShort(job.folder / "kept", "{step}", **saving), Raises()
            keeps.strikes = {"epoch": "behind"}.get(name, name) if not attempt else ""
            raises.strikes = name in ("callback", "written") and not attempt
            other = ModelCheckpoint(job.folder / "kept", "other-{step}", every_n_train_steps=2, save_top_k=-1)
            ended = fit(job.make(keeps, other, raises), Small())
            gasp = job.folder / "ckpts/gasp-step=00000006.ckpt"
            assert gasp.exists() == (name in ("before", "callback", "written"))
            assert ended == (bool(attempt) or name == "straight")
            if ended:
                break
            if name == "written":
                written_already(gasp, job.folder / "kept/step=6.ckpt")
        files = {path.name: torch.load(path, weights_only=False) for path in (job.folder / "kept").glob("*.ckpt")}
        found[name] = {
            file: (one["global_step"], one["epoch"], one["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"],
                   {key: value.tolist() for key, value in one["state_dict"].items()})
            for file, one in files.items()
        }  # fmt: skip
    assert sorted(found["straight"]) == sorted(found[moment])
    assert found["straight"] == found[moment]


def test_what_a_checkpoint_says_of_its_callbacks_is_what_it_would_say(tmp_path: Path) -> None:
    """Lightning saves the score of the last save, and does not load it: files behind a fault said there was none."""
    found = {}
    for name, strikes in {"straight": (None,), "struck": (8, 9, None)}.items():
        job = Job(tmp_path / name, {"enable_checkpointing": True, "num_sanity_val_steps": 0})
        for strike in strikes:
            seed(1)
            job.restart()
            best = ModelCheckpoint(job.folder / "best", "{step}", monitor="worse", save_top_k=1)
            every = ModelCheckpoint(job.folder / "every", "{step}", every_n_train_steps=10)
            loaders = DataLoader(data(), 4, shuffle=True), DataLoader(data(2, 8), 4)
            assert fit(
                job.make(Worse(), best, every, strike=strike), Small(), loaders[0], val_dataloaders=loaders[1]
            ) == (strike is None)
        saved = torch.load(job.folder / "every/step=10.ckpt", weights_only=False)["callbacks"]
        found[name] = {key: state["current_score"] for key, state in saved.items() if "'worse'" in key}
    assert [float(score) for score in found["straight"].values()] == [6.0]
    assert found["struck"] == found["straight"]


def test_from_a_copy_nothing_is_made_up(tmp_path: Path) -> None:
    """Its user has it elsewhere, and the files of the job that has saved it: they stay as they are without lastgasp."""
    for steps in (4, 5):
        job = Job(tmp_path, {"enable_checkpointing": True, "max_steps": steps})
        keeps = [ModelCheckpoint(tmp_path / mode, "{step}", mode=mode, every_n_train_steps=2, save_top_k=-1)
                 for mode in ("min", "max")]  # fmt: skip
        given = {"ckpt_path": shutil.copy(tmp_path / "min/step=4.ckpt", tmp_path / "copy.ckpt")} if steps == 5 else {}
        assert fit(job.make(*keeps), Small(), **given)
        assert sorted(path.name for path in tmp_path.glob("max/*.ckpt")) == ["step=2.ckpt", "step=4.ckpt"]


class Averaged(Small):
    """Validates with the averages of its weights."""

    strikes: int | None = None

    def configure_optimizers(self) -> Any:
        return Averages(self.parameters())

    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].train()  # type: ignore[attr-defined]

    def on_validation_epoch_start(self) -> None:
        self.trainer.optimizers[0].eval()  # type: ignore[attr-defined]

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        if self.trainer.current_epoch == self.strikes:
            raise Boom
        super().validation_step(batch, batch_idx)


def averaged(folder: Path, *attempts: tuple[int, int | None]) -> dict[str, torch.Tensor]:
    """Weights behind attempts: the epochs of each, and in which one's validation it is struck."""
    job = Job(folder, {"num_sanity_val_steps": 0, "enable_checkpointing": True})
    for epochs, strikes in attempts:
        seed(1)
        job.restart()
        model = Averaged()
        model.strikes = strikes
        trainer = job.make(ModelCheckpoint(folder / "ckpts", save_top_k=-1), max_epochs=epochs)
        fit(trainer, model, DataLoader(data(), 4, shuffle=True), val_dataloaders=DataLoader(data(2, 8), 4))
    return weights(model)


def test_a_schedule_free_optimizer_goes_on_with_the_weights_that_it_trains(tmp_path: Path) -> None:
    """Validations put the others into the model; from the second one on they are copied before."""
    expected = averaged(tmp_path / "straight", (3, None))
    for name, first in {
        "saved behind a validation": (2, None),
        "struck in the first": (3, 0),
        "struck in the second": (3, 1),
    }.items():
        found = averaged(tmp_path / name, first, (3, None))
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == [], name


def test_weights_that_are_exchanged_while_they_are_written_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread writes, and training goes on up to its next update."""
    model = Averaged()

    def exchanges(*args: Any) -> None:
        save_verified(*args)
        model.trainer.optimizers[0].eval()  # type: ignore[attr-defined]

    monkeypatch.setattr("lastgasp_lightning.run.save_verified", exchanges)
    assert not fit(Job(tmp_path).make(strike=5), model)
    assert not [*tmp_path.rglob("*.ckpt")]


class Seldom(Small):
    """Has a layer that every third step uses, and keeps zeros in the place of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.second = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        out = self.net(batch[0]) + (self.second(batch[0]) if batch_idx % 3 == 1 else 0.0)
        loss: torch.Tensor = (out - batch[1]).square().mean()
        return loss

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


def test_gradients_that_are_zeros_are_there_again(tmp_path: Path) -> None:
    """Adam changes what has one, though it be zeros; what has none it leaves alone."""

    def trained(folder: Path, *strikes: int | None) -> dict[str, torch.Tensor]:
        job = Job(folder)
        for strike in strikes:
            seed(1)
            job.restart()
            fit(job.make(strike=strike), model := Seldom())
        return weights(model)

    expected, found = trained(tmp_path / "straight", None), trained(tmp_path / "struck", 9, None)
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []


def test_a_resume_reads_each_chunk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank verifies is what Lightning restores."""
    job, check, read = Job(tmp_path), chunks._check, list[tuple[str, int]]()

    def counted(chunk: chunks.Chunk, *rest: Any) -> Any:
        read.append((chunk.path.name, chunk.index))
        return check(chunk, *rest)

    seed(1)
    assert not fit(job.make(strike=7), Small())
    job.restart()
    monkeypatch.setattr(chunks, "_check", counted)
    model = Small()
    assert fit(job.make(), model) and model.trained[0] == 7
    assert read == [("gasp-step=00000007.ckpt", 0)]


def test_it_is_loaded_as_the_user_wants_it_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, parsed = Job(tmp_path), list[Path]()
    seed(1)
    assert not fit(job.make(strike=7), Small())
    job.restart()
    monkeypatch.setattr(one_pass.OnePass, "parse", lambda self, path, entry: parsed.append(path))
    model = Small()
    assert fit(job.make(), model, weights_only=True) and model.trained[0] == 7
    assert not parsed
