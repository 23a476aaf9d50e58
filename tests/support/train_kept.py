"""A training that finds things outside of its function: train_kept.py WHAT DIRECTORY. One rank; one step fails once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lastgasp.pytorch import Session, TorchState, train


def main() -> None:
    """Three epochs of six steps, or whatever WHAT does."""
    what, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(42)
    if what == "folds":
        folds(directory)
    else:
        train(WHAT[what], directory)


def fails(directory: Path, now: bool = True) -> None:
    """Once in a job."""
    mark = directory / "failed"
    if now and not mark.exists():
        mark.touch()
        raise RuntimeError("once")


def fit(directory: Path, net: nn.Module, data: Any, at: int, **more: Any) -> None:
    """Three epochs; step `at` fails."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Session.open(directory, state=TorchState(net, optimizer), **more) as s:
        for _ in s.epochs(3):
            for (x,) in s.batches(data):
                fails(directory, s.step == at)
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
    torch.save(net.state_dict(), directory / "final.pt")


def splits(directory: Path) -> None:
    """The data are divided by the script's random numbers."""
    whole = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)))
    part, _ = random_split(whole, [24, 16])
    with (directory / "splits").open("a") as file:
        file.write(f"{sorted(part.indices)}\n")
    fit(directory, nn.Linear(4, 1), DataLoader(part, 4, shuffle=True), 8)


def folds(directory: Path) -> None:
    """Two trainings of objects that are made outside; a step of the first fails, and one of the second by a bug."""
    for fold in range(2):
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        train(one_fold, directory, fold, net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4))


def one_fold(directory: Path, fold: int, net: nn.Module, optimizer: Any, schedule: Any) -> None:
    """Ten steps; the learning rate is another one after four."""
    with Session.open(directory, state=TorchState(net, optimizer, schedule), every=2) as s:
        for x in s.batches(torch.ones(10, 2, 4)):
            fails(directory, fold == 0 and s.step == 6)
            if fold == 1 and s.step == 6 and not (directory / "bug").exists():
                (directory / "bug").touch()
                raise TypeError("a bug")
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            schedule.step()


WHAT: dict[str, Callable[[Path], None]] = {
    "splits": splits,
}

if __name__ == "__main__":
    main()
