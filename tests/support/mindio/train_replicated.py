"""A training of MindSpeed-LLM's shape on CPUs: `train` is decorated, its arguments are a list, saves are collective."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lastgasp.pytorch.drop_groups import drop_groups
from lastgasp.testing.faults import install, kit_from_env
from support.mindio import adapter
from support.mindio.replicated import Net, ReplicatedOptimizer


class Scheduler:
    """A rate that follows from the step alone."""

    def __init__(self) -> None:
        self.rate = self.rate_after(0)

    @staticmethod
    def rate_after(step: int) -> float:
        """The rate of the update behind `step`."""
        return 0.01 / (1 + step)

    def step_to(self, step: int) -> None:
        """So many updates are done."""
        self.rate = self.rate_after(step)


class Batches(Iterator[list[Tensor]]):
    """This rank's micro-batches of each step: its own, and those of missing ranks that it does as well."""

    def __init__(self, rank: int, step: int, numbers: Sequence[int] = ()) -> None:
        self.rank, self.step, self.numbers = rank, step, numbers or [rank]

    def at(self, step: int) -> Batches:
        """Those from this step on."""
        return Batches(self.rank, step, self.numbers)

    def shared(self, left: Sequence[int], micros: int) -> Batches:
        """Those of this rank where only `left` are there: the first ones have one more if they cannot be even."""
        return Batches(self.rank, self.step, [n for n in range(micros) if left[n % len(left)] == self.rank])

    def __next__(self) -> list[Tensor]:
        self.step += 1
        first = 1000 * (self.step - 1)
        return [torch.randn(4, 8, generator=torch.Generator().manual_seed(first + number)) for number in self.numbers]


def train(
    forward_step: Any, net: Net, optimizer: ReplicatedOptimizer, scheduler: Scheduler, data: Any, end: int
) -> None:
    """The loop."""
    kit = _kit
    adapter.begin()
    if kit is not None:
        kit.entered()
    if _reboot:
        _reboot.clear()
        raise RuntimeError("ARF FINISH")
    adapter.note("entered", os.getpid(), optimizer.step_count)

    def faults(phase: str) -> None:
        if kit is not None:
            if phase in ("before_update", "after_update"):
                adapter.reached(step + (phase == "after_update") / 2)
            if kit.due(phase, step):
                adapter.wait_until_all_have_reached(step if phase in BEHIND_GRADIENTS else step - 0.5)
            kit.fire_at(phase, step)

    while (step := optimizer.step_count) < end:
        adapter.wait_for_go(step)
        faults("data")
        optimizer.total.zero_()
        for batch in next(data):
            net.grads.zero_()
            faults("forward")
            loss = forward_step(net, batch)
            faults("backward")
            loss.backward()
            optimizer.add()
        optimizer.inner.param_groups[0]["lr"] = scheduler.rate
        optimizer.step(faults)
        scheduler.step_to(optimizer.step_count)
        faults("step_end")
        if optimizer.step_count % EVERY == 0:
            save_checkpoint(optimizer, scheduler)
        adapter.tft_pause_train(optimizer.step_count)


EVERY = 4
BEHIND_GRADIENTS = ("before_update", "update", "after_update", "step_end")


def save_checkpoint(optimizer: ReplicatedOptimizer, scheduler: Scheduler) -> None:
    """The framework's own periodic save, with collectives."""
    step, world = optimizer.step_count, dist.get_world_size(optimizer.all)
    found: list[Any] = [None] * world
    dist.all_gather_object(found, (optimizer.part, optimizer.state()), group=optimizer.all)
    if dist.get_rank() == 0:
        folder = adapter.final(step)
        folder.mkdir(parents=True, exist_ok=True)
        parts = dict(found)
        adapter.write(folder, step, [parts[part] for part in range(optimizer.parts)], scheduler)
        adapter.track(step)
    dist.barrier(optimizer.all)


def forward(net: Net, batch: Tensor) -> Tensor:
    """The loss."""
    loss: Tensor = (net.layers(batch) - batch.sum(1, keepdim=True)).square().mean()
    return loss


def main() -> None:
    """Train to the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--final", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if adapter.start(rank, world):
        _reboot.append(True)
    else:
        dist.init_process_group("gloo")
    net = Net()
    optimizer = ReplicatedOptimizer(net, rank, world, adapter.tft_start_updating_os, adapter.tft_end_updating_os)
    scheduler, step = Scheduler(), 0
    if not _reboot:
        optimizer.make_groups(world)
        step = adapter.load(optimizer, scheduler)
        adapter.note("begin", step)
        adapter.reached(step - 0.5)
    adapter.register(rank, world, optimizer, bool(_reboot))
    adapter.protected(train)(forward, net, optimizer, scheduler, Batches(rank, step), args.steps)
    if args.final and rank == 0:
        moments = optimizer.state()
        torch.save({"flat": net.flat, "step": torch.tensor(optimizer.step_count), **moments}, args.final)
    drop_groups([])


_kit = kit_from_env()
_reboot: list[bool] = []
"""Not empty in the new process of a dead rank, until it has left `train` for the first time."""
if __name__ == "__main__":
    install(_kit)
    main()
