"""Several trainings in one script: train_folds.py WHAT DIRECTORY. One rank behaves as WHAT says, others wait for it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lastgasp.pytorch import Session, TorchState, train
from support.waiting import until

STEPS = 10
"""Of each training."""


def main() -> None:
    """Two trainings."""
    what, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    (train if what == "fails" else apply)(both, what, directory)


def apply(function: Callable[..., None], *args: object) -> None:
    """Without a recovery in place."""
    function(*args)


def both(what: str, directory: Path) -> None:
    """One after the other; what is entered again begins with the first."""
    dist.init_process_group("gloo")
    for fold in range(2):
        with contextlib.suppress(Diverged):
            training(what, directory, fold)
    dist.destroy_process_group()


class Diverged(Exception):
    """Handled by the script."""


def training(what: str, directory: Path, fold: int) -> None:
    """Of one fold."""
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(STEPS, 2, 4, generator=torch.Generator().manual_seed(10 * fold + rank))
    place = directory / str(fold) if what == "continues" else directory
    with Session.open(place, state=TorchState(model, optimizer), every=2) as s:
        for batch in s.batches(data):
            if fold == 0 and what == "continues" and s.step == 3:
                dist.barrier()  # as where they agree that a trial is hopeless
                raise Diverged
            if rank == 1 and what == "fails":
                fails(place, fold, s.step)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if what == "evaluates" and rank == 0:  # which no other rank waits for
            until((directory / f"ended-{fold}-1-{STEPS}").exists, "rank 1 to end this training")
            time.sleep(1)
        (directory / f"ended-{fold}-{rank}-{s.step}").touch()


def fails(place: Path, fold: int, step: int) -> None:
    """Once in each training, in the second one earlier."""
    mark = place / f"failed-{fold}"
    if step == (8, 3)[fold] and not mark.exists():
        mark.touch()
        raise RuntimeError(f"in training {fold} of process {os.getpid()}")


if __name__ == "__main__":
    main()
