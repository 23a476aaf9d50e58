"""Three ranks that see one fault after another, each once the launcher is ready for it; what they hold is written down.

Rank 1 is killed first; its new process survives all further faults, and says what it and the launcher hold.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lastgasp.pytorch import Session, TorchState, train
from support.held import held, more

APART, WIDTH = 4, 20_000
"""Steps between two faults; 2.6 MB of parameters and moments, so that a copy that is kept would show."""
KINDS = ("sigkill,rank=0", "sigkill,rank=2", "exception,rank=1", "sigkill,rank=2", "sigkill,rank=0", "exception,rank=0")
HANG = 9
"""Each so-manieth fault is a hang."""
MEMORY, PATIENCE = 20_000, 60.0
"""kB, seconds."""


def faults(count: int) -> str:
    """The first so many."""
    kinds = ["sigkill,rank=1", *(_kind(n) for n in range(count - 1))]
    return ";".join(f"kind={kind},step={step_of(n)},phase=backward,incarnation={n}" for n, kind in enumerate(kinds))


def _kind(number: int) -> str:
    return f"sigstop,rank={number % 4 // 2 * 2}" if number % HANG == HANG - 1 else KINDS[number % len(KINDS)]


def step_of(number: int) -> int:
    """The step that is disturbed by this fault."""
    return APART * (number + 1)


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    train(training, arguments())


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--faults", required=True, type=int)
    parser.add_argument("--after", required=True, type=int, help="faults before what is held is compared with")
    return parser.parse_args()


def training(args: argparse.Namespace) -> None:
    """From the process group to the last step."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    with Session.open(args.dir, state=TorchState(model, optimizer), max_steps=step_of(args.faults) + 2) as s:
        for _ in s.batches(range(10_000)):
            pause(args.dir, args.faults, args.after, s.step, s.alive)
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    if rank == 0:
        torch.save(net.state_dict(), args.dir / "final.pt")
    dist.destroy_process_group()


def pause(directory: Path, faults: int, after: int, step: int, alive: Callable[[], object]) -> None:
    """A step begins: wait where a fault is due in it; write down what is held after so many faults, and after all."""
    number, place = divmod(step, APART)
    if place == 0 and 0 < number <= faults:  # by the fault of incarnation number - 1
        _wait((directory / f"go-{number - 1}").exists, alive)
    if place == 2 and os.environ["RANK"] == "1" and number in (after, faults):
        _compare(directory, alive)


def _wait(condition: Callable[[], bool], alive: Callable[[], object]) -> None:
    while not condition():
        alive()
        time.sleep(0.01)


def _compare(directory: Path, alive: Callable[[], object]) -> None:
    """Write down what is held, once it is not more than the first time; or after all of the patience."""
    first, deadline = directory / "held", time.monotonic() + PATIENCE
    if not first.exists():
        first.write_text(_held(directory))
        return
    _wait(lambda: not more(first.read_text(), _held(directory), MEMORY) or time.monotonic() > deadline, alive)
    (directory / "more").write_text(more(first.read_text(), _held(directory), MEMORY))


def _held(directory: Path) -> str:
    """By this process and the launcher."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later is not in use
    return held("self", (directory / "launcher").read_text())


if __name__ == "__main__":
    main()
