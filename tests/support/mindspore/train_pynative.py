"""The real pynative Trainer of MindFormers on a tiny model: what a user's script does, on a CPU and one process.

`python train_pynative.py DIRECTORY [STEPS [2]]`. No line of lastgasp stands here but the section of the configuration.
With `2` the trainer has the shape of 2.0.0's, as far as lastgasp touches it: the model is a list (read there, and not
run: it needs hyper_parallel, which is on no package index).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindformers.pynative.callback import LossCallback, TrainerCallback
from mindformers.pynative.trainer.trainer import Trainer
from mindspore import nn, ops

BATCH, EPOCH = 16, 12


class Net(nn.Cell):  # type: ignore[misc]
    """Two layers; the loss is the model's own output, as MindFormers' models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(16, 16), nn.Dense(16, 4)

    def construct(self, x: ms.Tensor, labels: ms.Tensor) -> tuple[ms.Tensor]:
        """The loss; noise on the input makes the random state matter."""
        noisy = x + ms.Tensor(np.random.standard_normal(x.shape).astype(np.float32) * 0.1)
        return (ops.cross_entropy(self.second(ops.relu(self.first(noisy))), labels),)


class Losses(TrainerCallback):  # type: ignore[misc]
    """The same lines as `losses.Losses`."""

    def on_step_end(self, args: Any, state: Any, **kwargs: Any) -> None:
        """Called by the Trainer after each step."""
        loss = float(kwargs["loss"].asnumpy()).hex()
        with Path(os.environ["LOSSES_DIR"], "rank-0.txt").open("a") as log:
            log.write(f"{os.getpid()} {state.global_step} {loss}\n")


class ListOfModels(Trainer):  # type: ignore[misc]
    """The shape of 2.0.0: a list of model parts, with one part."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parts: list[Any] = [kwargs["model"]]
        self.model = parts  # its callbacks know lists; those of 1.9.0 here do not

    def _load_checkpoint(self, checkpoint_path: str, model: Any, optimizer: Any = None) -> None:
        for part in model:
            super()._load_checkpoint(checkpoint_path, part, optimizer)

    def training_step(self, model: Any, inputs: Any, grad_fn: Any) -> Any:
        """One step of the only part."""
        return super().training_step(model[0], inputs, grad_fn)


def main(directory: str, steps: int, shape: str) -> None:
    """Train."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_seed(1)
    random = np.random.default_rng(0)
    data = {
        "x": random.random((BATCH * EPOCH, 16)).astype(np.float32),
        "labels": random.integers(0, 4, BATCH * EPOCH).astype(np.int32),
    }
    dataset = ms.dataset.NumpySlicesDataset(data, shuffle=True).batch(BATCH)
    net = Net()
    config = {
        "training": {"steps": steps, "global_batch_size": BATCH, "local_batch_size": BATCH},
        "checkpoint": {"save_path": directory, "save_interleaved_steps": 5, "load_path": ""},
        "lr_scheduler": {"type": "ConstantWarmUpLR"},
        "train_dataset": {"dataloader": {"type": "MindDataset"}},
        "model": {"model_type": "tiny", "architectures": "Net"},
        "lastgasp": {"enable": True},
    }
    optimizer = nn.AdamWeightDecay(net.trainable_params(), 1e-2)
    trainer = (ListOfModels if shape == "2" else Trainer)(
        config=config, model=net, train_dataset=dataset, optimizer=optimizer, lr_scheduler=1e-2, callbacks=[Losses()]
    )
    trainer.callback_handler.pop_callback(LossCallback)  # it asks the model for a transformer's sizes
    trainer.train()


if __name__ == "__main__":
    given = [*sys.argv[1:], *("", "20", "1")[len(sys.argv) - 1 :]]
    main(given[0], int(given[1]), given[2])
