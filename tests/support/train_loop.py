"""A hand-written loop with everything that makes resuming hard: batch norm, dropout, a schedule, shuffling, epochs."""

from __future__ import annotations

import argparse
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lastgasp.pytorch import Session, TorchState


def main() -> None:
    """Twelve steps: two epochs of five and a bit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--final", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--no-periodic", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    seed = 7 + 1000 * rank  # other random numbers on each rank
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)
    x = torch.randn(4 * 5 * world, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler: DistributedSampler[object] | None = DistributedSampler(data) if world > 1 else None
    loader = DataLoader(data, batch_size=4, shuffle=sampler is None, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
    model: nn.Module = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    state = TorchState(model, optimizer, schedule, sampler=sampler)
    every = 0 if args.no_periodic else 4
    with Session.open(args.dir, state=state, every=every, max_steps=args.steps, keep=9) as s:
        for _ in s.epochs(1000):
            for inputs, wanted in s.batches(loader):
                noise = random.random() * 0.1 + float(np.random.rand()) * 0.1
                loss = ((model(inputs + noise * torch.randn_like(inputs)) - wanted) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            evaluate(net, x)
    if args.final and rank == 0:
        torch.save({name: value.clone() for name, value in net.state_dict().items()}, args.final)


def evaluate(net: nn.Module, x: torch.Tensor) -> None:
    """Draws random numbers, and waits for the other ranks."""
    net.eval()
    with torch.no_grad():
        error = (net(x + torch.randn_like(x)) ** 2).mean()
    if dist.is_initialized():
        dist.all_reduce(error)
    net.train()


if __name__ == "__main__":
    main()
