"""A short DDP loop that does what loops should not: train_odd.py WHAT DIRECTORY. Rank 1 dies, or raises, once."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lastgasp.pytorch import Session, TorchState
from support.waiting import until

SHARDED = ("ignores", "makes", "experts", "late_experts")
DIES = 5
"""Completed steps when rank 1 dies, in the body of the next one."""


class Spread(torch.optim.SGD):
    """Each rank updates every second parameter and sends it to the other one, as Muon was published."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As torch's."""
        rank, parameters = dist.get_rank(), self.param_groups[0]["params"]
        gradients = [p.grad for p in parameters]
        for index, p in enumerate(parameters):
            p.grad = gradients[index] if index % 2 == rank else None
        super().step()
        for index, p in enumerate(parameters):
            p.grad = gradients[index]
            dist.broadcast(p.detach(), index % 2)


class Makes(nn.Linear):
    """Registers a buffer when it is first called."""

    calls: torch.Tensor

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """As torch's."""
        if not hasattr(self, "calls"):
            self.register_buffer("calls", torch.zeros(()))
        self.calls += 1
        return super().forward(inputs)


def sharded(net: nn.Sequential, what: str) -> Any:
    """By FSDP2, a layer of which it leaves alone, or one of which makes a buffer, or is each rank's own expert."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if what in ("experts", "late_experts"):
        if what == "experts":
            nn.init.constant_(next(net[2].parameters()), float(dist.get_rank()))
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("experts", "data"))
        fully_shard(net[2], mesh=mesh["data"])
    if what == "makes":
        net[2] = Makes(4, 1)
    return fully_shard(net, ignored_params=set(net[2].parameters()) if what == "ignores" else None)


def main() -> None:
    """Ten steps."""
    what, directory = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    net[0].requires_grad_(what != "unfreezes")
    model: Any = sharded(net, what) if what in SHARDED else DistributedDataParallel(net)
    made: Any = Spread if what == "spreads" else torch.optim.SGD
    trained = (net[1:] if what == "adds" else net).parameters()
    optimizer = made(trained, lr=0.1, momentum=0.0 if what in SHARDED else 0.9)
    data = torch.randn(10, 2, 4, generator=torch.Generator().manual_seed(rank))
    average = torch.optim.swa_utils.AveragedModel(net, use_buffers=True) if what == "averages" else None
    models = model if average is None else {"net": model, "average": average}
    with Session.open(directory, state=TorchState(models, optimizer), every=4) as s:
        for batch in s.batches(data):
            if what == "unfreezes" and s.step == 2:
                net[0].requires_grad_(True)
            if what == "adds" and s.step == 2:
                optimizer.add_param_group({"params": list(net[0].parameters())})
            if what == "replaces" and s.step == 2:
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            if rank == 0:
                (directory / f"at-{s.step}").touch()
            optimizer.zero_grad()
            if rank == 1 and what not in ("refreshes", "averages"):
                die(s.step, what, directory)
            model(batch).square().mean().backward()
            optimizer.step()
            if what == "refreshes":  # and changes the statistics of batch norm by it
                if rank == 1:
                    die(s.step, what, directory)
                net(batch)
            if average is not None:  # of the weights, and of the statistics of batch norm
                if rank == 1:
                    die(s.step, what, directory)
                average.update_parameters(net)
            if what == "prints" and rank == 0:
                print("step", s.step, flush=True)
    if what == "reports":
        print("the end", flush=True)
    if what == "late_experts":
        weight: Any = net[2].weight
        (directory / f"expert-{rank}").write_text(repr(weight.to_local().tolist()))


def die(step: int, what: str, directory: Path) -> None:
    """Once."""
    mark = directory / "died"
    if what in ("prints", "reports") or step != DIES or mark.exists():
        return
    mark.touch()
    if what in ("refreshes", "averages"):  # once rank 0 has completed this step
        until((directory / f"at-{DIES + 1}").exists, "rank 0 to go on")
    if what == "averages":
        raise RuntimeError("rank 1 behind its update")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
