"""A hand-written loop over an `ElasticLoader`, which can be entered again with fewer ranks."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from lastgasp.gasp.again import INCARNATION
from lastgasp.gasp.joining import JOINS
from lastgasp.pytorch import ElasticLoader, Session, TorchState, train
from support import again_faults
from support.again_faults import note

GATES = (3, 6, 8, 10)
"""Completed steps after which the ranks wait for the file `go-STEP`, so that a fault comes when it may."""
SAMPLES = 78
"""The last step of an epoch has 14 samples of 16, and its micro-batches 3 or 4."""


class Noisy:
    """Each sample is another one each time that it is loaded, as with augmentation."""

    def __init__(self) -> None:
        self._x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._x[number]
        return x + 0.1 * torch.randn(8), x.sum().reshape(1)


def network() -> nn.Module:
    """With random numbers, and with buffers; other weights on each rank but for the loader."""
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))


def main() -> None:
    """Twelve steps: two epochs of five, and a bit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--final", type=Path)
    parser.add_argument("--batch", default="constant", choices=["constant", "scaled"])
    parser.add_argument("--exchanges", action="store_true", help="within each micro-batch")
    parser.add_argument("--since", type=int, default=0, help="completed steps before that")
    parser.add_argument("--any-order", action="store_true", help="gradients are summed as it comes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    again_faults.install(args.dir)
    newcomer(args.dir, os.environ.get(JOINS, ""))
    train(training, args)


def newcomer(directory: Path, joins: str) -> None:
    """A process that is to be taken in: it goes on once there is the file `grow`, or ends where that says so."""
    if not joins:
        return
    note(directory, f"started {os.getpid()}")
    while not (directory / "grow").exists():
        time.sleep(0.01)
    if (directory / "grow").read_text() == "die":
        raise SystemExit(5)


def training(args: argparse.Namespace) -> None:
    """From the process group to the last step."""
    again_faults.at("function called")
    dist.init_process_group("gloo")
    torch.manual_seed(3 + 1000 * dist.get_rank())
    net = network()
    loader = ElasticLoader(
        Noisy(), net, batch_size=4, ranks=4, seed=5, canonical=not args.any_order, batch=args.batch
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6, 10], 0.7)
    with Session.open(args.dir, state=TorchState(net, optimizer, schedule, elastic=loader), max_steps=12) as s:
        note(args.dir, f"entered {os.getpid()} {s.step} {dist.get_rank()} {dist.get_world_size()}")
        for _ in s.epochs(1000):
            for step in s.batches(loader):
                while is_held(args.dir, s.step):
                    s.alive()
                    time.sleep(0.01)
                optimizer.zero_grad()
                for inputs, wanted in step:
                    loss = (((net(inputs) + 0.01 * torch.randn(1)) - wanted) ** 2).mean()
                    if args.exchanges and s.step >= args.since:
                        loss = loss * (1 + all_reduce(loss.detach(), "sum", dist.group.WORLD))
                    loss.backward()
                optimizer.step()
                schedule.step()
                tell(args.dir, loader, step, s.step)
        note(args.dir, f"ended {os.getpid()} {s.step}")
    if args.final and dist.get_rank() == 0:
        torch.save({**net.state_dict(), "lr": torch.tensor(schedule.get_last_lr())}, args.final)
    dist.destroy_process_group()


def is_held(directory: Path, completed: int) -> bool:
    """Whether ranks wait here: at a gate that is closed, or at any in the incarnation for which there is `stay-N`."""
    stay = directory / f"stay-{os.environ.get(INCARNATION, '0')}"
    return completed in GATES and (stay.exists() or not (directory / f"go-{completed}").exists())


def tell(directory: Path, loader: ElasticLoader, step: Any, completed: int) -> None:
    """Which samples this rank has used in the step under way, and the digest of all ranks' so far."""
    order = loader.plan.order(step.epoch)
    cut = loader.plan.cut(step.offset, loader.micros)
    ids = [order[slice(*cut[one.number])].tolist() for one in step.loaded]
    row = {"step": completed + 1, "epoch": step.epoch, "ids": ids, "digest": loader.used["digest"]}
    note(directory, "used " + json.dumps(row))


if __name__ == "__main__":
    main()
