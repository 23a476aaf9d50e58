"""Several trainings in one script: train_folds.py WHAT DIRECTORY. One rank behaves as WHAT says, others wait for it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lastgasp.pytorch import Session, TorchState, train
from support.waiting import until

STEPS = 10
"""Of each training."""


def main() -> None:
    """Two trainings; that of "evaluates" and "continues" has no process group of its own."""
    what, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    if what in ("evaluates", "continues"):
        both(what, directory)
    else:
        train(both, what, directory)


def both(what: str, directory: Path) -> None:
    """One after the other; what is entered again begins with the first."""
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(4, 1))
    for fold in range(2):
        try:
            training(what, directory, model, fold)
        except Diverged:
            continue
    if what not in ("evaluates", "continues"):
        dist.destroy_process_group()


class Diverged(Exception):
    """Handled by the script."""


def training(what: str, directory: Path, model: nn.Module, fold: int) -> None:
    """Of one fold."""
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(STEPS, 2, 4, generator=torch.Generator().manual_seed(10 * fold + rank))
    place = directory / str(fold) if what in ("another", "continues") else directory
    with Session.open(place, state=TorchState(model, optimizer), every=2) as s:
        for batch in s.batches(data):
            if fold == 0 and what == "continues" and s.step == 3:
                raise Diverged
            if rank == 1 and what in ("same", "another"):
                fails(place, fold, s.step)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if what == "evaluates" and rank == 0:  # which no other rank waits for
            until(lambda: list(directory.glob(f"ended-{fold}-1-*")), "rank 1 to end this training")
            time.sleep(1)
        (directory / f"ended-{fold}-{rank}-{s.step}").touch()


def fails(place: Any, fold: int, step: int) -> None:
    """Once in each training, in the second one earlier."""
    mark = place / f"failed-{fold}"
    if step == (8, 3)[fold] and not mark.exists():
        mark.touch()
        raise RuntimeError(f"in training {fold} of process {os.getpid()}")


if __name__ == "__main__":
    main()
