"""A loop around a DeepSpeed engine on the CPU: ZeRO, a schedule of its own, dropout, shuffling, accumulation."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lastgasp.pytorch import Session, TorchState

BATCHES = 5
SHAPES = ("plain", "accumulated", "quarters", "half")
PARTS = {"accumulated": 2, "quarters": 4}
"""Batches that are accumulated in a step."""


def main() -> None:
    """Twelve steps: two epochs of five and a bit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--final", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--shape", default="plain", choices=SHAPES)
    parser.add_argument("--die", help="RANK:BATCH, killed in the backward pass of this batch, in the first attempt")
    parser.add_argument("--plain", help="a checkpoint: load it and save it again in --dir, by DeepSpeed alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled, which takes a minute
    deepspeed.init_distributed("gloo", verbose=False)
    engine = made(args.stage, args.shape)
    if args.plain:
        path, _ = engine.load_checkpoint(args.plain)
        assert path, args.plain
        engine.save_checkpoint(args.dir)
    else:
        train(engine, args)
    whole = gathered(engine, args.stage) | {"batches": torch.tensor(engine.micro_steps)}
    if args.final and dist.get_rank() == 0:
        torch.save(whole, args.final)
    dist.destroy_process_group()


def train(engine: Any, args: argparse.Namespace) -> None:
    """The loop."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(7 + 1000 * rank)  # other random numbers on each rank
    parts = PARTS.get(args.shape, 1)
    x = torch.randn(4 * BATCHES * 2 * world, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8 // parts, sampler=sampler)  # an engine counts its batches itself
    losses: dict[str, Any] = {"count": 0}
    state = TorchState(engine, sampler=sampler, extra={"losses": losses})
    with Session.open(args.dir, state=state, every=args.every, max_steps=args.steps, arena="every 1", keep=9) as s:
        for _ in s.epochs(1000):
            for inputs, wanted in s.batches(loader):
                found = engine((inputs + 0.1 * torch.randn_like(inputs)).to(kind(args.shape)))
                loss = ((found.float() - wanted) ** 2).mean()
                if args.die == f"{rank}:{engine.micro_steps}" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    found.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
                engine.backward(loss)
                engine.step()
                losses["count"] += 1
    print(f"rank {rank}: {engine.global_steps} steps, {engine.micro_steps} batches", flush=True)


def made(stage: int, shape: str) -> Any:
    """The engine."""
    torch.manual_seed(7)
    norm = nn.BatchNorm1d(33) if kind(shape) == torch.float32 else nn.LayerNorm(33)  # statistics in halves fail on CPU
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 33), norm, nn.Linear(33, 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8 // PARTS.get(shape, 1),
        "gradient_accumulation_steps": PARTS.get(shape, 1),
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40},
        "steps_per_print": 1 << 30,
    }
    if shape == "half":
        config["bf16"] = {"enabled": True}
    return deepspeed.initialize(model=model, config=config)[0]


def kind(shape: str) -> torch.dtype:
    """Of the parameters."""
    return torch.bfloat16 if shape == "half" else torch.float32


def gathered(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    """The whole parameters."""
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=stage == 3):
        return {name: one.detach().clone() for name, one in parameters.items()}


if __name__ == "__main__":
    assert "RANK" in os.environ, "start it with torchrun or lastgasp run"
    main()
