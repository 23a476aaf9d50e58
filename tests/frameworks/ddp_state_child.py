"""One rank of a DDP job for test_lightning_state_ddp.py: trains, may dump after every step, may resume.

Arguments: output folder, what to do ("straight", "dump:STEP", "resume:FILE").
"""

from __future__ import annotations

import inspect
import os
import random
import sys
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from frameworks.state_rig import Harness, Model, Noisy, Run


class DumpAt(Harness):
    """At the forward pass after `step`, every rank leaves its auxiliary state; each rank dumps with all of them."""

    def __init__(self, run: Run, step: int) -> None:
        super().__init__(run)
        self.at = step

    def strike(self, moment: str) -> None:
        snapshot = self.state.snapshot
        if moment != "forward" or snapshot is None or snapshot.step != self.at:
            return
        rank, size = self.trainer.global_rank, self.trainer.world_size
        aux = self.state.aux(self.at)
        assert aux is not None
        (self.run.directory / f"small{rank}").write_bytes(aux)
        self.trainer.strategy.barrier()  # the test's own; the dump below enters none
        every = {r: (self.run.directory / f"small{r}").read_bytes() for r in range(size)}
        torch.save(self.state.dump(self.at, every), self.run.directory / f"gasp{rank}.ckpt")
        self.trainer.strategy.barrier()
        os._exit(7)


def main() -> None:
    directory, what = Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])
    random.seed(rank), np.random.seed(rank), torch.manual_seed(0)
    kind, _, argument = what.partition(":")
    run = Run(directory)
    harness = DumpAt(run, int(argument)) if kind == "dump" else Harness(run)
    model = Model(schedulers="plateau")
    model.strike = harness.strike
    broadcast = os.environ.get("BROADCAST_BUFFERS", "1") == "1"
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # torch 2.13
    buffers: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": broadcast}
    callbacks: list[Any] = [harness]
    if kind == "straight":
        callbacks.append(L.pytorch.callbacks.ModelCheckpoint(directory, "{step}", save_top_k=-1, every_n_train_steps=2))
    trainer = L.Trainer(
        callbacks=callbacks,
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", **buffers),
        max_epochs=3,
        logger=False,
        enable_checkpointing=kind == "straight",
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    resume = argument if kind == "resume" else None
    torch.manual_seed(rank)
    train = DataLoader(Noisy(30), 4, shuffle=True)
    trainer.fit(model, train, DataLoader(Noisy(6, noise=False), 3), ckpt_path=resume, weights_only=False)
    left = {
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in trainer.optimizers],
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "losses": model.losses,
        "rng": (random.getstate(), torch.get_rng_state()),
    }
    torch.save(left, directory / f"{kind}{rank}.pt")


if __name__ == "__main__":
    main()
