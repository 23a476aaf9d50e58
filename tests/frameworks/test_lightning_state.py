"""A faulted and resumed Lightning run is bit-equal to the uninterrupted one: configurations x moments."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from frameworks.state_rig import (
    BATCH,
    SIZE,
    Fault,
    Model,
    Noisy,
    Outcome,
    Pairs,
    Run,
    SizedStateful,
    Stateful,
    Stream,
    differences,
    execute,
)
from lastgasp_lightning.compat import LightningChanged
from lastgasp_lightning.data_position import DataPosition, decoded
from lastgasp_lightning.state import LightningState
from lastgasp_lightning.thisfit import ThisFit


@pytest.fixture(autouse=True)
def _quiet() -> None:
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


def map_loader(**kwargs: Any) -> Callable[[], Any]:
    """A shuffled map-style loader; `noise` is off where workers load, whose own draws cannot be restored."""
    arguments = {"batch_size": BATCH, "shuffle": True, **kwargs}
    noise = arguments.get("num_workers", 0) == 0
    return lambda: DataLoader(Noisy(noise=noise), **arguments)


def two_loaders() -> Any:
    return [DataLoader(Noisy(22), 4, shuffle=True), DataLoader(Noisy(10), 4, shuffle=True)]


def list_and_stream() -> Any:
    return CombinedLoader([Pairs(4), DataLoader(Stream(), 4)], "max_size_cycle")


def generator_loader() -> Any:
    return DataLoader(Noisy(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(9))


def replacement_loader() -> Any:
    sampler = RandomSampler(Noisy(), replacement=True, num_samples=30)
    return DataLoader(Noisy(), BATCH, sampler=sampler)


def weighted_loader() -> Any:
    return DataLoader(Noisy(), BATCH, sampler=WeightedRandomSampler([1.0 + i for i in range(SIZE)], SIZE))


def stop_on(monitor: str) -> Callable[[], list[Any]]:
    return lambda: [EarlyStopping(monitor, patience=2, min_delta=0.4, strict=False)]


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "in_order": {"loader": map_loader(shuffle=False)},
    "drop_last": {"loader": map_loader(drop_last=True)},
    "accumulate": {"trainer_args": {"accumulate_grad_batches": 4}},
    "val_interval": {"trainer_args": {"val_check_interval": 2}, "module_args": {"schedulers": "plateau"}},
    "val_interval_accumulate": {"trainer_args": {"val_check_interval": 2, "accumulate_grad_batches": 4}},
    "val_across_epochs": {"trainer_args": {"val_check_interval": 4, "check_val_every_n_epoch": None}},
    "step_lr": {"module_args": {"schedulers": "step"}},
    "onecycle": {"module_args": {"schedulers": "onecycle"}},
    "warm_up": {"module_args": {"schedulers": "warm_up"}},
    "epoch_lr": {"module_args": {"schedulers": "epoch"}},
    "plateau": {"module_args": {"schedulers": "plateau"}},
    "plateau_train": {"module_args": {"schedulers": "plateau_train"}},
    "plateau_step": {"module_args": {"schedulers": "plateau_step"}},
    "early_stopping": {"callbacks": stop_on("val_loss"), "trainer_args": {"max_epochs": 4}},
    "early_stopping_train": {"callbacks": stop_on("train_loss_epoch"), "trainer_args": {"max_epochs": 4}},
    "early_stopping_min_steps": {
        "callbacks": stop_on("val_loss"),
        "trainer_args": {"max_epochs": 4, "min_steps": 15, "val_check_interval": 1},
    },
    "manual": {"module_args": {"manual": True}},
    "masters": {"module_args": {"optimizer": "masters"}},
    "stream": {"loader": lambda: DataLoader(Stream(), BATCH)},
    "stream_workers": {"loader": lambda: DataLoader(Stream(noise=False), BATCH, num_workers=2)},
    "stateful": {"loader": Stateful},
    "sized_stateful": {"loader": SizedStateful},
    "list": {"loader": lambda: Pairs(6)},
    "workers": {"loader": map_loader(num_workers=2)},
    "persistent_workers": {"loader": map_loader(num_workers=2, persistent_workers=True)},
    "two_loaders": {"loader": two_loaders},
    "min_size": {"loader": lambda: CombinedLoader(two_loaders(), "min_size")},
    "list_and_stream": {"loader": list_and_stream},
    "own_generator": {"loader": generator_loader},
    "replacement": {"loader": replacement_loader},
    "weighted": {"loader": weighted_loader},
    "max_steps": {"trainer_args": {"max_steps": 10, "max_epochs": -1}},
    "max_steps_at_epoch_end": {"trainer_args": {"max_steps": 12, "max_epochs": -1}},
    "rare_validation": {"trainer_args": {"check_val_every_n_epoch": 2}},
    "no_validation": {"trainer_args": {"limit_val_batches": 0}},
    "no_validation_max_steps": {"trainer_args": {"limit_val_batches": 0, "max_steps": 15, "max_epochs": -1}},
    "reload": {"trainer_args": {"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4}},
    "limited": {"trainer_args": {"limit_train_batches": 4}},
    "accumulation_changes": {"callbacks": lambda: [GradientAccumulationScheduler({0: 2, 1: 3})]},
}

COVERING = (
    "accumulate",
    "val_interval_accumulate",
    "onecycle",
    "warm_up",
    "plateau",
    "early_stopping",
    "manual",
    "masters",
    "stream_workers",
    "stateful",
    "persistent_workers",
    "list_and_stream",
    "own_generator",
    "max_steps",
    "reload",
    "accumulation_changes",
)
FAULTS = [
    Fault("forward", 9, live=True),
    Fault("batch_end", 6),
    Fault("validation", 2, live=True),
    Fault("last", 1, live=True),
]
MORE_FAULTS = [
    Fault("forward", 2, live=True),
    Fault("backward", 6, live=True),
    Fault("batch_end", 8),
    Fault("validation_end", 1, live=True),
    Fault("epoch_end", 2),
    Fault("epoch_start", 2, live=True),
]


def matrix() -> list[Any]:
    """Each configuration at each moment; in make test the first at four of them, one for what differs from it most."""
    cases = []
    for i, name in enumerate(CONFIGURATIONS):
        for fault in (*FAULTS, *MORE_FAULTS):
            always = fault in FAULTS if i == 0 else name in COVERING and fault == FAULTS[i % 2]
            marks = () if always else pytest.mark.full
            cases.append(pytest.param(name, fault, marks=marks, id=f"{name}-{fault.moment}{fault.nth}"))
    return cases


def check(run: Run, fault: Fault, directory: Path) -> Outcome | None:
    """Run uninterrupted, faulted, resumed; None when the fault's moment never came."""
    straight = execute(run)
    if fault.moment == "last":
        count = straight.harness.moments["epoch_end"]
        fault = Fault("epoch_end", count, live=True)
    faulted = execute(replace(run, fault=fault))
    if not faulted.crashed:
        return None
    if faulted.harness.step == 0:
        assert "no step" in faulted.harness.refused
        return None
    assert faulted.harness.saved is not None, faulted.harness.refused
    resumed = execute(replace(run, resume_from=faulted.harness.saved))
    assert not resumed.crashed
    assert_equal(straight, resumed)
    return resumed


