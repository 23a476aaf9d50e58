"""A Lightning job of `ModelParallelStrategy` or `FSDPStrategy` whose `fit` can be entered again, with plain values."""

from __future__ import annotations

import argparse
import os
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lastgasp import arena
from lastgasp.pytorch.loop import again
from lastgasp_lightning import LastGasp
from support import again_faults, fsdp_strategy, train_lightning_sharded
from support.again_faults import note

GATE = 5
"""Completed steps after which the ranks wait for the file `go`: faults come behind it."""
STEPS = 12
SHAPES = (*train_lightning_sharded.SHAPES, *fsdp_strategy.SHAPES, "late", "hooked")
_drop_groups: Any = vars(again)["drop_groups"]
_shards: list[Any] = []
"""Weak references to parameters of the entry before."""


class Counted(train_lightning_sharded.Perceptron):
    """As there; counts its steps in plain Python, and logs."""

    def __init__(self, shape: str, stateless: bool) -> None:
        super().__init__(shape)
        self.stateless = stateless
        self.steps, self.seen = 0, list[int]()
        self.late: nn.Module | None = None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Whatever the count is has a part in the loss: it must be that of the step."""
        self.steps += 1
        self.seen.append(self.global_step)
        inputs = batch[0] if self.late is None else self.late(batch[0])
        count = self.global_step if self.stateless else self.steps
        loss = super().training_step([inputs + 0.001 * count, batch[1]], batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("steps", float(self.steps), sync_dist=True)
        return loss


class Sharded(Counted, train_lightning_sharded.Sharded):
    """With `fully_shard`."""

    def configure_model(self) -> None:
        """Layers of the shape `late` are made here, unless they are there already."""
        again_faults.at("function called")
        if self.shape == "late" and self.late is None:
            with torch.random.fork_rng():
                torch.manual_seed(11)
                self.late = nn.Linear(8, 8)
        super().configure_model()
        if self.late is not None:
            meshes: Any = self.device_mesh
            fully_shard(self.late, mesh=meshes["data_parallel"])


class Wrapped(Counted, train_lightning_sharded.Wrapped):
    """Wraps its layers itself."""


class Legacy(Counted, train_lightning_sharded.Legacy):
    """The same, by an older hook."""


class Ending(Sharded):
    """Changes its weights in its own `on_train_batch_end`, after all callbacks."""

    def on_train_batch_end(self, *_: Any) -> None:
        """A little decay."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.999)


class Hooked(Sharded):
    """Adds something to each checkpoint."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A number."""
        checkpoint["added"] = 1


KINDS = {"ending": Ending, "hooked": Hooked, "fsdp-wrapped": Wrapped, "fsdp-legacy": Legacy}


class Diary(Callback):
    """Notes who trains, and holds the ranks at the gate."""

    def __init__(self, args: argparse.Namespace, ours: LastGasp) -> None:
        self._directory, self._ours, self._dies, self._stuck = args.dir, ours, args.dies, args.stuck

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The process group is there; ours has not connected yet."""
        again_faults.at("group made")
        if (os.environ["RANK"], os.environ.get("LASTGASP_INCARNATION")) == (self._dies, "1"):
            note(self._directory, f"died {os.getpid()}")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A fit is entered."""
        _shards[:] = [weakref.ref(one) for one in pl_module.parameters()]
        note(self._directory, f"entered {os.getpid()} {trainer.global_step}")

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Faults come once the test says so."""
        run = self._ours._run
        while run is not None and trainer.global_step >= GATE and not (self._directory / "go").exists():
            run.progress("data")
            time.sleep(0.01)
        if trainer.global_step == 8:
            again_faults.stay(self._stuck)
        again_faults.at("first step")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The fit is over."""
        note(self._directory, f"ended {os.getpid()} {trainer.global_step}")


def drop_groups(wrapped: list[Any]) -> None:
    """Once the shards of the entry that has ended are gone, of which there may be no room for two."""
    assert all(one() is None for one in _shards), "the shards of the entry before have not been let go of"
    _drop_groups(wrapped)


def main() -> None:
    """Two epochs and a bit; validation at the end of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", required=True, type=Path)
    parser.add_argument("--shape", default="plain", choices=SHAPES)
    parser.add_argument("--arena", default="every 1")
    parser.add_argument("--recovery")
    parser.add_argument("--dies", default="", help="this rank is killed in setup when fit is entered again")
    parser.add_argument("--stuck", default="", help="this rank stays in its own code in step 9, and raises nothing")
    parser.add_argument("--stateless", action="store_true", help="without plain values, which a restart loses")
    parser.add_argument("--full", action="store_true", help="the host has no memory for arenas")
    args = parser.parse_args()
    torch.set_num_threads(1)
    again_faults.install(args.dir)
    if args.full:
        vars(arena)["available"] = lambda: 1000
    vars(again)["drop_groups"] = drop_groups
    here, world = (int(os.environ[name]) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    tensor = 2 if args.shape in train_lightning_sharded.TENSOR else 1
    seed_everything(7 + 1000 * (int(os.environ["RANK"]) // tensor))  # who shares layers draws the same
    x = torch.randn(4 * 5 * world * 2, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    ours = LastGasp(args.dir, arena=args.arena, recovery=args.recovery)
    saves = ModelCheckpoint(args.dir, "{step}", every_n_train_steps=4, save_top_k=2, monitor="step", mode="max")
    trainer = Trainer(
        devices=here, num_nodes=world // here, max_steps=STEPS, max_epochs=-1, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0,
        log_every_n_steps=1, logger=CSVLogger(args.dir / "logs" / "table"), callbacks=[Diary(args, ours), ours, saves],
        **train_lightning_sharded.options(args.shape, world),
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)  # replicas begin alike: fully_shard does not see to that
        usual = Counted if args.shape in fsdp_strategy.SHAPES else Sharded
        model = KINDS.get(args.shape, usual)(args.shape, args.stateless)
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8))
    wrapped: Any = trainer.strategy.model
    whole = get_model_state_dict(wrapped, options=StateDictOptions(full_state_dict=True))
    note(args.dir, f"seen {model.steps} {model.seen}")
    if trainer.is_global_zero:
        torch.save({name: value for name, value in whole.items() if "running" not in name}, args.dir / "final.pt")


if __name__ == "__main__":
    main()
