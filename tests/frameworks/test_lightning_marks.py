"""LightningMarks in a real Lightning loop, one process: every range is where it belongs, and nothing stays patched."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lastgasp.deferred_source import DeferredSource
from lastgasp.pytorch.devicemarks import DeviceMarks
from lastgasp.steps import bits
from lastgasp.steps.marks import Marks
from lastgasp_lightning.boundary import reorder
from lastgasp_lightning.compat import LightningChanged
from lastgasp_lightning.marks import LightningMarks
from support.ranges import Seen, named, seen

pytestmark = pytest.mark.usefixtures("restored_environ")

BATCHES = 6
ROWS = torch.ones(BATCHES * 2, 4)
DATA = TensorDataset(ROWS)


class Boom(Exception):
    """Raised by a model in the middle of a step."""


class Stream(IterableDataset[list[Tensor]]):
    """Without a length, so that Lightning fetches one batch ahead."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter([row] for row in ROWS)


class Model(LightningModule):
    """One layer; `strike` is called in the forward pass, with the number of the batch."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.net = nn.Linear(4, 1)
        self.strike: Callable[[int], None] = lambda batch_idx: None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        """The mean; in manual optimization two updates, as a GAN does."""
        if self.automatic_optimization:
            self.strike(batch_idx)
            loss: Tensor = self.net(batch[0]).mean()
            return loss
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            loss = self.net(batch[0]).mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return None

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """A forward pass that must not be marked."""
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        """One optimizer, or two."""
        count = 1 if self.automatic_optimization else 2
        made = [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(count)]
        return made if count > 1 else made[0]


class Marking(Callback):
    """Calls LightningMarks as LastGasp does."""

    def __init__(self, marks: Marks) -> None:
        self.marks, self.step = marks, 0
        self.mine: LightningMarks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        reorder(trainer, self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.mine, self.step = LightningMarks(trainer, self.marks), trainer.global_step
        self.mine.install()
        self.mine.install()

    def on_before_optimizer_step(self, trainer: Trainer, *args: object) -> None:
        self.mine.update_begins()

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if trainer.global_step > self.step:
            self.step = trainer.global_step
            self.mine.step_end(self.step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.mine.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.mine.close()


class Between(Callback):
    """Marks validation and the end of the epoch with ranges of its own, to see that no step spans them."""

    def __init__(self, marks: Marks) -> None:
        self._one, self._two = marks.mark("validation"), marks.mark("epoch end")

    def on_validation_start(self, *args: object) -> None:
        self._one.begin()

    def on_validation_end(self, *args: object) -> None:
        self._one.end()

    def on_train_epoch_end(self, *args: object) -> None:
        with self._two:
            pass


@pytest.fixture
def marks() -> Iterator[Marks]:
    """Everything on."""
    marks = Marks.open(rank=0, world_size=1)
    yield marks
    marks.close(remove=True)


def fit(model: LightningModule, data: Any, folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    seed_everything(1, verbose=False)
    trainer = Trainer(
        **{"max_epochs": 1, **options}, accelerator="cpu", devices=1, logger=False, num_sanity_val_steps=1,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(cb, ModelCheckpoint) for cb in callbacks),
    )  # fmt: skip
    trainer.fit(model, data, DataLoader(DATA, batch_size=4))
    return trainer


def loader(**options: Any) -> Any:
    return DataLoader(DATA, batch_size=2, **options)


def inside(ranges: list[Seen], step: Seen) -> list[str]:
    return [one.name for one in sorted(ranges, key=lambda one: one.begin) if step.holds(one) and one is not step]


ONE_BATCH = ["dataloader", "forward", "backward", "optimizer"]


def test_a_step_holds_its_parts(marks: Marks, tmp_path: Path) -> None:
    fit(Model(), loader(), tmp_path, Marking(marks), max_epochs=2)
    ranges = seen(marks)
    steps = named(ranges, "step ")
    assert [step.name for step in steps] == [f"step {n}" for n in range(1, 2 * BATCHES + 1)]
    assert [inside(ranges, step) for step in steps] == [ONE_BATCH] * len(steps)
    assert all(a.end <= b.begin for a, b in itertools.pairwise(steps))
    assert len(ranges) == 5 * len(steps)


def test_accumulated_batches_are_one_step(marks: Marks, tmp_path: Path) -> None:
    fit(Model(), loader(), tmp_path, Marking(marks), accumulate_grad_batches=4)
    ranges = seen(marks)
    first, last = named(ranges, "step ")
    assert inside(ranges, first) == ONE_BATCH[:3] * 3 + ONE_BATCH
    assert inside(ranges, last) == ONE_BATCH[:3] + ONE_BATCH  # the epoch's end completes a step with what is there


@pytest.mark.parametrize("manual", [False, True])
def test_neither_validation_nor_an_epochs_end_nor_a_save_lies_in_a_step(
    manual: bool, marks: Marks, tmp_path: Path
) -> None:
    periodic = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    callbacks = (Between(marks), Marking(marks), periodic)
    accumulate = 1 if manual else 4
    options = {"max_epochs": 2, "val_check_interval": 3, "accumulate_grad_batches": accumulate}
    fit(Model(manual), loader(), tmp_path, *callbacks, **options)
    ranges = seen(marks)
    others = [one for name in ("validation", "epoch end", "save_checkpoint") for one in named(ranges, name)]
    assert {one.name for one in others} == {"validation", "epoch end", "save_checkpoint"}
    steps = named(ranges, "step ")
    assert len(steps) == (2 * BATCHES if manual else 4)
    assert [one for one in others for step in steps if one.begin < step.end and step.begin < one.end] == []


def test_manual_optimization(marks: Marks, tmp_path: Path) -> None:
    fit(Model(manual=True), loader(), tmp_path, Marking(marks))
    ranges = seen(marks)
    steps = named(ranges, "step ")
    assert [step.name for step in steps] == [f"step {2 * n}" for n in range(1, BATCHES + 1)]
    assert [inside(ranges, step) for step in steps] == [["dataloader", *ONE_BATCH[1:], *ONE_BATCH[1:]]] * BATCHES


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_stream_is_fetched_ahead(epochs: int, marks: Marks, tmp_path: Path) -> None:
    fit(Model(), DataLoader(Stream(), batch_size=2), tmp_path, Marking(marks), max_epochs=epochs)
    ranges = seen(marks)
    assert len(named(ranges, "step ")) == epochs * BATCHES
    # Of each epoch the first batch is fetched before the loop runs: unseen in the first epoch.
    assert len(named(ranges, "dataloader")) == epochs * BATCHES - 1
    assert all("forward" in inside(ranges, step) for step in named(ranges, "step "))


def test_an_iterator_for_training_step(marks: Marks, tmp_path: Path) -> None:
    class Fetching(Model):
        def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
            batch, _, _ = next(dataloader_iter)
            loss: Tensor = self.net(batch[0]).mean()
            return loss

    fit(Fetching(), loader(), tmp_path, Marking(marks))
    ranges = seen(marks)
    steps = named(ranges, "step ")
    assert [inside(ranges, step) for step in steps] == [["forward", "dataloader", "backward", "optimizer"]] * BATCHES


def test_only_what_is_switched_on_and_from_the_next_begin_on(marks: Marks, tmp_path: Path) -> None:
    marks.mask = bits.FORWARD
    model = Model()

    def switch(batch_idx: int) -> None:
        if batch_idx == 2:
            marks.mask = bits.STEP | bits.SAVE

    model.strike = switch
    fit(model, loader(), tmp_path, Marking(marks))
    names = [one.name for one in seen(marks)]
    assert names == ["forward", "backward", "optimizer"] * 2 + ["forward", "step 4", "step 5", "step 6"]


@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt])
def test_an_exception_leaves_nothing_open_or_patched(kind: type[BaseException], marks: Marks, tmp_path: Path) -> None:
    model, callback, kept = Model(), Marking(marks), list[Trainer]()

    def strike(batch_idx: int) -> None:
        if batch_idx == 3:
            kept.append(model.trainer)
            raise kind

    model.strike = strike
    with pytest.raises((kind, SystemExit)):
        fit(model, loader(), tmp_path, callback)
    assert [one.name for one in named(seen(marks), "step ")] == ["step 1", "step 2", "step 3"]
    assert patched(kept[0]) == []
    before = marks.head
    model.strike = lambda batch_idx: None
    fit(model, loader(), tmp_path, Marking(marks))
    assert marks.head - before == 5 * BATCHES


def test_everything_is_put_back(marks: Marks, tmp_path: Path) -> None:
    trainer = fit(Model(), loader(), tmp_path, Marking(marks))
    assert patched(trainer) == []


def patched(trainer: Trainer) -> list[str]:
    """What of the trainer's still carries a method of ours, or a hook."""
    epoch = trainer.fit_loop.epoch_loop
    owners: list[tuple[object, tuple[str, ...]]] = [
        (trainer.strategy, ("training_step", "backward", "save_checkpoint")),
        (epoch, ("_on_before_fetch", "_on_after_fetch")),
        (epoch.val_loop, ("run",)),
        (trainer.fit_loop, ("on_advance_end",)),
    ]
    left = [name for owner, names in owners for name in names if name in vars(owner)]
    for optimizer in trainer.optimizers:
        left += [str(hook) for hook in optimizer._optimizer_step_post_hooks.values()]
        left += [str(hook) for hook in optimizer._optimizer_step_pre_hooks.values()]
    return left


