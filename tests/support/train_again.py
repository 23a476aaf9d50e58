"""A hand-written loop in one function, which can be entered again; as hard to resume as `train_loop`."""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lastgasp.pytorch import Session, TorchState, train
from lastgasp.pytorch.loop import again_here
from support import again_faults, card
from support.again_faults import note
from support.train_loop import evaluate

GATE = 5
"""Completed steps after which the ranks wait for the file `go`: faults come behind it."""
Trick = Callable[[argparse.Namespace, Session], None]


def network() -> nn.Module:
    """Wide enough that DDP rebuilds its buckets after the first step."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(8, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Dropout(0.3), nn.Linear(600, 1))
    return net.to(card.device())


class Objects:
    """What is trained, and what trains it."""

    def __init__(self) -> None:
        self.net = network()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler(card.device().type, init_scale=64.0, growth_interval=3)


class Average:
    """Of the first layer's weights, behind each update; it is part of a step as they are."""

    def __init__(self) -> None:
        self.value = torch.zeros(1)

    def update(self, net: Any) -> None:
        self.value = 0.9 * self.value + 0.1 * net[0].weight.detach().cpu()

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


KEPT = Objects()
"""Made once in a process; with `--keep` each entry trains these very objects."""


def main() -> None:
    """Twelve steps: two epochs of five and a bit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--final", type=Path)
    parser.add_argument("--keep", action="store_true", help="train the same objects when entered again")
    parser.add_argument("--trick", default="none", choices=sorted(TRICKS))
    parser.add_argument("--outside", action="store_true", help="the process group is made outside of the function")
    parser.add_argument("--full", action="store_true", help="the host has no memory left for copies of the state")
    parser.add_argument("--stopped", action="store_true", help="SIGTERM comes between two calls of the function")
    parser.add_argument("--stuck", default="", help="this rank stays in its own code in step 9, and raises nothing")
    parser.add_argument("--dies", default="", help="this rank is killed when it is entered again, before anything else")
    args = parser.parse_args()
    torch.set_num_threads(1)
    card.one_card()
    again_faults.install(args.dir)
    if args.full:
        vars(again_here)["available"] = lambda: 1000
    if args.outside:
        dist.init_process_group(card.backend())
    train(stopped if args.stopped else training, args)


def stopped(args: argparse.Namespace) -> None:
    """As `training`; SIGTERM comes once a fault has ended the session, and before there is another one."""
    try:
        training(args)
    finally:
        if (os.environ["LASTGASP_ATTEMPT"], os.environ.get("LASTGASP_INCARNATION")) == ("0", None):
            signal.raise_signal(signal.SIGTERM)


def training(args: argparse.Namespace) -> None:
    """From the process group to the last step."""
    if (os.environ["RANK"], os.environ.get("LASTGASP_INCARNATION")) == (args.dies, "1"):
        note(args.dir, f"died {os.getpid()}")
        os.kill(os.getpid(), signal.SIGKILL)
    again_faults.at("function called")
    if not dist.is_initialized():
        dist.init_process_group(card.backend())
    again_faults.at("group made")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed = 7 + 1000 * rank
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    x = torch.randn(4 * 5 * world, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    objects = KEPT if args.keep else Objects()
    net, optimizer, scaler = objects.net, objects.optimizer, objects.scaler
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 6, 10], 0.7)
    errors: defaultdict[str, list[float]] = defaultdict(list)
    average = Average()
    extra = {"errors": errors, "average": average}
    state = TorchState(model, optimizer, schedule, scaler, sampler=sampler, extra=extra)
    with Session.open(args.dir, state=state, max_steps=12) as s:
        note(args.dir, f"entered {os.getpid()} {s.step} {s.resumed}")
        if args.trick == "behind":
            optimizer.register_step_pre_hook(lambda *_: wait_for_rank_0(args, s))
        for _ in s.epochs(1000):
            for batch in s.batches(loader):
                TRICKS[args.trick](args, s)
                if s.step == 8:
                    again_faults.stay(args.stuck)
                while s.step >= GATE and not (args.dir / "go").exists():
                    (args.dir / f"gate-{rank}").touch()
                    s.alive()
                    time.sleep(0.01)
                while s.step == GATE and "TESTS_UNTIL_KEPT" in os.environ and not kept(s._run.recorder.fd):
                    s.alive()
                    time.sleep(0.01)
                again_faults.at("first step")
                step(model, optimizer, scaler, card.put(batch))
                schedule.step()
                average.update(net)
                note(args.dir, f"trained {os.getpid()} {s.step}")
                again_faults.at("first update")
            errors["all"].append(evaluate(net, x.to(card.device())))
        if args.trick == "ends":
            ends(args, s)
        note(args.dir, f"ended {os.getpid()} {s.step}")
    if args.final and rank == 0:
        torch.save({**net.state_dict(), "errors": torch.tensor(errors["all"]), "average": average.value}, args.final)
    dist.destroy_process_group()


def kept(fd: int) -> bool:
    """Another process, the controller, has this crash-safe buffer open: it outlives this one.

    Steps that take no time would be over before a controller has started that no launcher has made.
    """
    memory = os.fstat(fd)
    others = (path for path in Path("/proc").glob("[0-9]*/fd/*") if path.parts[2] != str(os.getpid()))
    return any(_same(path, memory) for path in others)


def _same(path: Path, memory: os.stat_result) -> bool:
    try:
        found = path.stat()
    except OSError:  # closed meanwhile, or a process that has ended
        return False
    return (found.st_dev, found.st_ino) == (memory.st_dev, memory.st_ino)


def step(model: nn.Module, optimizer: Any, scaler: Any, batch: Any) -> None:
    """One update; gradients are dropped at its end, as in nanoGPT."""
    inputs, wanted = batch
    noise = random.random() * 0.1 + float(np.random.rand()) * 0.1
    loss = ((model(inputs + noise * torch.randn_like(inputs)) - wanted) ** 2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def bug(args: argparse.Namespace, s: Session) -> None:
    """A mistake of the user's own, in step 9 of rank 1."""
    if s.step == 8 and os.environ["RANK"] == "1" and not (args.dir / "fixed").exists():
        (args.dir / "fixed").touch()
        raise TypeError("a mistake")


