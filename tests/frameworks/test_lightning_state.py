"""A faulted and resumed Lightning run is bit-equal to the uninterrupted one: configurations x moments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from frameworks.state_rig import BATCH, SIZE, Fault, Noisy, Outcome, Pairs, Run, SizedStateful, Stateful, Stream
from frameworks.state_rig import differences, execute


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
}

FAULTS = [
    Fault("forward", 2, live=True),
    Fault("forward", 9, live=True),
    Fault("backward", 6, live=True),
    Fault("batch_end", 6),
    Fault("batch_end", 8),
    Fault("validation", 2, live=True),
    Fault("validation_end", 1, live=True),
    Fault("epoch_end", 2),
    Fault("epoch_start", 2, live=True),
    Fault("last", 1, live=True),
]


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


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.moment}{f.nth}")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_resumed_run_is_bit_equal(name: str, fault: Fault, tmp_path: Path) -> None:
    run = Run(tmp_path, **CONFIGURATIONS[name])
    if check(run, fault, tmp_path) is None:
        # these moments do not come, or come before the first step, in some configurations
        assert fault.moment in ("validation", "validation_end", "epoch_start", "batch_end", "forward", "backward")
