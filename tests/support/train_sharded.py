"""A loop with `fully_shard`: Adam in shards, a schedule, dropout, shuffling, gradient accumulation on request."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lastgasp.pytorch import Session, TorchState

sys.path.append(str(Path(__file__).parents[1]))  # as a script of its own
from support import card, in_collectives

BATCHES = 5
SHAPES = ("plain", "hybrid", "accumulated", "summed", "half", "offload", "checkpointed")
"""Of two accumulated batches either only the second one's gradients are synchronised, or both are and are summed."""
FLAT = ("flat", "flat-own", "flat-hybrid", "flat-half", "flat-accumulated", "flat-grads", "flat-whole")
"""The same with FSDP1; the optimizer has the flat tensors, or (`own`) the parameters."""


def main() -> None:
    """Twelve steps: two epochs of five and a bit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--final", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--arena", default="every 1")
    parser.add_argument("--shape", default="plain", choices=SHAPES + FLAT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    card.one_card()
    dist.init_process_group(card.backend())
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(7)
    model = flat(args.shape, world) if args.shape in FLAT else sharded(args.shape, world)
    torch.manual_seed(7 + 1000 * rank)  # other random numbers on each rank
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    x = torch.randn(4 * BATCHES * 2 * world, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    losses: dict[str, Any] = {"count": 0}
    state = TorchState(model, optimizer, schedule, sampler=sampler, extra={"losses": losses})
    with Session.open(args.dir, state=state, every=args.every, max_steps=args.steps, arena=args.arena, keep=9) as s:
        in_collectives.install(rank, lambda: s.step)
        for _ in s.epochs(1000):
            for batch in s.batches(loader):
                inputs, wanted = card.put(batch)
                optimizer.zero_grad()
                parts = 2 if args.shape in ("accumulated", "summed", "flat-accumulated") else 1
                for i, (a, b) in enumerate(zip(inputs.chunk(parts), wanted.chunk(parts), strict=True)):
                    if args.shape == "accumulated":
                        model.set_requires_gradient_sync(i == parts - 1)  # type: ignore[operator]
                    with unsynchronised(args.shape, model, i):
                        loss = ((model(a + 0.1 * torch.randn_like(a)) - b) ** 2).mean()
                        loss.backward()
                optimizer.step()
                schedule.step()
                losses["count"] += 1
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if args.final and rank == 0:
        torch.save({**whole, "count": torch.tensor(losses["count"])}, args.final)
    dist.destroy_process_group()


def unsynchronised(shape: str, model: Any, batch: int) -> Any:
    """FSDP1's way to accumulate the first of two batches."""
    return model.no_sync() if shape == "flat-accumulated" and batch == 0 else nullcontext()


def layers() -> nn.Sequential:
    """Without shards."""
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 33), nn.LayerNorm(33), nn.Linear(33, 1)
    )


def sharded(shape: str, world: int, model: nn.Module | None = None) -> nn.Module:
    """The same model on any number of ranks."""
    model = layers().to(card.device()) if model is None else model
    policy: dict[str, Any] = {}
    if shape == "half":
        policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if shape == "offload":
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if shape == "checkpointed":
        inner = (checkpoint_wrapper(one) if isinstance(one, nn.Linear) else one for one in model.children())
        model = nn.Sequential(*inner)
    if shape == "hybrid":
        policy["mesh"] = init_device_mesh(card.device().type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        policy["mesh"] = init_device_mesh(card.device().type, (world,))
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, **policy)
    fully_shard(model, **policy)
    return model


def flat(shape: str, world: int, model: nn.Module | None = None) -> nn.Module:
    """The same model in FSDP1; each linear layer in a flat tensor of its own, the rest in one."""
    kinds = {"flat-hybrid": ShardingStrategy.HYBRID_SHARD, "flat-grads": ShardingStrategy.SHARD_GRAD_OP,
             "flat-whole": ShardingStrategy.NO_SHARD}  # fmt: skip
    options: dict[str, Any] = {
        "sharding_strategy": kinds.get(shape, ShardingStrategy.FULL_SHARD), "device_id": card.device(),
        "use_orig_params": shape in ("flat-own", "flat-hybrid"),
    }  # fmt: skip
    if shape == "flat-hybrid":
        mesh = init_device_mesh(card.device().type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
        options["device_mesh"] = mesh
    if shape == "flat-half":
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy, model = ModuleWrapPolicy({nn.Linear}), layers().to(card.device()) if model is None else model
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)


if __name__ == "__main__":
    assert "RANK" in os.environ, "start it with torchrun or lastgasp run"
    main()
