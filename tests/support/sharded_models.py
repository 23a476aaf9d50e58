"""Small models for FSDP2 and FSDP1, with layers and optimizers of many kinds, for four ranks on CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Net(nn.Module):
    """Layers of all kinds of shapes: even, uneven, fewer rows than ranks, tied, frozen, with buffers, not used."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, 10), nn.Linear(10, width)) for _ in range(2))
        self.norm = nn.BatchNorm1d(width)
        self.few = nn.Linear(width, 3)
        self.back = nn.Linear(3, width)
        self.one = nn.Linear(width, 1)  # the first rank has all of it
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(width, width)
        self.unused = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.arange(6).view(2, 3).t(), persistent=True)  # its memory is not in order

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x) + self.one(x)
        x = self.norm(x + self.frozen(x))
        logits: Tensor = self.head(x + self.back(torch.relu(self.few(x))))
        return logits


class Counting(torch.optim.Optimizer):
    """Has a plain number, nested state and a tensor without dimension for each parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "shape": (1, (2, 3)), "scale": torch.tensor(0.5)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """The update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["calls"] = 0
                        state["inner"] = {"sum": torch.zeros_like(p), "factors": [torch.zeros(2), torch.ones(2)]}
                    state["calls"] += 1
                    state["inner"]["sum"].add_(p.grad)
                    state["inner"]["factors"][0] += state["calls"]
                    p.add_(state["inner"]["sum"], alpha=-group["lr"] * float(group["scale"]))


def spread(module: nn.Module, **options: Any) -> nn.Module:
    """`fully_shard`, which changes the module's class."""
    fully_shard(module, **options)
    return module


Built = tuple[dict[str, nn.Module], dict[str, Any]]


def one_dimension() -> Built:
    """`fully_shard` of each layer, then of the root; AdamW with two groups."""
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[Any] = [{"params": trained[:3], "weight_decay": 0.0}, {"params": trained[3:]}]
    return {"model": model}, {"optimizer": torch.optim.AdamW(groups, lr=0.01)}


def hybrid() -> Built:
    """Two replicas of two shards, mixed precision, activation checkpointing, momentum."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, policy = Net(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for i, layer in enumerate(model.layers):
        model.layers[i] = spread(checkpoint_wrapper(layer), mesh=mesh, mp_policy=policy)
    fully_shard(model.norm, mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return {"model": model}, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)}


def half() -> Built:
    """Parameters of two bytes, kept on the host; a learning rate that is a tensor."""
    model = Net().bfloat16()
    for layer in model.layers:
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model, reshard_after_forward=False, offload_policy=CPUOffloadPolicy(pin_memory=False))
    rate = torch.tensor(0.01)
    return {"model": model}, {"optimizer": torch.optim.Adam(model.parameters(), lr=rate, amsgrad=True)}


def tensor_parallel() -> Built:
    """Two dimensions: layers split over two ranks, and sharded over two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Net()
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return {"model": model}, {"optimizer": torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)}


def several() -> Built:
    """Two models and two optimizers, one of them unusual."""
    first, second = Net(), Net(16)
    for model in (first, second):
        fully_shard(model)
    both = [*first.parameters(), *second.parameters()]
    return {"a": first, "b": second}, {"x": torch.optim.AdamW(both[4:], lr=0.01), "y": Counting(both[:4])}


def _flat(model: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def flat() -> Built:
    """FSDP1: flat tensors for the layers, for what is frozen, and for the rest."""
    model: Any = Net()
    for i, layer in enumerate(model.layers):
        model.layers[i] = _flat(layer)
    model.frozen = _flat(model.frozen)
    whole = _flat(model)
    trained = [p for p in whole.parameters() if p.requires_grad]
    groups: list[Any] = [{"params": trained[:1], "weight_decay": 0.0}, {"params": trained[1:]}]
    return {"model": whole}, {"optimizer": torch.optim.AdamW(groups, lr=0.01)}


def flat_own() -> Built:
    """FSDP1 with the parameters in the optimizer, mixed precision, activation checkpointing."""
    model, policy = Net(), MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    for i, layer in enumerate(model.layers):
        model.layers[i] = _flat(checkpoint_wrapper(layer), use_orig_params=True, mixed_precision=policy)
    whole = _flat(model, use_orig_params=True)
    trained = [p for p in whole.parameters() if p.requires_grad]
    groups: list[Any] = [{"params": trained[:3], "weight_decay": 0.0}, {"params": trained[3:]}]
    return {"model": whole}, {"optimizer": torch.optim.AdamW(groups, lr=0.01)}


def flat_hybrid() -> Built:
    """FSDP1, two replicas of two shards; momentum."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    kind = ShardingStrategy.HYBRID_SHARD
    model = _flat(Net(), use_orig_params=True, sharding_strategy=kind, device_mesh=mesh)
    return {"model": model}, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)}


def flat_whole() -> Built:
    """FSDP1 that shards nothing, in a model of two."""
    model, kind = Net(), ShardingStrategy.NO_SHARD
    first = _flat(model, use_orig_params=True, sharding_strategy=kind)
    second = _flat(Net(16), use_orig_params=True)
    both = [*first.parameters(), *second.parameters()]
    return {"a": first, "b": second}, {"x": torch.optim.AdamW(both, lr=0.01)}


_ALL = (one_dimension, hybrid, half, tensor_parallel, several, flat, flat_own, flat_hybrid, flat_whole)
SHAPES: dict[str, Callable[[], Built]] = {build.__name__: build for build in _ALL}


def built(name: str, seed: int = 1) -> Built:
    """The models of a shape, the same on all ranks."""
    torch.manual_seed(seed)
    return SHAPES[name]()


def train(made: Built, first: int, last: int) -> None:
    """Steps `first` to `last`, on data of each rank's own (not where ranks split a layer)."""
    models, optimizers = made
    mine = dist.get_rank() // 2 if any(_split(m) for m in models.values()) else dist.get_rank()
    for step in range(first, last):
        numbers = torch.Generator().manual_seed(100 * step + mine)
        tokens = torch.randint(0, 12, (8,), generator=numbers)
        for model in models.values():
            nn.functional.cross_entropy(model(tokens).float(), tokens).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()


def _split(model: nn.Module) -> bool:
    found = [p for p in model.parameters() if isinstance(p, DTensor) and p.device_mesh.mesh_dim_names]
    return any("tensor" in (p.device_mesh.mesh_dim_names or ()) for p in found)