def assert_equal(straight: Outcome, resumed: Outcome) -> None:
    assert differences(straight.state(), resumed.state()) == []
    tail = {k: v for k, v in straight.model.losses.items() if k in resumed.model.losses}
    assert tail == resumed.model.losses
    assert max(straight.model.losses) == max(resumed.model.losses, default=max(straight.model.losses))


@pytest.mark.parametrize(("name", "fault"), matrix())
def test_resumed_run_is_bit_equal(name: str, fault: Fault, tmp_path: Path) -> None:
    run = Run(tmp_path, **CONFIGURATIONS[name])
    if check(run, fault, tmp_path) is None:
        # these moments do not come, or come before the first step, in some configurations
        assert fault.moment in ("validation", "validation_end", "epoch_start", "batch_end", "forward", "backward")


MOMENTS_OF_SAVING: dict[str, dict[str, Any]] = {
    "every_4_steps": {"every_n_train_steps": 4},
    "every_6_steps": {"every_n_train_steps": 6},
    "validation_end": {"monitor": "val_loss", "save_on_train_epoch_end": False},
    "epoch_end": {"save_on_train_epoch_end": True},
    "every_accumulation": {"train_time_interval": timedelta(0)},
}


def checkpointing(directory: Path, **kwargs: Any) -> dict[str, Any]:
    def callbacks() -> list[Any]:
        return [ModelCheckpoint(directory, "{step}", save_top_k=-1, **kwargs)]

    return {"callbacks": callbacks, "trainer_args": {"enable_checkpointing": True, "accumulate_grad_batches": 2}}


