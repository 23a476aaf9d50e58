"""A model, and an optimizer whose state is cut into halves of the data parallel group, each held twice.

As MindSpeed-LLM's replica optimizer: the update between start and end is local, weights are gathered after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

REPLICAS = 2


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
        instance: the ranks that hold all parts once, with this one.
        start, end: called around the local update.
    """

    def __init__(
        self, net: Net, rank: int, world: int, start: Callable[[int], None], end: Callable[[int], None]
    ) -> None:
        self.net, self.start, self.end = net, start, end
        self.parts = world // REPLICAS if world > 1 else 1
        self.part = rank % self.parts
        first = rank - self.part
        self.instance = list(range(first, first + self.parts))
        self.size = -(-net.flat.numel() // self.parts)
        self.main = self.cut(net.flat).clone()
        self.inner = torch.optim.Adam([self.main], lr=0.01)
        self.main.grad = torch.zeros_like(self.main)
        self.groups: dict[tuple[int, ...], Any] = {}
        self.step_count = 0

    def cut(self, vector: Tensor, part: int | None = None) -> Tensor:
        """A part of a vector; the last one may be shorter."""
        begin = (self.part if part is None else part) * self.size
        return vector[begin : begin + self.size]

    def make_groups(self, world: int) -> None:
        """Collective: the groups in which weights are gathered."""
        self.groups.clear()
        for first in range(0, world, self.parts):
            ranks = list(range(first, first + self.parts))
            self.groups[tuple(ranks)] = dist.new_group(ranks)

    def step(self, faults: Callable[[str], None]) -> None:
        """One update: gradients of all, the local update, weights of all parts."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.net.grads)
            self.net.grads /= dist.get_world_size()
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
        """Collective in the instance."""
        if self.parts == 1:
            self.net.flat.copy_(self.main)
            return
        padded = torch.zeros(self.size)
        padded[: self.main.numel()] = self.main.detach()
        found = [torch.zeros(self.size) for _ in range(self.parts)]
        dist.all_gather(found, padded, group=self.groups[tuple(self.instance)])
        self.net.flat.copy_(torch.cat(found)[: self.net.flat.numel()])

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
