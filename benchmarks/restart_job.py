"""The training script of bench_restart: the same job with LastGasp, or as one writes it without.

Rank 0 prints wall times in ns: `begun attempt <n> at ...` is the start of the process, `imported ...` the end of the
imports, and `first step <step> of ...` when the first step of the attempt is completed.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def process_start() -> int:
    """When the kernel started this process, to 10 ms."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age * 1e9)


def tell(what: str, when: int) -> None:
    """Once per job."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{what} attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')} at {when}", flush=True)


class Wide(LightningModule):
    """Two layers whose checkpoint, Adam's state included, has about 12 bytes per parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 1))
        self.told = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The mean square of the outputs."""
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def on_train_batch_end(self, outputs: object, batch: object, batch_idx: int) -> None:
        """Tell once."""
        if not self.told:
            self.told = True
            tell(f"first step {self.global_step} of", time.time_ns())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Train; resume from the newest checkpoint."""
    tell("begun", process_start())
    tell("imported", time.time_ns())
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--lastgasp", action="store_true")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    callbacks: list[Callback] = [ModelCheckpoint(args.dir, "{step}", every_n_train_steps=args.every, save_top_k=-1)]
    newest = None
    if args.lastgasp:
        from lastgasp_lightning import LastGasp

        callbacks.append(LastGasp(args.dir))
    else:
        newest = max(args.dir.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=args.steps, max_epochs=-1, callbacks=callbacks,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(torch.randn(2048, 32))
    trainer.fit(Wide(args.width), DataLoader(data, batch_size=4, shuffle=True), ckpt_path=newest)


if __name__ == "__main__":
    main()
