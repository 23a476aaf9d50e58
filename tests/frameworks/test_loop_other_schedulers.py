"""Schedulers that are not in the `TorchState`: made by the loop while it trains, or forgotten."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from frameworks.loop_rig import Cut, NewProcesses, in_process, loader
from frameworks.test_loop_schedulers import WarmUp
from lastgasp.pytorch import Session, TorchState
from lastgasp.pytorch.loop import other_scalers
from lastgasp.pytorch.loop.other_schedulers import within

INIT = LRScheduler.__init__
FORGOTTEN, NOT_AGAIN = "that is not in TorchState sets the learning rates", "were not made again before the data"


@pytest.fixture(autouse=True)
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens a session again stands for a script that was started again."""
    in_process(monkeypatch, NewProcesses())


class Without(StepLR):
    """Has no state for anybody."""

    def state_dict(self) -> dict[str, Any]:
        """Raises."""
        raise RuntimeError("it is in a database")


MADE: dict[str, Callable[[Any], Any]] = {
    "linear": lambda optimizer: LinearLR(optimizer, 0.001, total_iters=4),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.5, total_steps=12),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 9)], [2]
    ),
    "chained": lambda optimizer: ChainedScheduler([LinearLR(optimizer, 0.1), StepLR(optimizer, 2, 0.5)]),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda n: 1 / (1 + n)),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0),
    "warm-up": lambda optimizer: WarmUp(optimizer, 4, LambdaLR(optimizer, lambda n: 1 / (1 + n))),
}


def one_epoch(s: Session, optimizer: Any, warm_up: Any, until: int, used: list[float]) -> None:
    for _ in s.batches(loader()):
        if s.step == until:
            raise Cut
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if warm_up is not None:
            warm_up.step(*[1.0] * isinstance(warm_up, ReduceLROnPlateau))


