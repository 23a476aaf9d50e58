"""Hand-written loops of every shape, on one process, that can be cut anywhere and resumed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lastgasp.fits import Fits
from lastgasp.pytorch import Session, TorchState
from lastgasp.pytorch.loop import run as run_module
from lastgasp.pytorch.loop import thisfit

if TYPE_CHECKING:  # ddp_state_child.py runs where pytest is not
    import pytest


class NewProcesses(Fits):
    """Each session is the first one of its process, as after a restart."""

    def begin(self, directory: Path, owner: object) -> int:
        """As the first one."""
        self._last.clear()
        return super().begin(directory, owner)


def in_process(monkeypatch: pytest.MonkeyPatch, fits: Fits) -> None:
    """Count sessions by `fits`."""
    for module in (thisfit, run_module):
        monkeypatch.setattr(module, "FITS", fits)


class Cut(Exception):
    """What ends a loop in the middle."""


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws from the global generator in each item, as augmentation in the training process does."""

    def __init__(self, count: int = 20) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.full((4,), index / 20) + 0.1 * torch.randn(4)
        return x, x.sum(0, keepdim=True)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Comes in one order."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(20):
            x = torch.full((4,), index / 20)
            yield x, x.sum(0, keepdim=True)


class Counting:
    """A loader that knows its own position."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.at < 5:
            self.at += 1
            x = torch.full((4, 4), self.at / 5) + 0.1 * torch.randn(4, 4)
            yield x, x.sum(1, keepdim=True)
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        """Its position."""
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.at = state["at"]


class Masters(Optimizer):
    """Keeps weights of more bits than the model's, and a number of fewer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Changes the masters, and gives them to the model."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {"master": parameter.double(), "signs": torch.zeros(4, dtype=torch.uint8)}
            state["master"].sub_(parameter.grad.double(), alpha=0.02)
            state["signs"].add_(1)
            parameter.copy_(state["master"])
        return loss


class Container(Optimizer):
    """One optimizer for each child of a model; itself one as well, without a state (torchtitan's)."""

    def __init__(self, model: nn.Module) -> None:
        parts = [list(child.parameters()) for child in model.children()]
        self.optimizers = [torch.optim.Adam(part, lr=0.02) for part in parts if part]
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> Any:
        """An update of all."""
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Flat, without groups, and not at any time."""
        raise KeyError(0)


def net() -> nn.Module:
    """Batch norm and dropout."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


def loader(seed: int = 1, **options: Any) -> DataLoader[Any]:
    """Five shuffled batches."""
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(seed))
    options = {"shuffle": "sampler" not in options} | options
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, **options)


def backward(loss: Tensor) -> None:
    """The backward pass; torch has no type for it."""
    loss.backward()  # type: ignore[no-untyped-call]


@dataclass
class Parts:
    """What a loop works with; made anew for each start of the job."""

    tick: Callable[[], None]
    model: nn.Module = field(default_factory=net)
    other: nn.Module = field(default_factory=net)
    data: Any = field(default_factory=loader)
    data2: Any = field(default_factory=lambda: loader(2))
    best: dict[str, Any] = field(default_factory=lambda: {"error": 9.0, "seen": []})
    schedules: Any = None
    scaler: Any = None
    optimizers: list[Any] = field(default_factory=list)
    folder: Path = Path()
    prepared: list[Any] = field(default_factory=list)

    def loss(self, batch: Any, model: nn.Module | None = None) -> Tensor:
        """Squared error on noisy inputs; random numbers of all three generators."""
        x, y = batch
        noise = random.random() * 0.1 + float(np.random.rand()) * 0.1
        result: Tensor = (((model or self.model)(x + noise * torch.randn_like(x)) - y) ** 2).mean()
        return result

    def train(self, batch: Any, number: int = 0) -> None:
        """One update with ticks around it."""
        self.tick()
        optimizer = self.optimizers[number]
        optimizer.zero_grad()
        loss = self.loss(batch, self.other if number else self.model)
        self.tick()
        backward(loss)
        optimizer.step()

    def evaluate(self) -> None:
        """Draws random numbers, too."""
        self.model.eval()
        with torch.no_grad():
            error = float(sum(self.loss(batch) for batch in self.data2))
        self.model.train()
        self.best["error"] = min(self.best["error"], error)


Loop = Callable[[Session, Parts], None]


@dataclass
class Shape:
    """A loop, and what it is made with."""

    loop: Loop
    state: Callable[[Parts], TorchState]
    data: Callable[[], Any] | None = None


def run(shape: Shape, folder: Path, cut: int | None = None, **options: Any) -> tuple[dict[str, Any] | None, int]:
    """Run the job, or what is left of it, to its end or to tick number `cut`.

    Returns:
        What it ended with, None where it was cut; and how many ticks there were.
    """
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    count = 0

    def tick() -> None:
        nonlocal count
        count += 1
        if count == cut:
            raise Cut

    parts = Parts(tick, folder=folder)
    if shape.data is not None:
        parts.data = shape.data()
    state = shape.state(parts)
    parts.optimizers = list(state.optimizers.values())
    parts.schedules = list(state.schedulers.values())
    parts.scaler = state.scaler
    try:
        with Session.open(folder, state=state, **({"marks": False} | options)) as session:
            shape.loop(session, parts)
            end = {
                "step": session.step,
                "best": repr(parts.best),
                "random": (random.random(), float(np.random.rand()), float(torch.rand(()))),
                "model": {k: v.clone() for k, v in parts.model.state_dict().items()},
                "other": {k: v.clone() for k, v in parts.other.state_dict().items()},
                "lr": [g["lr"] for o in parts.optimizers for g in o.param_groups],
                "states": copy.deepcopy([o.state_dict()["state"] for o in parts.optimizers]),
            }
    except Cut:
        return None, count
    return end, count


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """What is not the same, bit for bit."""
    wrong = [key for key in ("step", "best", "random", "lr") if a[key] != b[key]]
    for part in ("model", "other"):
        wrong += [f"{part}.{key}" for key in a[part] if not torch.equal(a[part][key], b[part][key])]
    return wrong + [f"optimizer {number}" for number, pair in enumerate(zip(a["states"], b["states"], strict=True))
                    if not _same(*pair)]  # fmt: skip


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
