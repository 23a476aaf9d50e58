"""The training script of bench_in_place: 4 gloo ranks, DDP over 1.3 M parameters with AdamW, 2 MB buckets.

Each rank writes the wall time of each completed step, and of what comes before it, to `steps-RANK`, and the moment of
each fault to `fault-STEP`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lastgasp.config import Recovery
from lastgasp.pytorch import Session, TorchState, train

GATE = 5
"""Completed steps after which the ranks wait for the file `go`: the warm process is ready then."""
BATCH, WIDE, PASS = 8, 256, 100
"""Samples of a step, their numbers, and steps of one pass over the data."""


def arguments() -> argparse.Namespace:
    """What the benchmark says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--faults", default="", help="STEP:RANK:kill|exception, ...")
    parser.add_argument("--bare", type=int, default=0, help="without lastgasp: torch.save each so many steps")
    parser.add_argument("--rounds", type=int, default=0, help="only measure steps, in so many rounds")
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    """Train to the last step, from a checkpoint if there is one; or measure what a step costs."""
    args = arguments()
    torch.set_num_threads(1)
    job = Job(args)
    if args.rounds:
        job.costs(args.rounds)
    elif args.bare:
        job.bare(args.bare)
    else:
        train(job.training)


class Job:
    """What stays the same objects over all calls of the training function."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.dir = args, args.dir
        self.rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.net = network(args.width)
        self.hooked: Any = next(self.net[2].parameters())  # `register_hook` is not annotated
        x = torch.randn(PASS * BATCH * world, WIDE, generator=torch.Generator().manual_seed(1))
        self.data = TensorDataset(x, x.sum(1, keepdim=True))
        self.faults = {int(s): (int(r), k) for s, r, k in (f.split(":") for f in args.faults.split(",") if f)}
        self.times = os.open(self.dir / f"steps-{self.rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def made(self) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Any, DataLoader[Any]]:
        """What one call of the function makes."""
        model = DistributedDataParallel(self.net, bucket_cap_mb=2)
        sampler: DistributedSampler[Any] = DistributedSampler(self.data)
        loader = DataLoader(self.data, batch_size=BATCH, sampler=sampler)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3), sampler, loader

    def training(self) -> None:
        """The user's function."""
        self.note("the function is called again")
        dist.init_process_group("gloo")
        self.note("process group")
        model, optimizer, sampler, loader = self.made()
        state = TorchState(model, optimizer, sampler=sampler)
        self.note("DDP")
        with Session.open(self.dir / "ckpts", state=state, max_steps=self.args.steps, resume="auto") as s:
            self.note("session")
            for _ in s.epochs(1000):
                for batch in s.batches(loader):
                    self.wait(s.step, s.alive)
                    self.step(model, optimizer, batch, s.step)
        self.end()

    def bare(self, every: int) -> None:
        """The same as one writes it without lastgasp."""
        dist.init_process_group("gloo")
        model, optimizer, sampler, loader = self.made()
        path, begun = self.dir / "bare.pt", 0
        if path.exists():
            saved = torch.load(path)
            self.net.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
            begun = saved["step"]
        for step, batch in self._batches(loader, sampler, begun):
            self.step(model, optimizer, batch, step)
            if self.rank == 0 and (step + 1) % every == 0:
                new = {"net": self.net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(new, path.with_suffix(".new"))
                os.replace(path.with_suffix(".new"), path)
        self.end()

    def _batches(self, loader: DataLoader[Any], sampler: Any, begun: int) -> Iterator[tuple[int, Any]]:
        step, epoch = begun, begun // PASS
        while True:
            sampler.set_epoch(epoch)
            for number, batch in enumerate(loader):
                if epoch * PASS + number < step:
                    continue
                if step >= self.args.steps:
                    return
                yield step, batch
                step += 1
            epoch += 1

    def wait(self, step: int, alive: Callable[[], object]) -> None:
        """The warm process takes some seconds."""
        while step >= GATE and not (self.dir / "go").exists():
            alive()
            time.sleep(0.01)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, step: int) -> None:
        """One step, with its fault in the backward pass."""
        optimizer.zero_grad()
        x, y = batch
        loss = nn.functional.mse_loss(model(x), y)
        rank, kind = self.faults.get(step, (-1, ""))
        hook = self.hooked.register_hook(lambda _: self.fault(step, kind)) if rank == self.rank else None
        with hook or nullcontext():
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        self.note(str(step))

    def note(self, what: str) -> None:
        """When it was done."""
        os.write(self.times, f"{time.time_ns()} {what}\n".encode())

    def fault(self, step: int, kind: str) -> None:
        """Once."""
        try:
            file = os.open(self.dir / f"fault-{step}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return
        os.write(file, b"%d" % time.time_ns())
        os.close(file)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("a fault of the benchmark")

    def end(self) -> None:
        """Keep the weights."""
        if self.rank == 0:
            torch.save(self.net.state_dict(), self.dir / "final.pt")
        dist.destroy_process_group()

    # -- what a step costs --------------------------------------------------------------------------------

    def costs(self, rounds: int) -> None:
        """CPU and wall seconds of a step's thread, by turns with and without being able to recover in place."""
        found: dict[str, list[tuple[float, float]]] = {"auto": [], "restart": []}
        kinds: list[Recovery] = ["auto", "restart"]
        for number in range(rounds):
            for kind in kinds if number % 2 else kinds[::-1]:
                found[kind].append(train(self.cost, kind, number))
        if self.rank == 0:
            (self.dir / "costs.json").write_text(json.dumps(found))

    def cost(self, recovery: Recovery, number: int) -> tuple[float, float]:
        """Mean seconds of one step: wall, CPU of this thread."""
        store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        name, world = f"{recovery}-{number}", int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=PrefixStore(name, store), rank=self.rank, world_size=world)
        model, optimizer, sampler, loader = self.made()
        state, steps = TorchState(model, optimizer, sampler=sampler), self.args.steps
        with Session.open(self.dir / "ckpts", state=state, max_steps=steps, recovery=recovery, resume="never") as s:
            begun = 0.0, 0.0
            for batch in s.batches(loader):
                if s.step == GATE:
                    begun = time.perf_counter(), time.thread_time()
                self.step(model, optimizer, batch, s.step)
            spent = time.perf_counter() - begun[0], time.thread_time() - begun[1]
        dist.destroy_process_group()
        return spent[0] / (steps - GATE), spent[1] / (steps - GATE)


def network(width: int) -> nn.Sequential:
    """1.3 M parameters at the width of 1000."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


if __name__ == "__main__":
    main()
