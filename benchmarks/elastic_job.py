"""One gloo rank of bench_elastic: the same training by DDP, and by an `ElasticLoader` with both orders of the sum.

Rank 0 prints the wall time of each block of steps, as JSON. Blocks take turns within the ranks' one job, so that
whatever the machine does meanwhile hits all of them; the ranks meet before and behind each block.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lastgasp.pytorch import ElasticLoader

WIDE = 256


def network(width: int) -> nn.Module:
    """The same one in all trainings."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def learn(model: nn.Module, batch: list[torch.Tensor]) -> None:
    """Forward and backward."""
    model(batch[0]).square().mean().backward()


def by_ddp(net: nn.Module, data: TensorDataset, batch: int) -> Iterator[None]:
    """Each step as users write it without lastgasp; for ever."""
    model, optimizer = DistributedDataParallel(net, bucket_cap_mb=2), torch.optim.AdamW(net.parameters())
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch, sampler=sampler)
    while True:
        for one in loader:
            learn(model, one)
            optimizer.step()
            optimizer.zero_grad()
            yield


def elastic(net: nn.Module, data: TensorDataset, batch: int, ranks: int, canonical: bool) -> Iterator[None]:
    """The same by an `ElasticLoader` of a job that once had `ranks` ranks."""
    optimizer = torch.optim.AdamW(net.parameters())
    loader = ElasticLoader(data, net, batch_size=batch, ranks=ranks, canonical=canonical)
    loader.known = True  # as for a session: what that costs is not asked here
    for epoch in range(1_000_000):
        loader.offset = 0
        loader.set_epoch(epoch)
        for step in loader:
            for one in step:
                learn(net, one)
            optimizer.step()
            yield


def main() -> None:
    """Print {kind: [ms of a step, one for each block]}."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, required=True, help="of the complete job")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--block", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(50 * args.ranks * args.batch, WIDE))
    steps = {
        "ddp": by_ddp(network(args.width), data, args.batch),
        "any": elastic(network(args.width), data, args.batch, args.ranks, False),
        "canonical": elastic(network(args.width), data, args.batch, args.ranks, True),
    }
    if dist.get_world_size() < args.ranks:  # DDP has other batches then
        del steps["ddp"]
    found: dict[str, list[float]] = {kind: [] for kind in steps}
    for number in range(-1, args.rounds):  # the first round does not count
        names = list(steps)
        first = number % len(names)
        for kind in names[first:] + names[:first]:
            dist.barrier()
            begun = time.perf_counter_ns()
            for _ in range(args.block):
                next(steps[kind])
            dist.barrier()
            if number >= 0:
                found[kind].append((time.perf_counter_ns() - begun) / 1e6 / args.block)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
