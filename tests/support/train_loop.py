"""A hand-written loop with everything that makes resuming hard: batch norm, dropout, a schedule, shuffling, epochs."""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lastgasp.pytorch import Session, TorchState

sys.path.append(str(Path(__file__).parents[1]))  # as a script of its own
from support import card

Loss = Callable[[nn.Module, Any], Tensor]


def main() -> None:
    """Twelve steps: two epochs of five and a bit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--final", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--shape", default="plain", choices=sorted(TURNS))
    parser.add_argument("--processes", type=int, help="start so many ranks, as a shell script would")
    args = parser.parse_args()
    if args.processes:
        sys.exit(start(args.processes))
    torch.set_num_threads(1)
    card.one_card()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group(card.backend())
    seed = 7 + 1000 * rank  # other random numbers on each rank
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    x = torch.randn(4 * 5 * world, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler: DistributedSampler[Any] | None = DistributedSampler(data) if world > 1 else None
    loader = DataLoader(data, batch_size=4, shuffle=sampler is None, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
    net, critic = net.to(card.device()), nn.Linear(8, 1).to(card.device())
    models: list[nn.Module] = [DistributedDataParallel(m) if world > 1 else m for m in (net, critic)]
    kind = torch.optim.LBFGS if args.shape == "closure" else torch.optim.Adam
    optimizers = [kind(m.parameters(), lr=0.01) for m in models][: 2 if args.shape == "adversary" else 1]
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 3, 0.7)
    errors: dict[str, list[float]] = {"all": []}
    models_by_name = {"net": models[0], "critic": models[1]}
    state = TorchState(models_by_name, optimizers, schedule, sampler=sampler, extra={"errors": errors})
    turn = TURNS[args.shape]
    with Session.open(args.dir, state=state, every=args.every, max_steps=args.steps, keep=9) as s:
        for _ in s.epochs(1000):
            for batch in s.batches(loader):
                turn(models, optimizers, card.put(batch))
                schedule.step()
            errors["all"].append(evaluate(net, x.to(card.device())))
    if args.final and rank == 0:
        final = {name: value.clone() for m in (net, critic) for name, value in m.state_dict().items()}
        torch.save({**final, "errors": torch.tensor(errors["all"])}, args.final)


def plain(models: list[nn.Module], optimizers: list[Any], batch: Any) -> Tensor:
    """One update."""
    inputs, wanted = batch
    noise = random.random() * 0.1 + float(np.random.rand()) * 0.1
    loss: Tensor = ((models[0](inputs + noise * torch.randn_like(inputs)) - wanted) ** 2).mean()
    update(loss, optimizers[0])
    return loss


def waiting(models: list[nn.Module], optimizers: list[Any], batch: Any) -> Tensor:
    """After the update the loss is averaged over all ranks, for a log."""
    loss = plain(models, optimizers, batch).detach()
    dist.all_reduce(loss)
    return loss + float(torch.rand(()))


def adversary(models: list[nn.Module], optimizers: list[Any], batch: Any) -> Tensor:
    """Two models take turns."""
    inputs, wanted = batch
    update(((models[1](inputs) - wanted) ** 2).mean(), optimizers[1])
    loss: Tensor = ((models[0](inputs + torch.randn_like(inputs)) - models[1](inputs).detach()) ** 2).mean()
    update(loss, optimizers[0])
    return loss


def closure(models: list[nn.Module], optimizers: list[Any], batch: Any) -> Tensor:
    """LBFGS asks for the loss several times in one step."""
    inputs, wanted = batch

    def evaluate_loss() -> Tensor:
        optimizers[0].zero_grad()
        loss: Tensor = ((models[0](inputs) - wanted) ** 2).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    result: Tensor = optimizers[0].step(evaluate_loss)
    return result


TURNS = {"plain": plain, "waiting": waiting, "adversary": adversary, "closure": closure}


def update(loss: Tensor, optimizer: Any) -> None:
    """Backward pass and step."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def evaluate(net: nn.Module, x: Tensor) -> float:
    """Draws random numbers, sees the rank's own statistics, and waits for the other ranks."""
    net.eval()
    with torch.no_grad():
        error = (net(x + torch.randn_like(x)) ** 2).mean()
    if dist.is_initialized():
        dist.all_reduce(error)
    net.train()
    return float(error)


def start(world: int) -> int:
    """Start the ranks, wait for all of them; the exit code of one that failed. MASTER_PORT is given."""
    where = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world)}
    given = sys.argv[1:]
    place = given.index("--processes")
    command = [sys.executable, sys.argv[0], *given[:place], *given[place + 2 :]]
    ranks = [subprocess.Popen(command, env=os.environ | where | {"RANK": str(r)}) for r in range(world)]
    return max(abs(code) for code in _codes(ranks))


def _codes(ranks: list[subprocess.Popen[bytes]]) -> Iterator[int]:
    for rank in ranks:
        yield rank.wait()


if __name__ == "__main__":
    main()
