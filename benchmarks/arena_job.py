"""The training script of bench_arenas: `fully_shard` over all ranks, with and without copies into arenas by turns.

Rank 0 prints one JSON object: seconds of a step in blocks of steps with and without a copy, in turns, and of the copies
themselves. A step is made to last `--times` as long as a copy, by more micro-batches.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lastgasp.pytorch import Session, TorchState

LAYERS, BLOCK = 4, 5


class Work:
    """A model whose step takes as long as is wanted."""

    def __init__(self, width: int) -> None:
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.adam = torch.optim.Adam(self.model.parameters())
        self.batch, self.parts = torch.randn(64, width), 1

    def step(self) -> None:
        """One update."""
        self.adam.zero_grad()
        for _ in range(self.parts):
            loss: Tensor = self.model(self.batch).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
        self.adam.step()


def main() -> None:
    """Train `--pairs` times a block without and a block with copies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--times", type=float, default=10.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    work = Work(args.width)
    with Session.open(args.dir, state=TorchState(work.model, work.adam), arena="every 1") as s:
        filling = s._run.shards._filling  # type: ignore[union-attr]
        assert filling is not None

        def timed_steps(count: int) -> list[float]:
            found = []
            for _ in range(count):
                begun = time.perf_counter()
                work.step()
                s.updated()
                found.append(time.perf_counter() - begun)
            return found

        def block(every: int) -> float:
            filling.every = every
            return median(timed_steps(BLOCK))

        timed_steps(3)
        one = block(0)
        copy = max(block(1) - one, 1e-3)
        wanted = torch.tensor(args.times * copy / one)
        dist.broadcast(wanted, 0)
        work.parts = max(1, round(float(wanted)))
        pairs = [(block(0), block(1)) for _ in range(args.pairs)]
        if dist.get_rank() == 0:
            size = s._run.shards.shards.payload_size  # type: ignore[union-attr]
            print(json.dumps({"arena_job": pairs, "copy": copy, "nbytes": size}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
