"""Scripts of users, each as plain Python starts it: `trainings_child.py CASE FOLDER`. Steps are told by `Losses`."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import BackupAndRestore, Callback, CheckpointConfig, Model, ModelCheckpoint, OnRequestExit

from lastgasp_mindformers import LastGasp
from support.mindspore.losses import Losses

SIZE = 4
"""Steps of an epoch."""


class Fails(Callback):  # type: ignore[misc]
    """Raises at the end of a step of its training, or kills the process there."""

    def __init__(self, at: int, *, kill: bool = False) -> None:
        super().__init__()
        self._left, self._kill = at, kill

    def on_train_step_end(self, run_context: Any) -> None:
        """Count."""
        self._left -= 1
        if self._left == 0 and self._kill:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        if self._left == 0:
            raise ValueError("of a test")


class Changes(Callback):  # type: ignore[misc]
    """What callbacks of users change and draw, and a fault before the step that makes `at`."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at

    @staticmethod
    def _times(param: Any, factor: float) -> None:
        ms.ops.assign(param, ms.Tensor(float(param.asnumpy()) * factor, ms.float32))

    def on_train_epoch_begin(self, run_context: Any) -> None:
        self._times(run_context.original_args().optimizer.learning_rate, 0.5)

    def on_train_step_begin(self, run_context: Any) -> None:
        if run_context.original_args().cur_step_num == self._at:
            raise ValueError("of a test")

    def on_train_step_end(self, run_context: Any) -> None:
        self._times(run_context.original_args().train_network.network.temperature, random.uniform(0.8, 1.0))

    def on_train_epoch_end(self, run_context: Any) -> None:
        self._times(run_context.original_args().train_network.network.temperature, 1.5)


class Tempered(nn.WithLossCell):  # type: ignore[misc]
    """A loss with a temperature that nothing in the graph changes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.temperature = ms.Parameter(ms.Tensor(1.0, ms.float32), name="temperature", requires_grad=False)

    def construct(self, data: Any, label: Any) -> Any:
        return super().construct(data, label) / self.temperature


def made() -> tuple[Any, Any, Any]:
    """A model, its data, and its network without the optimizer."""
    ms.set_seed(1)
    drawn = np.random.default_rng(0)
    data = drawn.random((SIZE * 8, 8)).astype(np.float32), drawn.random((SIZE * 8, 2)).astype(np.float32)
    dataset = ms.dataset.NumpySlicesDataset(data, shuffle=True).batch(8)
    net = nn.Dense(8, 2)
    return Model(net, nn.MSELoss(), nn.Momentum(net.trainable_params(), 0.01, 0.9)), dataset, net


def unseeded(folder: Path, fails: str) -> None:
    """Shuffled anew at each start."""
    model, dataset, _ = made()
    ms.dataset.config.set_seed(5489)
    more = [Fails(6)] if fails else []
    model.train(2, dataset, callbacks=[Losses(), *more, LastGasp(str(folder / "ckpts"))])


def pipelines(folder: Path, fails: str) -> None:
    """What is said of each of them behind a resume in the middle of an epoch, seeded or not."""
    from mindspore.dataset import GeneratorDataset, NumpySlicesDataset, SubsetRandomSampler, vision
    from mindspore.dataset import Sampler as OwnSampler
    from mindspore.dataset import zip as zipped
    from mindspore.dataset.transforms import Compose, RandomApply

    from lastgasp_mindformers.data import not_repeated

    class Permuted(OwnSampler):  # type: ignore[misc]
        def __iter__(self) -> Any:
            yield from np.random.permutation(8)

    def generated() -> Any:
        yield from ((row,) for row in rows)

    def of(source: Any, name: str = "x", **options: Any) -> Any:
        return GeneratorDataset(source, [name], **options)

    def mapped(operations: Any) -> Any:
        return NumpySlicesDataset({"x": np.zeros((8, 4, 4, 3), np.uint8)}, shuffle=False).map(operations, ["x"])

    flip, rows = vision.RandomHorizontalFlip(0.5), [np.array([row], np.float32) for row in range(8)]
    made = {
        "generator": of(generated),
        "rows": of(rows),
        "rows in order": of(rows, shuffle=False),
        "drawn rows": of(rows, sampler=SubsetRandomSampler([1, 2, 3, 4])),
        "shard": of(rows, num_shards=2, shard_id=0),
        "shard in order": of(rows, num_shards=2, shard_id=0, shuffle=False),
        "second is shuffled": zipped((of(rows, shuffle=False), of(rows, "y"))),
        "own sampler": of(rows, sampler=Permuted()),
        "own order": of(rows, sampler=[3, 2, 1, 0]),
        "flips": mapped([flip]),
        "composed": mapped(Compose([vision.HorizontalFlip(), flip])),
        "sometimes": mapped(RandomApply([vision.HorizontalFlip()])),
        "augmented": mapped(vision.AutoAugment()),
        "uniform": mapped(vision.UniformAugment([vision.HorizontalFlip()], 1)),
        "resized": mapped([vision.Resize(2)]),
    }
    for name, dataset in made.items():
        told = [not_repeated(dataset.batch(2), seeded=seeded, fast=True, within=1) for seeded in (True, False)]
        what = ("a seed", "own sampler", "augmentations")
        words = ["+".join(word for word in what if word in str(each)) for each in told]
        print(f"{name}: {' or '.join(words)}", flush=True)


def inline(folder: Path, fails: str) -> None:
    """The line of the documentation: `model.train` is looked up before its arguments are evaluated."""
    model, dataset, _ = made()
    more = [Fails(6)] if fails else []
    model.train(2, dataset, callbacks=[Losses(), *more, LastGasp(str(folder / "ckpts"))])


def late(folder: Path, fails: str) -> None:
    """`train` was looked up before lastgasp was there: the hooks are too late."""
    from lastgasp_mindformers import uninstall

    uninstall()
    model, dataset, _ = made()
    train = model.train
    train(1, dataset, callbacks=[Losses(), LastGasp(str(folder / "ckpts"))])


def later(folder: Path, fails: str) -> None:
    """The user's own count of epochs begins at five."""
    model, dataset, _ = made()
    callbacks = [Losses(), *([Fails(6)] if fails else []), LastGasp(str(folder / "ckpts"))]
    model.train(8, dataset, callbacks=callbacks, initial_epoch=5)


