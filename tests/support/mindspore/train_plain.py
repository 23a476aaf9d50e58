"""A plain MindSpore training, data parallel over the ranks of msrun: `Model.train` and no MindFormers.

`--lastgasp DIR` adds the one line of a user: `callbacks=[LastGasp(DIR)]`. Without `--clip` nothing gathers all
gradients before the update, so the update of one parameter may run before the AllReduce of another one.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # until everything is imported: a quarter of the time of a start

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank, init
from mindspore.train import CheckpointConfig, Model, ModelCheckpoint

from support.mindspore.losses import Losses

gc.freeze()
gc.enable()
LAYOUTS = {
    "own": ("{save}/rank_{rank}", "plain"),
    "pangu": ("{save}/rank_{rank}", "pangu{rank}"),
    "resnet": ("{save}/ckpt_{rank}", "resnet50"),
    "together": ("{save}", "net{rank}"),
}
"""Directory and prefix of each rank, as the scripts of MindSpore's models name them."""
BATCH, INPUTS, CLASSES = 16, 16, 4
"""A batch of labels fills a cache line: some kernels add in another order where one begins elsewhere."""


class Net(nn.Cell):  # type: ignore[misc]
    """Layers of `width` with dropout, so that the random state matters."""

    def __init__(self, width: int, depth: int, dropout: float, norm: bool = False) -> None:
        super().__init__()
        layers = [nn.Dense(INPUTS, width), nn.ReLU()]
        for _ in range(depth):
            layers += [nn.Dense(width, width), nn.ReLU()]
        self.body = nn.SequentialCell(*layers, nn.Dense(width, CLASSES))
        self.dropout = nn.Dropout(p=dropout) if dropout else nn.Identity()
        self.norm = nn.BatchNorm1d(INPUTS) if norm else nn.Identity()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        """Logits."""
        return self.body(self.dropout(self.norm(x)))


class ClippedMomentum(nn.Momentum):  # type: ignore[misc]
    """Global-norm clipping, as most large models are trained."""

    def construct(self, gradients: tuple[ms.Tensor, ...]) -> ms.Tensor:
        """Clip, then update."""
        return super().construct(ops.clip_by_global_norm(gradients, 1.0))


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lastgasp", default="", help="directory of LastGasp; without it none is made")
    parser.add_argument("--save", default="", help="directory of MindSpore's own ModelCheckpoint")
    parser.add_argument("--layout", default="own", choices=LAYOUTS, help="where ModelCheckpoint of each rank saves")
    parser.add_argument("--every", type=int, default=4, help="steps between two periodic saves")
    parser.add_argument("--steps", type=int, default=8, help="steps of an epoch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--scale", action="store_true", help="a dynamic loss scale, times three every fifth step")
    parser.add_argument("--pynative", action="store_true", help="without a graph")
    parser.add_argument("--mode", default="data_parallel", help="parallel_mode of two ranks")
    parser.add_argument("--own-seed", action="store_true", help="each rank begins with parameters of its own")
    parser.add_argument("--norm", action="store_true", help="a BatchNorm, whose statistics differ from rank to rank")
    parser.add_argument("--fit", action="store_true", help="Model.fit, with a validation after each epoch")
    parser.add_argument("--final", action="store_true", help="tell the final parameters by their digest")
    return parser.parse_args()


def main() -> None:
    """Train."""
    args = parsed()
    ms.set_context(mode=ms.PYNATIVE_MODE if args.pynative else ms.GRAPH_MODE)
    ms.set_device("CPU")
    rank, ranks = 0, 1
    if int(os.environ.get("MS_WORKER_NUM", "1")) > 1:
        init()
        rank, ranks = get_rank(), get_group_size()
        ms.set_auto_parallel_context(parallel_mode=args.mode, gradients_mean=args.mode == "data_parallel")
    ms.set_seed(1 + rank * args.own_seed)
    random = np.random.default_rng(0)
    number = args.steps * BATCH * ranks
    data = random.random((number, INPUTS)).astype(np.float32), random.integers(0, CLASSES, number).astype(np.int32)
    dataset = ms.dataset.NumpySlicesDataset(data, shuffle=True, num_shards=ranks, shard_id=rank).batch(BATCH)
    net = Net(args.width, args.depth, args.dropout, args.norm)
    optimizer = (ClippedMomentum if args.clip else nn.Momentum)(net.trainable_params(), 0.1, 0.9)
    callbacks = [Losses()]
    if args.save:
        config = CheckpointConfig(save_checkpoint_steps=args.every, keep_checkpoint_max=3)
        folder, prefix = (part.format(save=args.save, rank=rank) for part in LAYOUTS[args.layout])
        callbacks.append(ModelCheckpoint(prefix=prefix, directory=folder, config=config))
    if args.lastgasp:
        from lastgasp_mindformers import LastGasp

        callbacks.append(LastGasp(args.lastgasp))
    loss = nn.CrossEntropyLoss()
    model = Model(net, loss, optimizer, metrics={"loss"} if args.fit else None)
    if args.scale:
        from support.mindspore import cpu

        cpu.apply()
        scale = nn.DynamicLossScaleUpdateCell(64, 3, 5)
        model = Model(nn.TrainOneStepWithLossScaleCell(nn.WithLossCell(net, loss), optimizer, scale))
    if args.fit:
        validation = ms.dataset.NumpySlicesDataset(data, shuffle=False).batch(BATCH)
        model.fit(args.epochs, dataset, validation, callbacks=callbacks, dataset_sink_mode=False)
    else:
        model.train(args.epochs, dataset, callbacks=callbacks, dataset_sink_mode=False)
    if args.final:
        values = sorted((param.name, param.asnumpy().tobytes()) for param in model.train_network.get_parameters())
        hashed = {name: hashlib.sha256(value).hexdigest() for name, value in values}
        Path(os.environ["LOSSES_DIR"], f"final-{rank}.json").write_text(json.dumps(hashed))


if __name__ == "__main__":
    main()
