"""What both scripts train: a small ResNet, the digits, and the accuracy."""

from __future__ import annotations

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Subset, TensorDataset


class Block(nn.Module):
    """Two 3x3 convolutions with batch norm around a projected shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images in, images of `outputs` channels out."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def resnet() -> nn.Module:
    """Three blocks, dropout, ten classes."""
    body = [Block(1, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10))


def digits() -> tuple[Subset[tuple[Tensor, ...]], Subset[tuple[Tensor, ...]]]:
    """Images in [0, 1] with their labels: four fifths to train on, one to test with."""
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(labels))
    tests = set(range(0, len(data), 5))
    return Subset(data, [i for i in range(len(data)) if i not in tests]), Subset(data, sorted(tests))


def accuracy_of(model: DistributedDataParallel, test: Subset[tuple[Tensor, ...]]) -> float:
    """The share of images that are recognized; the same on all ranks."""
    samples = [test[number] for number in range(len(test))]
    images, labels = (torch.stack(column) for column in zip(*samples, strict=True))
    inner: nn.Module = model.module
    inner.eval()
    with torch.no_grad():
        right = (inner(images).argmax(1) == labels).float().mean()
    inner.train()
    dist.all_reduce(right)  # each rank has statistics of its own in its batch norms
    return float(right) / dist.get_world_size()