@pytest.mark.parametrize("at", [3, 5])
@pytest.mark.parametrize("kind", MADE)
def test_one_that_the_first_epoch_makes_goes_on(
    kind: str, at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torchvision's reference of detection warms up so."""

    def train(until: int, directory: Path) -> list[float]:
        model, used = nn.Linear(4, 3), list[float]()
        optimizer = SGD(model.parameters(), lr=0.1)
        scheduler = MultiStepLR(optimizer, [1])
        with Session.open(directory, state=TorchState(model, optimizer, scheduler), every=1) as s:
            for epoch in s.epochs(3):
                one_epoch(s, optimizer, MADE[kind](optimizer) if epoch == 0 else None, until, used)
                scheduler.step()
        return used

    whole = train(99, tmp_path / "whole")
    with pytest.raises(Cut):
        train(at, tmp_path / "cut")
    for saved in (tmp_path / "cut").glob("*.pt"):
        torch.load(saved, weights_only=True)
    assert train(99, tmp_path / "cut") == whole[at:]
    assert FORGOTTEN not in caplog.text and NOT_AGAIN not in caplog.text
    assert LRScheduler.__init__ is INIT


def test_nothing_is_kept_by_what_somebody_else_has_put_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tools that log hyperparameters do."""
    optimizer = SGD((model := nn.Linear(4, 3)).parameters(), lr=0.1)
    for kind in (LRScheduler, GradScaler):
        monkeypatch.setattr(kind, "__init__", kind.__init__)  # so that it is this one in the end
    with Session.open(tmp_path, state=TorchState(model, optimizer)) as s:
        for kind in (LRScheduler, GradScaler):
            monkeypatch.setattr(kind, "__init__", functools.partialmethod(kind.__init__))
        for _ in s.epochs(1):
            one_epoch(s, optimizer, StepLR(optimizer, 2), 99, [])
    gone = weakref.ref(model)
    del model, optimizer, s
    gc.collect()
    assert gone() is None


def test_one_whose_state_cannot_be_had_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    optimizer = SGD((model := nn.Linear(4, 3)).parameters(), lr=0.1)
    with Session.open(tmp_path, state=TorchState(model, optimizer), every=1) as s:
        for _ in s.epochs(1):
            one_epoch(s, optimizer, Without(optimizer, 2), 99, [])
        assert s.step > 2
    assert FORGOTTEN in caplog.text and "Without" in caplog.text


def test_one_that_is_made_anew_in_each_epoch_goes_on(tmp_path: Path) -> None:
    def train(until: int, directory: Path) -> list[float]:
        model, used = nn.Linear(4, 3), list[float]()
        optimizer = SGD(model.parameters(), lr=0.1)
        with Session.open(directory, state=TorchState(model, optimizer), every=1) as s:
            for _ in s.epochs(3):
                warm_up = OneCycleLR(optimizer, 0.5, total_steps=6)
                one_epoch(s, optimizer, warm_up, until, used)
        return used

    whole = train(99, tmp_path / "whole")
    for at in (3, 5, 8):
        with pytest.raises(Cut):
            train(at, tmp_path / f"{at}")
        assert train(99, tmp_path / f"{at}") == whole[at:]


def test_one_that_comes_too_late_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(until: int) -> None:
        model, warm_up = nn.Linear(4, 3), None
        optimizer = SGD(model.parameters(), lr=0.1)
        with Session.open(tmp_path, state=TorchState(model, optimizer), every=1) as s:
            for _ in s.epochs(2):
                for _ in s.batches(loader()):
                    if s.step == until:
                        raise Cut
                    warm_up = warm_up or LinearLR(optimizer)
                    optimizer.step()
                    warm_up.step()

    with pytest.raises(Cut):
        train(3)
    assert NOT_AGAIN not in caplog.text
    train(99)
    assert caplog.text.count(f"({LinearLR.__name__}) {NOT_AGAIN}") == 1


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", MADE)
def test_one_that_was_forgotten_is_named(
    kind: str, named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not one that is in `extra`, or that is not stepped, or that belongs to something else."""
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer, another = SGD(model.parameters(), lr=0.1), SGD(other.parameters(), lr=0.1)
    scheduler, idle, foreign = MADE[kind](optimizer), StepLR(optimizer, 3), StepLR(another, 3)
    extra = {} if named else {"schedule": scheduler}
    with Session.open(tmp_path, state=TorchState(model, optimizer, extra=extra)) as s:
        for _ in s.epochs(2):
            one_epoch(s, optimizer, scheduler, 99, [])
            foreign.step()
    assert caplog.text.count(f"({type(scheduler).__name__}) {FORGOTTEN}") == named
    assert caplog.text.count(FORGOTTEN) == named and idle.last_epoch == 0


@pytest.mark.parametrize("made", ["before", "within"])
@pytest.mark.parametrize("given", ["not at all", "scaler", "extra", "disabled"])
def test_a_grad_scaler_that_was_forgotten_is_named(
    given: str, made: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def new() -> GradScaler:
        return GradScaler("cpu", init_scale=8.0, enabled=given != "disabled")

    model, other = nn.Linear(4, 3), GradScaler("cpu")
    optimizer, scaler = SGD(model.parameters(), lr=0.1), new()
    held = {"scaler": scaler} if given == "scaler" else {"extra": {"scaler": scaler}} if given == "extra" else {}
    with Session.open(tmp_path, state=TorchState(model, optimizer, **held)) as s:
        used = new() if made == "within" and not held else scaler
        for _ in s.epochs(1):
            for x, _ in s.batches(loader()):
                optimizer.zero_grad()
                used.scale(model(x).sum()).backward()
                used.step(optimizer)
                used.update()
    assert caplog.text.count("a GradScaler is used that is not in TorchState") == (given == "not at all")
    assert other.get_scale() == 2.0**16


def test_what_is_not_used_costs_no_look_at_what_extra_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, scaler = nn.Linear(4, 3), GradScaler("cpu", enabled=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    state = TorchState(model, optimizer, scaler=scaler, extra={"best": {"loss": 1.0}})
    with Session.open(tmp_path, state=state) as s:
        monkeypatch.setattr(other_scalers, "within", None)
        for _ in s.epochs(1):
            for _ in s.batches(loader()):
                scaler.scale(model(torch.zeros(1, 4)).sum()).backward()
                scaler.step(optimizer)
    assert s.step == len(loader())


def test_a_look_at_what_extra_has_ends() -> None:
    """Hundreds of millions of values, by way of a hundred objects."""
    scheduler = StepLR(SGD(nn.Linear(1, 1).parameters(), lr=0.1), 1)
    value: Any = [scheduler, *(object() for _ in range(99))]
    for _ in range(4):
        value = [value] * 100
    assert list(within(value[0], LRScheduler)) == [scheduler]
    wide: Any = [[[object() for _ in range(100)] for _ in range(100)] for _ in range(100)]
    assert len(list(within(wide, object))) == 10_000
