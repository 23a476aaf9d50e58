"""A small ResNet on the 1797 real handwritten digits of scikit-learn, one process for each rank.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set by whatever starts it: torchrun, a pod, a shell.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from digits_resnet import accuracy_of, digits, resnet
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lastgasp.pytorch import Session, TorchState, load, newest_good, save


def main() -> None:
    """Train; go on from the very step on which it was interrupted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="ckpts", help="where checkpoints go")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--final", type=Path, help="where rank 0 puts the final weights")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42 + rank)
    train, test = digits()
    sampler: DistributedSampler[object] = DistributedSampler(train, seed=42)
    loader = DataLoader(train, batch_size=32, sampler=sampler)
    model, loss_of = DistributedDataParallel(resnet()), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    best = {"accuracy": 0.0}
    state = TorchState(model, optimizer, schedule, sampler=sampler, extra={"best": best})
    with Session.open(args.dir, state=state, every=20) as session:
        for epoch in session.epochs(args.epochs):
            for images, labels in session.batches(loader):
                loss = loss_of(model(images + 0.05 * torch.randn_like(images)), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            accuracy = accuracy_of(model, test)
            if accuracy > best["accuracy"]:
                best["accuracy"] = accuracy
                save(
                    {"epoch": epoch, "model": model.module.state_dict(), "accuracy": accuracy},
                    f"{args.dir}/best/model_best.rank{rank}.pth.tar",
                    step=session.step,
                )
    if rank == 0:
        kept = load(str(newest_good(f"{args.dir}/best")))
        print(f"best accuracy {kept['accuracy']:.4f}", flush=True)
        if args.final:
            torch.save(model.module.state_dict(), args.final)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
