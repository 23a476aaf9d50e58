"""A training that finds things outside of its function: train_kept.py WHAT DIRECTORY. One rank; one step fails once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, random_split

from lastgasp.pytorch import Session, TorchState, train

torch.manual_seed(1)
OUTSIDE = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
"""What functions train that make none."""


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
            for batch in s.batches(data):
                x = batch if torch.is_tensor(batch) else batch[0]
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


def hooks(directory: Path) -> None:
    """Its model is made outside, and doubles what its first layer gives."""
    OUTSIDE[0].register_forward_hook(lambda module, given, found: 2 * found)
    fit(directory, OUTSIDE, [torch.ones(1, 4)] * 4, 5)


def freezes(directory: Path) -> None:
    """DDP is made with everything trained; the first layer is frozen then, up to the second epoch."""
    dist.init_process_group("gloo")
    rank, net = dist.get_rank(), OUTSIDE
    model = DistributedDataParallel(net, find_unused_parameters=True)
    net[0].requires_grad_(False)
    data = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Session.open(directory, state=TorchState(model, optimizer)) as s:
        for epoch in s.epochs(2):
            net[0].requires_grad_(epoch > 0)
            for x in s.batches(data):
                fails(directory, rank == 1 and s.step == 4)
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    torch.save(net.state_dict(), directory / f"final-{rank}.pt")
    dist.destroy_process_group()


WHAT: dict[str, Callable[[Path], None]] = {
    "freezes": freezes,
    "hooks": hooks,
    "splits": splits,
}

if __name__ == "__main__":
    main()