def test_another_lightning_is_an_error_and_leaves_nothing_patched(marks: Marks, tmp_path: Path) -> None:
    trainer = fit(Model(), loader(), tmp_path)
    loop: Any = type(trainer.fit_loop.epoch_loop)
    kept = loop._on_after_fetch
    try:
        del loop._on_after_fetch
        with pytest.raises(LightningChanged, match="_on_after_fetch"):
            LightningMarks(trainer, marks).install()
    finally:
        loop._on_after_fetch = kept
    assert patched(trainer) == []


def test_the_gasps_save_is_marked(marks: Marks, tmp_path: Path) -> None:
    trainer = fit(Model(), loader(), tmp_path)
    mine = LightningMarks(trainer, marks)
    mine.install()
    source = DeferredSource(0)
    source.inner, source.mark = MagicMock(), marks.mark("save_checkpoint")
    source.save(3, {}, reason="x")
    source.inner.save.assert_called_once_with(3, {}, "x")
    mine.close()
    assert [one.name for one in seen(marks)] == ["save_checkpoint"]


class Passed:
    """An event that the device has passed at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, other: Passed) -> float:
        return 0.0


def test_on_a_device_stream_ranges_have_its_times(
    marks: Marks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lastgasp.pytorch.stepranges.cuda_marks", lambda marks, *_: DeviceMarks(marks, Passed))
    fit(Model(), loader(), tmp_path, Marking(marks))
    ranges = seen(marks)
    assert len(ranges) == 5 * BATCHES
    assert {one.name for one in ranges if all(one.device)} == {
        "forward", "backward", "optimizer", *(f"step {n}" for n in range(1, BATCHES + 1))
    }  # fmt: skip
