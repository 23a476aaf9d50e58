"""A small ResNet on the 1797 real handwritten digits of scikit-learn, in plain MindSpore, on CPU ranks.

python train.py --dir ckpts
lastgasp run --framework mindspore --worker_num 2 --local_worker_num 2 train.py --dir ckpts
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import CheckpointConfig, LossMonitor, Model, ModelCheckpoint
from sklearn.datasets import load_digits

from lastgasp_mindformers import LastGasp


class BasicBlock(nn.Cell):  # type: ignore[misc]
    """Two 3x3 convolutions with batch norm around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)
        self.relu = nn.ReLU()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        """Same as in the ResNet paper, with a projection in every shortcut."""
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Digits(nn.Cell):  # type: ignore[misc]
    """Three blocks, ten classes: 80,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.SequentialCell(BasicBlock(1, 16, 1), BasicBlock(16, 32, 2), BasicBlock(32, 64, 2))
        self.head = nn.Dense(64, 10)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        """Class scores of images in [0, 1], shape (batch, 1, 8, 8)."""
        return self.head(self.body(x).mean((2, 3)))


def digits(rank: int, ranks: int) -> NumpySlicesDataset:
    """This rank's share of all images, scaled to [0, 1], with their labels, in batches of 32."""
    images, labels = load_digits(return_X_y=True)
    data = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int32)
    return NumpySlicesDataset(data, shuffle=True, num_shards=ranks, shard_id=rank).batch(32, drop_remainder=True)


def main() -> None:
    """Train; resume by itself from the newest good checkpoint in --dir."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="ckpts", help="where checkpoints go")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--every", type=int, default=20, help="steps between MindSpore's own checkpoints")
    parser.add_argument("--final", type=Path, help="where rank 0 puts the final weights")
    args = parser.parse_args()

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    rank, ranks = 0, 1
    if int(os.environ.get("MS_WORKER_NUM", "1")) > 1:
        init()
        rank, ranks = get_rank(), get_group_size()
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    ms.set_seed(42)
    net = Digits()
    config = CheckpointConfig(save_checkpoint_steps=args.every, keep_checkpoint_max=3)
    periodic = ModelCheckpoint("resnet", f"{args.dir}/rank_{rank}", config)
    model = Model(net, nn.CrossEntropyLoss(), nn.AdamWeightDecay(net.trainable_params(), 3e-3))
    callbacks = [LossMonitor(), periodic, LastGasp(args.dir)]
    model.train(args.epochs, digits(rank, ranks), callbacks=callbacks, dataset_sink_mode=False)
    if args.final and rank == 0:
        ms.save_checkpoint(net, str(args.final))


if __name__ == "__main__":
    main()
