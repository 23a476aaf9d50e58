"""Loops in which each rank holds a part, in a function that is entered again: FSDP2, HSDP, FSDP1 and
ZeroRedundancyOptimizer.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lastgasp import arena
from lastgasp.pytorch import Session, TorchState, train
from lastgasp.pytorch.loop import again
from support import again_faults, card, train_sharded, train_zero
from support.again_faults import note

GATE = 5
"""Completed steps after which the ranks wait for the file `go`: faults come behind it."""
SHAPES = ("zero", *train_sharded.SHAPES, *train_sharded.FLAT)
_copy = arena.Arena.copy
_drop_groups: Any = vars(again)["drop_groups"]
_before: Any = lambda: None  # noqa: E731
"""Has the model of the call before, if that still lives."""
_outside: list[nn.Module] = []


def main() -> None:
    """Twelve steps: two epochs of five and a bit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--shape", default="plain", choices=SHAPES)
    parser.add_argument("--arena", default="every 1")
    parser.add_argument("--dies", default="", help="this rank is killed when it is entered again, before anything else")
    parser.add_argument("--outside", action="store_true", help="the model is kept from one call to the next")
    parser.add_argument("--full", action="store_true", help="the host has no memory for arenas")
    parser.add_argument("--damaged", action="store_true", help="a bit of step 7 in the arena of rank 1 is flipped")
    parser.add_argument("--stuck", default="", help="this rank stays in its own code in step 9, and raises nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    card.one_card()
    again_faults.install(args.dir)
    if args.full:
        vars(arena)["available"] = lambda: 1000
    if args.damaged and os.environ["RANK"] == "1":
        setattr(arena.Arena, _copy.__name__, damaged)
    vars(again)["drop_groups"] = drop_groups
    train(training, args)
    gc.collect()  # ends the threads of the process groups, which the model holds: one may still let go of a tensor


def damaged(self: arena.Arena, step: int, pieces: Any, *, buddy: bool = False) -> None:
    """As `Arena.copy`; then a bit of step 7 is flipped."""
    _copy(self, step, pieces, buddy=buddy)
    for header, payload in zip(self._headers, self._payloads, strict=True):
        if step == 7 == header[arena._STEP]:
            payload[header[arena._LENGTH] // 2] ^= 1


def drop_groups(wrapped: list[Any]) -> None:
    """Once the model of the call that has ended is gone; a DDP wrapper, which holds its own, is let go of here."""
    assert _outside or wrapped or _before() is None, "the model of the call before has not been let go of"
    _drop_groups(wrapped)


def training(args: argparse.Namespace) -> None:
    """From the process group to the last step."""
    global _before
    if (os.environ["RANK"], os.environ.get("LASTGASP_INCARNATION")) == (args.dies, "1"):
        note(args.dir, f"died {os.getpid()}")
        os.kill(os.getpid(), 9)
    again_faults.at("function called")
    dist.init_process_group(card.backend())
    again_faults.at("group made")
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(7)
    model, optimizer = made(args, world)
    _before = weakref.ref(getattr(model, "module", model))
    torch.manual_seed(7 + 1000 * rank)  # other random numbers on each rank
    random.seed(7 + 1000 * rank)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    x = torch.randn(4 * 5 * 2 * world, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    losses: dict[str, Any] = {"count": 0}
    state = TorchState(model, optimizer, schedule, sampler=sampler, extra={"losses": losses})
    with Session.open(args.dir, state=state, max_steps=12, arena=args.arena, keep=9) as s:
        note(args.dir, f"entered {os.getpid()} {s.step} {s.resumed}")
        for _ in s.epochs(1000):
            for inputs, wanted in s.batches(loader):
                if s.step == 8:
                    again_faults.stay(args.stuck)
                while s.step >= GATE and not (args.dir / "go").exists():
                    s.alive()
                    time.sleep(0.01)
                again_faults.at("first step")
                step(args.shape, model, optimizer, *card.put((inputs, wanted)))
                schedule.step()
                losses["count"] += 1
                note(args.dir, f"trained {os.getpid()} {s.step}")
                again_faults.at("first update")
        note(args.dir, f"ended {os.getpid()} {s.step}")
    whole = result(model, optimizer)
    note(args.dir, f"seen {losses['count']}")
    if rank == 0:
        torch.save(whole, args.dir / "final.pt")
    dist.destroy_process_group()


def made(args: argparse.Namespace, world: int) -> tuple[Any, Any]:
    """Model and optimizer."""
    if args.shape == "zero":
        return train_zero.made("plain")
    if args.outside and not _outside:
        _outside.append(train_sharded.layers().to(card.device()))
    make = train_sharded.flat if args.shape in train_sharded.FLAT else train_sharded.sharded
    model = make(args.shape, world, _outside[0] if args.outside else None)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(shape: str, model: Any, optimizer: Any, inputs: Any, wanted: Any) -> None:
    """One update."""
    optimizer.zero_grad()
    parts = 2 if shape in ("accumulated", "summed", "flat-accumulated") else 1
    for i, (a, b) in enumerate(zip(inputs.chunk(parts), wanted.chunk(parts), strict=True)):
        if shape == "accumulated":
            model.set_requires_gradient_sync(i == parts - 1)
        with train_sharded.unsynchronised(shape, model, i):
            ((model(a + 0.1 * random.random() * torch.randn_like(a)) - b) ** 2).mean().backward()
    if shape in train_sharded.FLAT:
        model.clip_grad_norm_(1.0)
    elif shape != "zero":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # by operations of DTensors on the mesh
    optimizer.step()


def result(model: Any, optimizer: Any) -> dict[str, Any]:
    """Weights and, of `ZeroRedundancyOptimizer`, moments."""
    if not hasattr(optimizer, "consolidate_state_dict"):
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    optimizer.consolidate_state_dict()
    found: dict[str, Any] = model.module.state_dict()
    if dist.get_rank() == 0:
        states = optimizer.state_dict()["state"]
        found |= {f"{n} {key}": value for n, one in states.items() for key, value in one.items()}
    return found


if __name__ == "__main__":
    assert "RANK" in os.environ, "start it with torchrun or lastgasp run"
    main()