def stubborn(args: argparse.Namespace, s: Session) -> None:
    """An error that comes again in step 9 of rank 1, until the job was restarted."""
    if s.step == 8 and os.environ["RANK"] == "1" and os.environ["LASTGASP_ATTEMPT"] == "0":
        raise RuntimeError("again and again")


def behind(args: argparse.Namespace, s: Session) -> None:
    """Rank 0 says that it has completed step 9."""
    if s.step == 9 and os.environ["RANK"] == "0":
        (args.dir / "ahead").touch()


def ends(args: argparse.Namespace, s: Session) -> None:
    """Behind its loop rank 1 raises, once rank 0 is about to say that its training has ended.

    Rank 0 says so when it has heard of a fault, and not yet what follows from it.
    """
    engine, ended = s._run.engine, args.dir / "ends"
    if os.environ.get("LASTGASP_INCARNATION"):
        return
    if os.environ["RANK"] == "1":
        while not ended.exists():
            s.alive()
            time.sleep(0.001)
        raise RuntimeError("a rank fails behind its last step")
    said = engine._backend.goodbye

    def goodbye() -> None:
        ended.touch()
        while not engine.status.held:
            time.sleep(0.001)
        said()

    vars(engine._backend)["goodbye"] = goodbye


def memory(args: argparse.Namespace, s: Session) -> None:
    """The device's memory has an error in step 9 of rank 1, which has overwritten a parameter."""
    try:
        again_faults.device_fault(s.step, "UCE ERROR")
    except RuntimeError:
        with torch.no_grad():
            next(iter(next(iter(s._run.state.models.values())).parameters())).fill_(float("nan"))
        raise


def bad_link(args: argparse.Namespace, s: Session) -> None:
    """The link fails again each time, until the job was restarted."""
    if (s.step, os.environ["RANK"], os.environ["LASTGASP_ATTEMPT"]) == (8, "1", "0"):
        raise RuntimeError("HCCL OP RETRY FAILED")


def signalled(args: argparse.Namespace, s: Session) -> None:
    """What a signal's handler raises in the backward pass comes when that is over; rank 0 completes step 9."""
    behind(args, s)
    engine: Any = vars(torch.autograd)["_engine_run_backward"]

    def run(*given: Any, **named: Any) -> Any:
        vars(torch.autograd)["_engine_run_backward"] = engine
        engine(*given, **named)
        wait_for_rank_0(args, s)
        raise RuntimeError("a worker of a loader has died")

    if s.step == 8 and os.environ["RANK"] == "1":
        vars(torch.autograd)["_engine_run_backward"] = run


def wait_for_rank_0(args: argparse.Namespace, s: Session) -> None:
    """Before its update rank 1 waits until rank 0 has completed that step."""
    while s.step == 8 and os.environ["RANK"] == "1" and not (args.dir / "ahead").exists():
        s.alive()
        time.sleep(0.01)


TRICKS: dict[str, Trick] = {
    "none": lambda args, s: None,
    "bad_link": bad_link,
    "behind": behind,
    "bug": bug,
    "ends": lambda args, s: None,
    "link": lambda args, s: again_faults.device_fault(s.step, "HCCL OP RETRY FAILED"),
    "memory": memory,
    "signalled": signalled,
    "stubborn": stubborn,
}

if __name__ == "__main__":
    main()
