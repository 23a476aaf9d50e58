"""A rank of a real job for tests with hosts: gloo between them, a hand-written loop (`sharded`: FSDP2) or Lightning's.

Usage: hosts_torch.py loop|sharded|lightning DIRECTORY STEPS PACE. Each rank draws random numbers of its own in every
step, so that a step too many or too few, or a rank whose generator was not restored, shows in the end. Writes
`at-RANK-ATTEMPT` (the step it has completed) and `end-RANK` (what it holds at the end) into DIRECTORY.

HOSTS_GATE=STEP: no rank goes on behind that step before the file DIRECTORY/go is there. HOSTS_SAVE_SECOND=RANK: this
rank's gasp waits until another one has committed.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = os.environ["LASTGASP_ATTEMPT"]
LOCAL = int(os.environ["LOCAL_WORLD_SIZE"])
WAIT = 150.0
"""Seconds that a save waits for another one's commit."""


def network() -> nn.Module:
    """The same on every rank; draws random numbers, and has buffers."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


def loss_of(net: nn.Module) -> Tensor:
    """On data of this rank's own."""
    x = torch.randn(4, 8) + random.random() * 0.1
    loss: Tensor = ((net(x) - x.sum(1, keepdim=True)) ** 2).mean()
    return loss


def seed() -> None:
    """Other random numbers on each rank."""
    torch.manual_seed(1000 + RANK)
    random.seed(1000 + RANK)


def completed(directory: Path, step: int, pace: float) -> None:
    """For the test; what is read is always complete."""
    path = directory / f"at-{RANK}-{ATTEMPT}"
    temp = path.with_suffix(".new")
    temp.write_text(str(step))
    temp.replace(path)
    time.sleep(pace)


def held(directory: Path, step: int) -> None:
    """Behind a step: wait as long as the test wants it."""
    while str(step) == os.environ.get("HOSTS_GATE") and not (directory / "go").exists():
        time.sleep(0.01)


def ended(directory: Path, net: nn.Module) -> None:
    """What this rank holds: all of it shows in one number."""
    digest = hashlib.sha256()
    for name, value in net.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    ended_with(directory, digest.hexdigest())


def ended_with(directory: Path, state: str) -> None:
    """And what it would draw next."""
    (directory / f"end-{RANK}").write_text(f"{state} {torch.rand(()).item()} {random.random()}")


def loop(directory: Path, steps: int, pace: float) -> None:
    """`while`, as nanoGPT has it."""
    from lastgasp.pytorch import Session, TorchState

    dist.init_process_group("gloo")
    net = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    seed()
    with Session.open(directory, state=TorchState(net, optimizer), max_steps=steps, keep=9) as s:
        while s.step < steps:
            optimizer.zero_grad()
            loss_of(net).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            s.updated()
            completed(directory, s.step, pace)
            held(directory, s.step)
    ended(directory, net.module)


def sharded(directory: Path, steps: int, pace: float) -> None:
    """The same with `fully_shard`: each rank holds what no other one does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from lastgasp.pytorch import Session, TorchState

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in (net[0], net[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
    seed()
    with Session.open(directory, state=TorchState(net, optimizer, schedule), max_steps=steps, keep=9) as s:
        while s.step < steps:
            optimizer.zero_grad()
            loss_of(net).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            s.updated()
            completed(directory, s.step, pace)
            held(directory, s.step)
    digest = hashlib.sha256()
    for parameter in net.parameters():
        digest.update(parameter.detach().to_local().numpy().tobytes())  # type: ignore[attr-defined]
    ended_with(directory, digest.hexdigest())
    dist.destroy_process_group()


def lightning(directory: Path, steps: int, pace: float) -> None:
    """Lightning's own loop."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from lastgasp_lightning import LastGasp

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    class Told(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            completed(directory, trainer.global_step, pace)

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            held(directory, trainer.global_step)  # what still runs at the end of a batch belongs to its step

    data = DataLoader(TensorDataset(torch.zeros(40, 1)), batch_size=1)
    trainer = Trainer(
        accelerator="cpu", devices=LOCAL, num_nodes=WORLD // LOCAL, strategy="ddp", max_steps=steps, max_epochs=-1,
        logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        callbacks=[LastGasp(directory, keep=9), Told()],
    )  # fmt: skip
    module = Module()
    seed()
    trainer.fit(module, data)
    ended(directory, module.net)


def save_second(directory: Path) -> None:
    """Hold this rank's saves back until another rank has committed."""
    save = torch.save

    def late(*args: Any, **options: Any) -> None:
        deadline = time.monotonic() + WAIT
        while not list(directory.glob("gasp-*.manifest.json")) and time.monotonic() < deadline:
            time.sleep(0.01)
        save(*args, **options)

    torch.save = late


def main() -> None:
    """One rank under torchrun's environment."""
    torch.set_num_threads(1)
    directory, steps, pace = Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    directory.mkdir(exist_ok=True)
    if os.environ.get("HOSTS_SAVE_SECOND") == str(RANK):
        save_second(directory)
    {"loop": loop, "sharded": sharded, "lightning": lightning}[sys.argv[1]](directory, steps, pace)


if __name__ == "__main__":
    main()
