"""What callbacks keep beside the module's state, of the kinds that a checkpoint does not have or has otherwise."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from frameworks.fit_rig import Job, Small, data, fit
from lastgasp_lightning import LastGasp
from support.launchers import incidents


def notes_of(job: Job) -> str:
    return " ".join(incidents(job.folder / "ckpts")[-1].notes)


class Ema(L.Callback):
    """Averaged weights outside of the module, as they are often written, and a frozen copy."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.ema, self.first = copy.deepcopy(pl_module.net), [copy.deepcopy(pl_module.net)]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *args: object) -> None:
        for mine, theirs in zip(self.ema.parameters(), pl_module.net.parameters(), strict=True):  # type: ignore[union-attr]
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


class Means(Small):
    """A metric in a dict, where the module does not have it as its part; another one where it does."""

    def __init__(self) -> None:
        super().__init__()
        self.means, self.mean = {"loss": MeanMetric()}, MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.means["loss"].update(loss.detach())
        self.mean.update(loss.detach())
        return loss


class Gives(L.Callback):
    """As where another rank gets its values."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        (gasp,) = (cb for cb in trainer.callbacks if isinstance(cb, LastGasp))  # type: ignore[attr-defined]
        if trainer.global_step == 4:
            assert gasp._run is not None
            gasp._run._again_here.values()


def test_modules_that_are_not_of_the_module_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(tmp_path)
    assert not fit(job.make(Ema(), Gives(), strike=4), Means())
    notes = notes_of(job)
    assert "beside their state: Means.means, Ema.ema. No checkpoint" in notes
    assert "the script's modules in Means.means, Ema.ema, which training has changed" in notes
    job.restart()
    assert fit(job.make(Ema(), Gives()), Means())
    assert "begin anew" not in caplog.text, "the module's own metric is kept"


class Draws(Small):
    """Draws its batches itself, so many in each step."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        for _ in range(self._count):
            batch, *_ = next(dataloader_iter)
        return ((self.net(batch[0]) - batch[1]) ** 2).mean()


@pytest.mark.parametrize(("count", "step", "noted"), [(1, 4, 0), (2, 4, 1), (2, 6, 0)])
def test_a_step_that_draws_several_batches_does_not_go_on_with_the_right_ones(
    tmp_path: Path, count: int, step: int, noted: int, caplog: pytest.LogCaptureFixture
) -> None:
    """But at the end of an epoch. Nobody knows which of them are used later: it may draw ahead."""
    job, size = Job(tmp_path, {"max_epochs": 2}), 24 * count
    assert not fit(job.make(strike=step), Draws(count), DataLoader(data(size=size), 4))
    job.restart()
    trainer = job.make()
    assert fit(trainer, Draws(count), DataLoader(data(size=size), 4))
    assert caplog.text.count("training_step draws its batches itself") == noted
    assert trainer.global_step == 12 + 2 * noted, "four batches are drawn again, which make two steps"


class Records(L.Callback):
    """Counts batches."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen = list[int]()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        self.seen.append(trainer.global_step)


class Stops(Records, EarlyStopping):
    """Derived from one of Lightning's with a state."""


class Files(Records, ModelCheckpoint):
    """From one that runs after LastGasp."""


class Own(Records, Checkpoint):
    """And from its base alone."""


class Saved(Stops):
    """Has it all in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": self.seen}


def test_what_users_add_to_callbacks_of_lightnings_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path)

    def callbacks() -> list[Any]:
        stops: list[Any] = [kind(monitor="loss", patience=9) for kind in (Stops, Saved)]
        return [Records(), *stops, Files(dirpath=tmp_path / "files", every_n_train_steps=2), Own()]

    assert not fit(job.make(*callbacks(), strike=5, enable_checkpointing=True), Small())
    notes = notes_of(job)
    assert "beside their state: Own.seen, Stops.seen, Files.seen. No checkpoint" in notes
    job.restart()
    again = callbacks()
    assert fit(job.make(*again, enable_checkpointing=True), Small())
    assert [len(one.seen) for one in (again[0], again[-1])] == [12, 7], "all, or none, not all but one"


class Keeps(L.Callback):
    """A list that training fills."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[str] = []

    def on_train_batch_end(self, *args: object) -> None:
        self.seen.append(self.name)


class KeepsToo(Keeps):
    """The only one of its class."""


def test_values_of_several_callbacks_of_one_class_are_named_and_go_to_none_of_them(tmp_path: Path) -> None:
    """A restart may have another list of callbacks."""
    job = Job(tmp_path)
    assert not fit(job.make(Keeps("a"), Keeps("b"), KeepsToo("c"), strike=3), Small(), DataLoader(data(), 4))
    job.restart()
    again = [Keeps("b"), Keeps("a"), KeepsToo("c")]
    assert fit(job.make(*again), Small(), DataLoader(data(), 4))
    assert [len(one.seen) for one in again] == [9, 9, 12]
    assert "Keeps 0.seen, Keeps 1.seen" in notes_of(job)
