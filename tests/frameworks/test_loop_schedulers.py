"""torch's learning-rate schedulers go on as if nothing had happened, whatever they keep and how they change it."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR

from frameworks.loop_rig import NewProcesses, in_process
from lastgasp.pytorch import Session, TorchState
from lastgasp.pytorch.owncopy import own_copy, schedule_of

STEPS = 14


class Remembers:
    """A rule with a memory, which it changes in place."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, epoch: int) -> float:
        self.seen.append(epoch)
        return 1.0 / (1 + sum(self.seen))


class Own(lr.LRScheduler):
    """A user's, with a list that it changes in place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.history: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Depends on all that was before."""
        self.history.append(len(self.history))
        return [float(base) / (1 + sum(self.history)) for base in self.base_lrs]


class WarmUp(lr.LRScheduler):
    """Goes over to another one, as GradualWarmupScheduler as it is published."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, after: Any) -> None:
        self.steps, self.after, self.over = steps, after, False
        self.other: Any = None
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Rises; then that of the other one."""
        self.over = self.last_epoch > self.steps
        rates: list[float] = [float(base) * self.last_epoch / self.steps for base in self.base_lrs]
        return self.after.get_last_lr() if self.over else rates

    def step(self, epoch: int | None = None) -> None:
        """One of the two."""
        if not self.over:
            super().step()
        else:
            self.after.step()
            self._last_lr, self.last_epoch = self.after.get_last_lr(), self.last_epoch + 1


class Follows(lr.LRScheduler):
    """Follows a weight of the model."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self.model, self.others = model, {"made": [optimizer]}
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Smaller for greater weights."""
        return [float(base) / (1 + float(next(self.model.parameters()).detach().abs().sum())) for base in self.base_lrs]


def sequential(o: torch.optim.Optimizer) -> Any:
    return lr.SequentialLR(o, [lr.ConstantLR(o, 0.3, 2), lr.CosineAnnealingWarmRestarts(o, 3)], [4])


def chained(o: torch.optim.Optimizer) -> Any:
    return lr.ChainedScheduler([lr.LinearLR(o, 0.1, total_iters=4), lr.ExponentialLR(o, 0.9)])


MAKERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cyclic": lambda o: lr.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=True),
    "one-cycle": lambda o: lr.OneCycleLR(o, 0.1, STEPS + 1),
    "plateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "warm-restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3, 2),
    "lambda": lambda o: lr.LambdaLR(o, Remembers()),
    "multiplicative": lambda o: lr.MultiplicativeLR(o, Remembers()),
    "chained": chained,
    "sequential": sequential,
    "multi-step": lambda o: lr.MultiStepLR(o, [3, 6, 9]),
    "swa": lambda o: SWALR(o, 0.02, 5),
    "own": Own,
    "model": lambda o: Follows(o, nn.ParameterList(o.param_groups[0]["params"])),
    "warm-up": lambda o: WarmUp(o, 4, WarmUp(o, 3, lr.LambdaLR(o, Remembers()))),
}


class Cut(Exception):
    """What ends the loop inside a step."""


@pytest.fixture(autouse=True)
def new_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What opens a session again stands for a script that was started again."""
    in_process(monkeypatch, NewProcesses())


def rates(folder: Path, make: Callable[[Any], Any], cut: int = -1) -> list[Any]:
    """Learning rate and momentum of each step from where it begins to the end, or to the step that is cut."""
    torch.manual_seed(1)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = make(optimizer)
    found: list[Any] = []
    try:
        with Session.open(folder, state=TorchState(model, optimizer, scheduler), marks=False) as s:
            for _ in s.epochs(1):
                for number in s.batches(list(range(STEPS))):
                    optimizer.zero_grad()
                    model(torch.ones(1, 2)).sum().backward()
                    if number == cut:
                        if not isinstance(scheduler, lr.ReduceLROnPlateau):
                            scheduler.step()  # before the update: it is of no step that is saved
                        raise Cut
                    optimizer.step()
                    if isinstance(scheduler, lr.ReduceLROnPlateau):
                        scheduler.step(1.0)
                    else:
                        scheduler.step()
                    group = optimizer.param_groups[0]
                    found.append((number, group["lr"], group["momentum"]))
    except Cut:
        pass
    return found


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.usefixtures("restored_environ")
@pytest.mark.parametrize("name", MAKERS)
def test_rates_go_on_as_undisturbed(name: str, tmp_path: Path) -> None:
    make = MAKERS[name]
    whole = rates(tmp_path / "whole", make)
    found = rates(tmp_path / "cut", make, 5) + rates(tmp_path / "cut", make, 8) + rates(tmp_path / "cut", make)
    assert found == whole


def test_no_file_has_the_optimizer_or_the_model_of_a_scheduler() -> None:
    parameter = nn.Parameter(torch.zeros(10_000))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    first, second = (WarmUp(optimizer, 4, Own(optimizer)) for _ in range(2))
    first.after.model, first.other, second.other = nn.ParameterList([parameter]), second, first
    follows = Follows(optimizer, nn.ParameterList([parameter]))
    follows.others = {}
    for one in (first, follows):
        assert len(pickle.dumps(schedule_of(one))) < 5000


def test_a_copy_is_no_longer_that_of_the_scheduler() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    live: dict[str, Any] = {
        "list": [[1]], "dict": {"a": {1: [2]}}, "tuple": ([3],), "count": Counter({2: 1}), "last": deque([[4]], 5),
        "set": {1}, "tensor": torch.zeros(1), "array": np.zeros(1), "other": optimizer,
    }  # fmt: skip
    kept = own_copy(live)
    assert repr(kept) == repr(live) and [type(v) for v in kept.values()] == [type(v) for v in live.values()]
    assert kept["other"] is optimizer and kept["last"].maxlen == 5
    before = repr(kept)
    live["list"][0].append(2)
    live["dict"]["a"][1].append(2)
    live["tuple"][0].append(2)
    live["count"][3] += 1
    live["last"][0].append(2)
    live["set"].add(2)
    live["tensor"] += 1
    live["array"] += 1
    assert repr(kept) == before
