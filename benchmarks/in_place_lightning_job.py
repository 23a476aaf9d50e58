"""The example `examples/lightning_digits` behind a gate: faults come once the warm process is ready.

Each rank writes the wall time of each completed step to `steps-RANK`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lastgasp_lightning import LastGasp

EXAMPLE = Path(__file__).parents[1] / "examples/lightning_digits/train.py"
GATE = 5
"""Completed steps after which the ranks wait for the file `go`."""


class Times(Callback):
    """Writes them, and holds the ranks at the gate."""

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        rank = os.environ["RANK"]
        self._times = os.open(directory / f"steps-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Wait."""
        while trainer.global_step == GATE and not (self._dir / "go").exists():
            time.sleep(0.01)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Note."""
        os.write(self._times, f"{time.time_ns()} {trainer.global_step}\n".encode())


def main() -> None:
    """As the example, with its model, data and schedule."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("lightning_digits_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    torch.set_num_threads(1)
    seed_everything(42)
    ckpts = args.dir / "ckpts"
    callbacks = [Times(args.dir), ModelCheckpoint(ckpts, "{step}", every_n_train_steps=20, save_top_k=1, monitor="step",
                                                  mode="max"), LastGasp(ckpts, hang_timeout=600)]  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp", max_steps=args.steps, max_epochs=-1,
        deterministic=True, callbacks=callbacks, logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = example.Digits()
    trainer.fit(model, DataLoader(example.digits(), batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        torch.save({name: value.clone() for name, value in model.state_dict().items()}, args.dir / "final.pt")


if __name__ == "__main__":
    main()
