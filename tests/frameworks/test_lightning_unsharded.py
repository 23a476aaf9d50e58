"""A module that was sharded is as before `configure_model()`, and is sharded once more."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lastgasp.pytorch.drop_groups import drop_groups
from lastgasp_lightning.unsharded import KeptParts, cannot_shard_again, of_sharding, own_class


class Net(nn.Module):
    """With tied weights, a layer that is made when it is sharded, a hook and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
        self.layers[2].weight = self.layers[0].weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.late: nn.Module | None = None
        self.calls = 0
        self.handle = self.register_forward_pre_hook(self._count)

    def _count(self, *_: object) -> None:
        self.calls += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of all layers."""
        assert self.late is not None
        found: torch.Tensor = self.late(self.layers(x))
        return found

    def shard(self) -> None:
        """As a `configure_model` does."""
        if self.late is None:
            self.late = nn.Linear(4, 2)
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(self.late, mesh=mesh)
        fully_shard(self, mesh=mesh)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    store = vars(dist)["HashStore"]()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    gc.collect()  # the model holds the group
    drop_groups([])


@pytest.mark.usefixtures("alone")
def test_a_sharded_module_is_sharded_once_more() -> None:
    net, x = Net(), torch.randn(5, 4)
    assert cannot_shard_again(net) == ""
    kept, before, names = KeptParts(net), copy.copy(vars(net)), dict(net.named_parameters())
    for _ in range(3):
        net.shard()
        assert isinstance(net, FSDPModule) and own_class(net) is Net and of_sharding(net)
        assert all(isinstance(one, DTensor) for one in net.parameters())
        net(x).sum().backward()
        assert net.calls == 1
        kept.renew()
        assert type(net) is Net and vars(net).keys() == before.keys() and net.late is None
        now = dict(net.named_parameters())
        assert now.keys() == names.keys()
        for name, parameter in now.items():
            assert type(parameter) is nn.Parameter and parameter.shape == names[name].shape
            assert parameter.requires_grad == names[name].requires_grad and parameter.grad is None
        assert net.layers[2].weight is net.layers[0].weight
    net.handle.remove()
    assert not net._forward_pre_hooks


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_made_anew_is_told() -> None:
    class Other(nn.Parameter):
        pass

    net = Net()
    net.layers[1].weight = Other(torch.ones(4))
    assert cannot_shard_again(net).startswith("layers.1.weight is of type Other")
    sharded = Net()
    sharded.shard()
    assert "sharded already" in cannot_shard_again(sharded)