@pytest.mark.parametrize("schedulers", ["plateau", pytest.param("onecycle", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MOMENTS_OF_SAVING)
def test_model_checkpoints_resume_bit_equal(name: str, schedulers: str, tmp_path: Path) -> None:
    run = Run(tmp_path, module_args={"schedulers": schedulers})
    run = replace(run, **checkpointing(tmp_path / "ckpts", **MOMENTS_OF_SAVING[name]))
    straight = execute(run)
    files = sorted((tmp_path / "ckpts").glob("*.ckpt"))
    assert files
    for file in files:
        before = set((tmp_path / "ckpts").iterdir())
        resumed = execute(replace(run, resume_from=file))
        assert_equal(straight, resumed)
        # the replayed validation or epoch end did not save its step again
        saved = set((tmp_path / "ckpts").iterdir()) - before
        assert not [path for path in saved if path.name.startswith(f"{file.stem}-v")]


def test_inside_the_update_nothing_is_saved(tmp_path: Path) -> None:
    faulted = execute(Run(tmp_path, fault=Fault("inside_update", 5)))
    assert faulted.crashed
    assert faulted.harness.refused == "finish_step"


def test_another_thread_is_refused_inside_the_update(tmp_path: Path) -> None:
    faulted = execute(Run(tmp_path, fault=Fault("inside_update", 5, live=True)))
    assert "has begun" in faulted.harness.refused


def test_a_scheduler_that_raises_is_refused(tmp_path: Path) -> None:
    faulted = execute(Run(tmp_path, module_args={"schedulers": "step"}, fault=Fault("scheduler", 3)))
    assert faulted.harness.refused == "finish_step"


@pytest.mark.parametrize("schedulers", ["none", "step", "onecycle", "epoch"])
@pytest.mark.parametrize("nth", [3, 6])
def test_after_the_update_the_step_is_finished(schedulers: str, nth: int, tmp_path: Path) -> None:
    run = Run(tmp_path, module_args={"schedulers": schedulers})
    straight, faulted = execute(run), execute(replace(run, fault=Fault("after_update", nth)))
    assert faulted.harness.step == nth
    resumed = execute(replace(run, resume_from=faulted.harness.saved))
    # callbacks did not see the end of this batch, and the checkpoint says so
    assert differences(straight.state(), resumed.state()) == [".callbacks[0].batches: 18 != 17"]
    [note] = faulted.harness.state.notes
    assert note.startswith(f"step {nth} was cut short on rank 0 after its update: loggers there")
    assert faulted.harness.saved is not None
    assert torch.load(faulted.harness.saved, weights_only=False)["lastgasp"]["notes"]


def test_a_manual_step_is_finished_only_after_training_step(tmp_path: Path) -> None:
    run = Run(tmp_path, module_args={"manual": True})
    for moment in ("between_optimizers", "after_manual"):
        assert execute(replace(run, fault=Fault(moment, 3))).harness.refused == "finish_step"
    assert execute(replace(run, fault=Fault("batch_end", 3))).harness.step == 6


def test_resuming_twice_is_still_bit_equal(tmp_path: Path) -> None:
    run = Run(tmp_path, loader=two_loaders)
    straight = execute(run)
    first = execute(replace(run, fault=Fault("forward", 9, live=True)))
    second = execute(replace(run, fault=Fault("forward", 3, live=True), resume_from=first.harness.saved))
    assert second.harness.step == 10
    assert_equal(straight, execute(replace(run, resume_from=second.harness.saved)))


def as_version_1(data: bytes) -> bytes:
    """A position as it was written before all adapters had one protocol."""
    record = decoded(data)
    rows = [
        {"kind": kind, "start": _without_digest(start.start) if kind == "map" else None, "state": state or None}
        for kind, start, state in zip(record.kinds, record.starts, record.states, strict=True)
    ]
    old: dict[str, Any] = {"version": 1, "loaders": rows, "data": record.data}
    streams = [start for kind, start in zip(record.kinds, record.starts, strict=True) if kind == "stream"]
    if streams:
        old |= {"iter": streams[0].at_iter, "first": streams[0].at_first}
        old["iter_generators"] = [start.generators for start in record.starts]
    return pickle.dumps(old | ({"fetch": record.fetch} if record.fetch else {}))


def _without_digest(start: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in start.items() if name != "digest"}


@pytest.mark.parametrize("name", ["shuffled", "stream", "stateful", "list_and_stream"])
def test_positions_of_older_checkpoints_are_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, **CONFIGURATIONS[name])
    straight = execute(run)
    saved = execute(replace(run, fault=Fault("forward", 9, live=True))).harness.saved
    assert saved is not None
    resume = DataPosition.resume
    given: list[bytes] = []

    def resume_old(self: DataPosition, data: bytes, epoch: int, consumed: int) -> None:
        given.append(as_version_1(data))
        resume(self, given[-1], epoch, consumed)

    monkeypatch.setattr(DataPosition, "resume", resume_old)
    assert_equal(straight, execute(replace(run, resume_from=saved)))
    assert len(given) == 1


def test_a_fault_in_the_replayed_validation_saves_the_same_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    straight = execute(run)
    first = execute(replace(run, fault=Fault("validation", 2, live=True)))
    second = execute(replace(run, fault=Fault("validation", 1, live=True), resume_from=first.harness.saved))
    assert second.harness.step == first.harness.step == 6
    assert_equal(straight, execute(replace(run, resume_from=second.harness.saved)))


def test_the_file_loads_without_lastgasp(tmp_path: Path) -> None:
    faulted = execute(Run(tmp_path, fault=Fault("forward", 9, live=True)))
    model = Model()
    trainer = L.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(
        model, map_loader()(), DataLoader(Noisy(6), 3), ckpt_path=str(faulted.harness.saved), weights_only=False
    )
    assert trainer.global_step == 18


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    outcome = execute(Run(tmp_path))
    fit = outcome.trainer.fit_loop
    assert "run" not in vars(fit)
    assert "advance" not in vars(fit.epoch_loop)
    assert "_load_combined_loader_states" not in vars(fit)
    assert type(fit._combined_loader) is CombinedLoader
    assert type(fit._combined_loader.flattened[0].batch_sampler) is BatchSampler


def test_a_changed_lightning_is_named(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=tmp_path)
    del trainer.fit_loop.epoch_loop._batches_that_stepped
    trainer.strategy.connect(Model())
    with pytest.raises(LightningChanged, match="_batches_that_stepped"):
        LightningState(trainer, ThisFit(trainer, tmp_path)).prepare()
