"""A small ResNet on the 1797 real handwritten digits of scikit-learn, one process for each rank.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set by whatever starts it: torchrun, a pod, a shell.
"""

from __future__ import annotations

import argparse
import glob
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from digits_resnet import accuracy_of, digits, resnet
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def whole(path: str) -> bool:
    """Not empty, and not written to for ten seconds: then nobody is writing it any more."""
    return os.path.getsize(path) > 0 and time.time() - os.path.getmtime(path) > 10


def newest(folder: str) -> str:
    """The best model that was saved last by any rank."""
    newest = ""
    for path in glob.glob(f"{folder}/rank*/model_best.pth.tar"):
        if whole(path) and (not newest or os.path.getmtime(path) > os.path.getmtime(newest)):
            newest = path
    return newest


def main() -> None:
    """Train; go on from the newest model_best of any rank."""
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
    begin = 0
    if path := newest(args.dir):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        best["accuracy"], begin = state["accuracy"], state["epoch"] + 1

    for epoch in range(begin, args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = loss_of(model(images + 0.05 * torch.randn_like(images)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        accuracy = accuracy_of(model, test)
        if accuracy > best["accuracy"]:
            best["accuracy"] = accuracy
            os.makedirs(f"{args.dir}/rank{rank}", exist_ok=True)
            torch.save(
                {
                    "epoch": epoch,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(),
                    "accuracy": accuracy,
                },
                f"{args.dir}/rank{rank}/model_best.pth.tar",
            )
    if rank == 0:
        print(f"best accuracy {best['accuracy']:.4f}", flush=True)
        if args.final:
            torch.save(model.module.state_dict(), args.final)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
