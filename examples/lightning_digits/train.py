"""A small ResNet on the 1797 real handwritten digits of scikit-learn, on two CPU ranks.

python train.py --dir ckpts        (Lightning starts the second rank itself)
torchrun --nproc-per-node 2 train.py --dir ckpts
lastgasp run --nproc-per-node 2 train.py --dir ckpts
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lastgasp_lightning import LastGasp


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Same as in the ResNet paper, with a projection in every shortcut."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Digits(LightningModule):
    """Three blocks, dropout, ten classes: 0.8 million parameters, 10 MB per checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(BasicBlock(1, 16, 1), BasicBlock(16, 64, 2), BasicBlock(64, 256, 2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of images in [0, 1], shape (batch, 1, 8, 8)."""
        return self.head(self.body(x))  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Cross entropy; the noise on the images makes the random state matter."""
        images, labels = batch
        return F.cross_entropy(self(images + 0.05 * torch.randn_like(images)), labels)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a one-cycle schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def digits() -> TensorDataset:
    """All images, scaled to [0, 1], with their labels."""
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(labels))


def main() -> None:
    """Train; resume by itself from the newest good checkpoint in --dir."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="ckpts", help="where checkpoints go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between periodic checkpoints")
    parser.add_argument("--devices", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", "2")))
    parser.add_argument("--final", type=Path, help="where rank 0 puts the final weights")
    args = parser.parse_args()

    torch.set_num_threads(1)
    seed_everything(42)
    periodic = ModelCheckpoint(args.dir, "{step}", every_n_train_steps=args.every, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu", devices=args.devices, strategy="ddp" if args.devices > 1 else "auto",
        max_steps=args.steps, max_epochs=-1, deterministic=True, callbacks=[periodic, LastGasp(args.dir)],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Digits()
    trainer.fit(model, DataLoader(digits(), batch_size=32, shuffle=True))
    if args.final and trainer.is_global_zero:
        torch.save({name: value.clone() for name, value in model.state_dict().items()}, args.final)


if __name__ == "__main__":
    main()
