"""Loops as frameworks and papers have them, on ranks that draw different random numbers; to be killed and resumed."""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lastgasp.pytorch import Session, TorchState

sys.path.append(str(Path(__file__).parents[1]))  # as a script of its own
from support import card

TEXT = torch.randint(16, (400,), generator=torch.Generator().manual_seed(1))


def main() -> None:
    """Twelve steps of the loop that is asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True)
    parser.add_argument("--final", type=Path)
    parser.add_argument("--shape", default="nanogpt", choices=sorted(LOOPS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    card.one_card()
    rank = int(os.environ.get("RANK", "0"))
    dist.init_process_group(card.backend())
    seed = 7 + 1000 * rank
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    models = LOOPS[args.shape](args.dir)
    if args.final and rank == 0:
        torch.save({f"{i}.{k}": v for i, m in enumerate(models) for k, v in m.state_dict().items()}, args.final)
    dist.barrier()
    dist.destroy_process_group()


def opened(directory: str, state: TorchState) -> Session:
    """A session with a checkpoint after every fourth step."""
    return Session.open(directory, state=state, every=4, max_steps=12, keep=9)


class Gpt(nn.Module):
    """Embedding, dropout, head: what of nanoGPT's model matters to a resume."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(16, 24), nn.Dropout(0.2), nn.Linear(24, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss."""
        logits = self.head(self.drop(self.embed(x)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def get_batch() -> tuple[Tensor, Tensor]:
    """As nanoGPT's: random places in the text."""
    places = torch.randint(len(TEXT) - 9, (4,))
    return torch.stack([TEXT[i : i + 8] for i in places]), torch.stack([TEXT[i + 1 : i + 9] for i in places])


def nanogpt(directory: str, bad: float = 0.0) -> list[nn.Module]:
    """`while True`, `get_batch`, a learning rate by hand, accumulation, a scaler, clipping; no epochs, no loader.

    Args:
        bad: how often a loss overflows, so that the scaler skips the update.
    """
    net = Gpt().to(card.device())
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(card.device().type, init_scale=64.0, growth_interval=3, enabled=bad > 0)
    seen: dict[str, list[float]] = {"losses": []}
    with opened(directory, TorchState(model, optimizer, scaler=scaler, extra={"seen": seen})) as s:
        while s.step < 12:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * 0.5 * (1 + math.cos(math.pi * s.step / 12))
            if s.step % 5 == 0:
                seen["losses"].append(estimate_loss(net))
            for micro in range(2):
                model.require_backward_grad_sync = micro == 1
                x, y = card.put(get_batch())
                loss = model(x, y) / 2
                if float(torch.rand(())) < bad:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            s.updated()
    return [net]


def overflowing(directory: str) -> list[nn.Module]:
    """The same in mixed precision, where about a third of the updates is skipped."""
    return nanogpt(directory, 0.1)


@torch.no_grad()
def estimate_loss(net: nn.Module) -> float:
    """Draws batches of its own."""
    net.eval()
    loss = torch.stack([net(*card.put(get_batch())) for _ in range(2)]).mean()
    net.train()
    dist.all_reduce(loss)
    return float(loss)


def gan(directory: str) -> list[nn.Module]:
    """Two models with batch norm take turns; the second one's forward pass draws after the first one's update."""
    generator, critic = (nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2)) for _ in "gc")
    nets: list[nn.Module] = [nn.Sequential(generator, nn.Linear(16, 4)), nn.Sequential(critic, nn.Linear(16, 1))]
    g, c = (DistributedDataParallel(net) for net in nets)
    adam_g, adam_c = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (g, c))
    loader = DataLoader(Points(), batch_size=4, sampler=DistributedSampler(Points()))
    with opened(directory, TorchState({"g": g, "c": c}, {"g": adam_g, "c": adam_c})) as s:
        for _ in s.epochs(1000):
            for real in s.batches(loader):
                went_on(directory, s.step)
                fake = nets[0](torch.randn(len(real), 4)).detach()
                update(adam_c, c(fake).mean() - c(real).mean())
                update(adam_g, -nets[1](g(torch.randn(len(real), 4))).mean())
                wait_for_the_others(directory, s.step)
    return nets


def went_on(directory: str, step: int) -> None:
    """The rank that is not killed says that it has completed step 6."""
    if dist.get_rank() and step == 6:
        (Path(directory) / "went-on").touch()


def wait_for_the_others(directory: str, step: int) -> None:
    """The rank that is to be killed at the end of step 6 lets the other one complete it first."""
    deadline = time.monotonic() + 60
    while "phase=step_end" in os.environ.get("LASTGASP_FAULT", "") and dist.get_rank() == 0 and step == 5:
        if (Path(directory) / "went-on").exists():
            return
        assert time.monotonic() < deadline, "the other rank did not go on"
        time.sleep(0.01)


def update(optimizer: Any, loss: Tensor) -> None:
    """Backward pass and step."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


class Points(Dataset[Tensor]):
    """Augmented at random, by three generators, in whichever process loads it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random() + float(np.random.rand())
        return torch.full((4,), index / 40) + 0.1 * noise * torch.randn(4)


def augmented(directory: str) -> list[nn.Module]:
    """The ordinary vision job: workers that augment."""
    net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler: DistributedSampler[Tensor] = DistributedSampler(Points())
    loader = DataLoader(Points(), batch_size=2, sampler=sampler, num_workers=2, worker_init_fn=seeded)
    with opened(directory, TorchState(model, optimizer, sampler=sampler)) as s:
        for _ in s.epochs(1000):
            for batch in s.batches(loader, replay=True):
                update(optimizer, ((model(batch) - batch) ** 2).mean())
    return [net]


def seeded(worker: int) -> None:
    """As torch's documentation has it; torch 2.13 does so itself."""
    np.random.seed(torch.initial_seed() % 2**32)


def unlike(directory: str) -> list[nn.Module]:
    """The user says that all ranks hold the same, and has forgotten the seed."""
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with opened(directory, TorchState(net, optimizer, replicated=True)) as s:
        while s.step < 12:
            update(optimizer, (net(torch.randn(4, 4)) ** 2).mean())
            dist.barrier()
            s.updated()
    return [net]


LOOPS: dict[str, Callable[[str], list[nn.Module]]] = {
    "nanogpt": nanogpt, "overflowing": overflowing, "gan": gan, "augmented": augmented, "unlike": unlike,
}  # fmt: skip


if __name__ == "__main__":
    main()
