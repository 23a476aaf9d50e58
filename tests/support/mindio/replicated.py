"""A model, and an optimizer whose state is cut into halves of the data parallel group, each held twice.

As MindSpeed-LLM's replica optimizer: the update between start and end is local, weights are gathered after it. Where
ranks are missing their micro-batches are done by the others, and who holds a lost rank's part gathers in its place,
too. Gradients are summed in double precision: there the order of the few summands is not seen in the result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

REPLICAS = 2
STOPPED = threading.Event()
"""The device was stopped since the training function was entered."""
LOOK, RAISES = 0.0005, 1.0
"""Seconds between two looks at a collective; and for it to raise by itself once the device was stopped."""


def finish(work: Any) -> None:
    """Wait for a collective as on a device that can be stopped: the training thread leaves it then.

    One that gloo begins while its connections are being cut may miss that, and waits for the group's timeout then, half
    an hour, in one of gloo's threads. It has no connection any more that could be cut.

    Raises:
        RuntimeError: what it raises; or it was left.
    """
    until = None
    while not work.is_completed() and threading.current_thread() is threading.main_thread():
        until = time.monotonic() + RAISES if until is None and STOPPED.is_set() else until
        if until is not None and time.monotonic() > until:
            raise RuntimeError("FORCE STOP")
        time.sleep(LOOK)
    work.wait()


class Net(nn.Module):
    """A perceptron; `flat` is all of its parameters in one vector, which they are views of."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.layers.append(nn.Linear(width, 1))
        sizes = [p.numel() for p in self.parameters()]
        length = sum(sizes)
        self.flat, self.grads = torch.zeros(length), torch.zeros(length)
        begin = 0
        for p, size in zip(self.parameters(), sizes, strict=True):
            self.flat[begin : begin + size] = p.detach().flatten()
            p.data = self.flat[begin : begin + size].view_as(p)
            p.grad = self.grads[begin : begin + size].view_as(p)
            begin += size


class ReplicatedOptimizer:
    """Adam over this rank's part of the vector.

    Args:
        part, parts: which part this rank has; ranks at a distance of `parts` hold the same.
        world: how many ranks the complete job has, and micro-batches a step.
        start, end: called around the local update.
    """

    def __init__(
        self, net: Net, rank: int, world: int, start: Callable[[int], None], end: Callable[[int], None]
    ) -> None:
        self.net, self.start, self.end = net, start, end
        self.parts = world // REPLICAS if world > 1 else 1
        self.part = rank % self.parts
        self.rank, self.micros = rank, world
        self.total = torch.zeros(net.grads.numel(), dtype=torch.float64)
        self.size = -(-net.flat.numel() // self.parts)
        self.main = self.cut(net.flat).clone()
        self.inner = torch.optim.Adam([self.main], lr=0.01)
        self.main.grad = torch.zeros_like(self.main)
        self.groups: dict[tuple[int, ...], Any] = {}
        """Ranks that hold all parts once, in the order in which all go through them."""
        self.all: Any = None
        """The group of all ranks that are there."""
        self.step_count = 0

    def cut(self, vector: Tensor, part: int | None = None) -> Tensor:
        """A part of a vector; the last one may be shorter."""
        begin = (self.part if part is None else part) * self.size
        return vector[begin : begin + self.size]

    def make_groups(self, world: int) -> None:
        """Collective: the groups in which weights are gathered."""
        self.all = dist.group.WORLD
        self.groups.clear()
        for ranks in self._instances(world):
            group = dist.new_group(list(ranks))
            if self.rank in ranks:
                self.groups[ranks] = group

    def leave_out(self, left: list[int]) -> None:
        """Collective of the ranks that are left: their groups. For who is lost another holder of its part stands in."""
        self.all = dist.new_group(left, use_local_synchronization=True)
        self.groups.clear()
        stands_in = {rank: next(one for one in left if one % self.parts == rank % self.parts) for rank in self._ranks}
        for ranks in self._instances(self.micros):
            there = tuple(sorted(rank if rank in left else stands_in[rank] for rank in ranks))
            if self.rank in there and there not in self.groups and {*ranks} & {*left}:
                self.groups[there] = dist.new_group(list(there), use_local_synchronization=True)

    @property
    def _ranks(self) -> range:
        return range(self.micros)

    def _instances(self, world: int) -> list[tuple[int, ...]]:
        return [tuple(range(first, first + self.parts)) for first in range(0, world, self.parts)]

    def add(self) -> None:
        """The gradients of one micro-batch."""
        self.total += self.net.grads

    def step(self, faults: Callable[[str], None]) -> None:
        """One update: gradients of all, the local update, weights of all parts."""
        if self.micros > 1:
            finish(dist.all_reduce(self.total, group=self.all, async_op=True))
        self.net.grads.copy_(self.total / self.micros)
        self.total.zero_()
        faults("before_update")
        assert self.main.grad is not None
        self.main.grad.copy_(self.cut(self.net.grads))
        self.start(-1)
        self.inner.step()
        faults("update")
        self.step_count += 1
        self.end(self.step_count)
        faults("after_update")
        self.gather_weights()

    def gather_weights(self) -> None:
        """Collective in all instances that this rank is in."""
        if self.parts == 1:
            self.net.flat.copy_(self.main)
            return
        padded = torch.zeros(self.size)
        padded[: self.main.numel()] = self.main.detach()
        for ranks, group in self.groups.items():
            found = [torch.zeros(self.size) for _ in range(self.parts)]
            finish(dist.all_gather(found, padded, group=group, async_op=True))
            by_part = [value for _, value in sorted(zip((rank % self.parts for rank in ranks), found, strict=True),
                                                    key=lambda pair: pair[0])]  # fmt: skip
            self.net.flat.copy_(torch.cat(by_part)[: self.net.flat.numel()])

    def state(self) -> dict[str, Tensor]:
        """This rank's part."""
        moments = self.inner.state[self.main] if self.inner.state else {}
        found = {"main": self.main.detach()}
        found |= {name: moments.get(name, torch.zeros_like(self.main)) for name in ("exp_avg", "exp_avg_sq")}
        return {name: _padded(value, self.size) for name, value in found.items()}

    def load(self, parts: list[dict[str, Tensor]], step: int) -> None:
        """Take this rank's part, and all weights."""
        self.take(parts[self.part], step)
        self.net.flat.copy_(torch.cat([part["main"] for part in parts])[: self.net.flat.numel()])

    def take(self, own: dict[str, Tensor], step: int) -> None:
        """Take this rank's part."""
        length = self.main.numel()
        self.main.data.copy_(own["main"][:length])
        self.inner.state[self.main] = {
            "step": torch.tensor(float(step)),
            "exp_avg": own["exp_avg"][:length].clone(),
            "exp_avg_sq": own["exp_avg_sq"][:length].clone(),
        }
        self.step_count = step


def _padded(value: Tensor, size: int) -> Tensor:
    found = torch.zeros(size)
    found[: value.numel()] = value
    return found
