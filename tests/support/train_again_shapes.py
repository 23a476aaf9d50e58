"""Loops inside of `train` as real scripts have them, some of which cannot be entered again; one of two ranks dies."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset

from lastgasp.pytorch import Session, TorchState, train
from support.again_faults import note

GATE, FAULT, STEPS = 5, 8, 12
"""Completed steps after which the ranks wait for the file `go`, and after which the fault comes; all steps."""
Args = argparse.Namespace
_made: list[weakref.ref[nn.Module]] = []
Step = Callable[[Tensor], None]


def main() -> None:
    """Train the shape that is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--final", type=Path)
    parser.add_argument("--shape", required=True, choices=sorted(SHAPES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.outside = outside(args.shape)
    args.drawn = drawn() if args.shape == "generator" else None
    train(SHAPES[args.shape], args)


def data(workers: int) -> DataLoader[Any]:
    """Seven batches, the ranks' in turn; without a process group, which a loader made outside of the function lacks."""
    whole = TensorDataset(torch.randn(56, 8, generator=torch.Generator().manual_seed(1)))
    sampler: Any = DistributedSampler(whole, num_replicas=2, rank=int(os.environ["RANK"]))
    return DataLoader(whole, 4, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)


def outside(shape: str) -> DataLoader[Any] | None:
    """The loader that a shape has made before its function is called, if it has."""
    if shape == "counting":
        whole = TensorDataset(torch.randn(128, 8, generator=torch.Generator().manual_seed(1)))
        return DataLoader(whole, 4, sampler=Counting(64 * int(os.environ["RANK"])))
    return data(2) if shape.startswith("persistent") else None


class Counting(Sampler[int]):
    """64 samples from the first one on, in another order in each pass, by a count of its own."""

    def __init__(self, first: int) -> None:
        self._first, self._passes = first, 0

    def __len__(self) -> int:
        return 64

    def __iter__(self) -> Iterator[int]:
        self._passes += 1
        order = torch.randperm(64, generator=torch.Generator().manual_seed(self._passes))
        return iter((self._first + order).tolist())


def drawn() -> Iterator[list[Tensor]]:
    """Batches that are given only once."""
    while True:
        for batch in data(0):
            yield list(batch)


def begin() -> None:
    """The process group, and random numbers of this rank's own. What the call before has made is gone by then."""
    gc.collect()
    assert all(one() is None for one in _made), "a model of the call before is in memory still"
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(100 + dist.get_rank())


def small(seed: int = 3) -> nn.Module:
    """Draws random numbers in each step."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 8))
    _made.append(weakref.ref(net))
    return net


def loop(args: Args, s: Session, batches: Any, step: Step) -> None:
    """Twelve steps, any number of passes."""
    note(args.dir, f"entered {os.getpid()} {s.step} {s.resumed}")
    for _ in s.epochs(100):
        for batch in s.batches(batches):
            while s.step >= GATE and not (args.dir / "go").exists():
                s.alive()
                time.sleep(0.01)
            later = args.shape == "worker dies later" and os.environ.get("LASTGASP_INCARNATION") == "1"
            if (later or args.shape.endswith("worker dies")) and s.step == FAULT and os.environ["RANK"] == "1":
                worker_dies(args)
            step(batch[0])
            note(args.dir, f"trained {os.getpid()} {s.step}")


def worker_dies(args: Args) -> None:
    """A worker process of the loader is killed, once."""
    if not (args.dir / "died").exists():
        (args.dir / "died").touch()
        multiprocessing.active_children()[0].kill()


def end(args: Args, *models: nn.Module) -> None:
    """Write down what was trained."""
    if args.final and dist.get_rank() == 0:
        torch.save({f"{n}.{k}": v for n, one in enumerate(models) for k, v in one.state_dict().items()}, args.final)
    dist.destroy_process_group()


def one_model(args: Args, batches: Any, compiled: bool = False) -> None:
    """A model, its optimizer."""
    net = small()
    ddp = DistributedDataParallel(net)
    model: Any = torch.compile(ddp, backend="eager") if compiled else ddp
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()

    with Session.open(args.dir, state=TorchState(model, optimizer), max_steps=STEPS) as s:
        loop(args, s, batches, step)
    end(args, net)


def kept_loader(args: Args) -> None:
    """A loader that was made outside of the function: its workers outlive each pass, or its sampler counts them."""
    begin()
    one_model(args, args.outside)


def generator(args: Args) -> None:
    """Batches from a generator that was made outside: it has given away what the step that failed needs again."""
    begin()
    one_model(args, args.drawn)


def workers(args: Args) -> None:
    """A loader with workers, made inside of the function."""
    begin()
    one_model(args, data(2))


def compiled(args: Args) -> None:
    """torch.compile around DDP."""
    begin()
    one_model(args, data(2), compiled=True)


def once(args: Args) -> None:
    """What torch allows once in a process."""
    torch.set_num_interop_threads(1)
    begin()
    one_model(args, data(0))


def address(args: Args) -> None:
    """The address of its process group is its own, and not the launcher's."""
    if not dist.is_initialized():
        # Or torch takes it for the address of torchrun's store, which somebody else serves, and waits for that.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        rank, port = int(os.environ["RANK"]), args.dir.joinpath("port").read_text()
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    begin()
    one_model(args, data(0))


def two(args: Args) -> None:
    """A generator and a discriminator in turn, with a scaler; the second one has a process group of its own."""
    begin()
    nets = small(3), small(4)
    models = [DistributedDataParallel(nets[0]), DistributedDataParallel(nets[1], process_group=dist.new_group())]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)

    def step(x: Tensor) -> None:
        for n, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            loss = (models[n](x) - models[1 - n](x).detach()).square().mean() + models[n](x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    state = TorchState({"a": models[0], "b": models[1]}, {"a": optimizers[0], "b": optimizers[1]}, scaler=scaler)
    with Session.open(args.dir, state=state, max_steps=STEPS) as s:
        loop(args, s, data(0), step)
    end(args, *nets)


SHAPES: dict[str, Callable[[Args], None]] = {
    "address": address,
    "compiled": compiled,
    "counting": kept_loader,
    "generator": generator,
    "once": once,
    "persistent": kept_loader,
    "persistent worker dies": kept_loader,
    "worker dies": workers,
    "worker dies later": workers,
    "two": two,
}

if __name__ == "__main__":
    main()
