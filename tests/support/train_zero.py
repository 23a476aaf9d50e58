"""A loop with DDP and `ZeroRedundancyOptimizer`: a schedule, dropout, batch norm, shuffling, two parameter groups."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lastgasp.pytorch import Session, TorchState

BATCHES = 5
SHAPES = ("plain", "bucket", "accumulated")


def main() -> None:
    """Twelve steps: two epochs of five and a bit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--final", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--shape", default="plain", choices=SHAPES)
    parser.add_argument("--between", help="RANK:STEP, killed when rank 0's parameters are sent, in the first attempt")
    parser.add_argument("--consolidated", type=Path, help="where rank 0 writes torch's own state of the optimizer")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(7)
    model, optimizer = made(args.shape)
    torch.manual_seed(7 + 1000 * rank)  # other random numbers on each rank
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    x = torch.randn(4 * BATCHES * 2 * world, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    losses: dict[str, Any] = {"count": 0}
    state = TorchState(model, optimizer, schedule, sampler=sampler, extra={"losses": losses})
    with Session.open(args.dir, state=state, every=4, max_steps=args.steps, arena="every 1", keep=9) as s:
        dying(optimizer, args.between, lambda: s.step)
        for _ in s.epochs(1000):
            for inputs, wanted in s.batches(loader):
                optimizer.zero_grad()
                parts = 2 if args.shape == "accumulated" else 1
                for a, b in zip(inputs.chunk(parts), wanted.chunk(parts), strict=True):
                    ((model(a + 0.1 * torch.randn_like(a)) - b) ** 2).mean().backward()
                optimizer.step()
                schedule.step()
                losses["count"] += 1
    optimizer.consolidate_state_dict()
    if rank == 0:
        whole = optimizer.state_dict()
        if args.consolidated:
            torch.save({"model": model.module.state_dict(), "optimizer": whole}, args.consolidated)
        if args.final:
            moments = {f"{n} {key}": value for n, one in whole["state"].items() for key, value in one.items()}
            torch.save({**model.module.state_dict(), **moments, "count": torch.tensor(losses["count"])}, args.final)
    dist.destroy_process_group()


def made(shape: str) -> tuple[DistributedDataParallel, Any]:
    """Model and optimizer."""
    layers = [nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 33), nn.BatchNorm1d(33), nn.Linear(33, 1)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    make: Any = ZeroRedundancyOptimizer
    return model, make(groups, torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=shape == "bucket")


def dying(optimizer: Any, where: str | None, step: Any) -> None:
    """Between the parameters of rank 0, that are under way, and those of rank 1."""
    rank, _, number = (where or "-1:0").partition(":")
    if dist.get_rank() != int(rank) or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    send = optimizer._broadcast_params_from_rank

    def then_die(source: int) -> Any:
        if source == 1 and step() == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        handles = send(source)
        for handle in handles if step() == int(number) else ():
            handle.wait()
        return handles

    optimizer._broadcast_params_from_rank = then_die


if __name__ == "__main__":
    assert "RANK" in os.environ, "start it with torchrun or lastgasp run"
    main()