def sinks(folder: Path, fails: str) -> None:
    """The user's own count, and `sink_size` on CPU, where MindSpore counts as without it."""
    model, dataset, _ = made()
    callbacks = [Losses(), *([Fails(4)] if fails else []), LastGasp(str(folder / "ckpts"))]
    model.train(5, dataset, callbacks=callbacks, dataset_sink_mode=True, sink_size=2, initial_epoch=2)


def leaves(folder: Path, fails: str) -> None:
    """OnRequestExit, the file that it has left behind long ago, and BackupAndRestore with that of its last epoch."""
    model, dataset, _ = made()
    stops = OnRequestExit(save_mindir=False, file_name="net", directory=str(folder / "exit"))
    if fails:
        ms.save_checkpoint(model.train_network, stops.train_name)
    more = [Fails(6)] if fails else []
    others = [stops, BackupAndRestore(str(folder / "backup")), *more]
    model.train(2, dataset, callbacks=[Losses(), *others, LastGasp(str(folder / "ckpts"))])
    if stops.train_name != str(folder / "exit/rank_0/net_train"):
        raise AssertionError(stops.train_name)


def logs(folder: Path, fails: str) -> None:
    """A callback of MindFormers' in a script without its Trainer."""
    from mindformers.core.callback import MFLossMonitor

    model, dataset, _ = made()
    callbacks = [Losses(), MFLossMonitor(origin_epochs=2, dataset_size=SIZE), *([Fails(6)] if fails else [])]
    model.train(2, dataset, callbacks=[*callbacks, LastGasp(str(folder / "ckpts"))])


def monitored(folder: Path, fails: str) -> None:
    """MindFormers' CheckpointMonitor in a script without its Trainer."""
    from mindformers.core.callback import CheckpointMonitor

    model, dataset, _ = made()
    saves = CheckpointMonitor(prefix="net", directory=str(folder / "ckpts"), save_checkpoint_steps=4)
    model.train(2, dataset, callbacks=[Losses(), saves, *([Fails(6)] if fails else []), LastGasp(str(folder / "own"))])


def changes(folder: Path, fails: str) -> None:
    """Callbacks change a parameter and the learning rate; `fails` says before which step a fault comes, 0 for none."""
    _, dataset, net = made()
    random.seed(3)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    model = Model(Tempered(net, nn.MSELoss()), optimizer=optimizer)
    model.train(3, dataset, callbacks=[Losses(), Changes(int(fails)), LastGasp(str(folder / "ckpts"))])
    for param in model.train_network.get_parameters():
        print(f"final {param.name} {param.asnumpy().tobytes().hex()}", flush=True)


def left(folder: Path, epochs: str) -> None:
    """Six epochs; then those that are left, as by a script that has loaded a checkpoint itself."""
    model, dataset, _ = made()
    more = [] if epochs else [Fails(14)]
    model.train(int(epochs or 6), dataset, callbacks=[Losses(), *more, LastGasp(str(folder / "ckpts"))])


class Reads(Callback):  # type: ignore[misc]
    """Goes through the training data behind each epoch."""

    def on_train_epoch_end(self, run_context: Any) -> None:
        """As `model.eval` would."""
        dataset = run_context.original_args().train_dataset
        print("read", sum(1 for _ in dataset.create_tuple_iterator(num_epochs=1)), flush=True)


def reads(folder: Path, fails: str) -> None:
    """The training set is evaluated, too."""
    model, dataset, _ = made()
    more = [Fails(6)] if fails else []
    model.train(3, dataset, callbacks=[Losses(), Reads(), *more, LastGasp(str(folder / "ckpts"))])


def exports(folder: Path, fails: str) -> None:
    """Weights alone, every third step, into the directory of LastGasp."""
    model, dataset, net = made()
    config = CheckpointConfig(save_checkpoint_steps=3, saved_network=net)
    weights = ModelCheckpoint(prefix="net", directory=str(folder / "ckpts"), config=config)
    failure = {"early": [Fails(2)], "kill": [Fails(5, kill=True)]}.get(fails, [])
    model.train(2, dataset, callbacks=[Losses(), weights, *failure, LastGasp(str(folder / "ckpts"))])


def folds(folder: Path, second: str) -> None:
    """Two trainings of one script, which save into one directory."""
    for prefix, epochs in (("foldA", 1), ("foldB", 2)):
        model, dataset, _ = made()
        directory = str(folder / "ckpts")
        saves = ModelCheckpoint(prefix=prefix, directory=directory, config=CheckpointConfig(save_checkpoint_steps=2))
        ours = [] if prefix == "foldB" and second == "without" else [LastGasp(directory)]
        model.train(epochs, dataset, callbacks=[Losses(), saves, *ours])


def main() -> None:
    """One case."""
    ms.set_device("CPU")
    case, folder, *fails = sys.argv[1:]
    globals()[case](Path(folder), fails[0] if fails else "")


if __name__ == "__main__":
    main()
