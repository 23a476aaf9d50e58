"""A fit of which each rank holds a part (`ModelParallelStrategy`): its gasps are directories as Lightning writes them.

Lightning restores such a fit once the strategy is set up, after `on_fit_start`, and has the optimizers make an update
for that. So what hooks optimizers comes in `on_train_start` there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lastgasp.adapter import ConfigError, ManifestWriter
from lastgasp.adapter.arenas import ArenaMode
from lastgasp.adapter.sharded import ShardedSource, Shards, is_sharded, unsupported
from lastgasp.adapter.torch import AuxRecorder, buffers_of
from lastgasp_lightning.again import gasp_path
from lastgasp_lightning.checkpoint_io import SHARDED
from lastgasp_lightning.compat import replace_method
from lastgasp_lightning.snapshot import Snapshot

META, OWN = "meta.pt", "lastgasp.pt"
"""Lightning's file with all but tensors, and ours: plain Lightning reads the first one with `weights_only=True`."""
_MODEL = "model"


def named(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """What `ModelParallelStrategy` calls it: `state_dict`, `optimizer_0`, ..."""
    return ("state_dict", *path[1:]) if path[0] == _MODEL else (f"optimizer_{path[1]}", *path[2:])


class LightningShards(ShardedSource):
    """What a `LightningRun` has to do about shards.

    Args:
        run: the fit; writer: names who writes.
        mode: which steps are copied into the arena.
    """

    layout = SHARDED
    rename = staticmethod(named)

    def __init__(self, run: Any, writer: ManifestWriter, mode: ArenaMode) -> None:
        super().__init__(run.life, writer, run.config, mode)
        self._run, self._trainer = run, run.trainer

    def begin(self) -> None:
        """The state is loaded: see what this rank has of it. All ranks call it together.

        Raises:
            ConfigError: something of it cannot be saved by the survivors.
        """
        trainer, on_close = self._trainer, self._run.life.on_close
        models = {_MODEL: trainer.lightning_module}
        optimizers = {str(number): optimizer for number, optimizer in enumerate(trainer.optimizers)}
        if found := unsupported(models, optimizers):
            raise ConfigError("model", *found)
        if not is_sharded(models):
            raise ConfigError("model", "configure_model() shards nothing", "parameters that are DTensors",
                              "Call fully_shard in it, or use strategy='ddp'.")  # fmt: skip
        self.describe(Shards(models, optimizers, self.rank, trainer.world_size, single_optimizer=False))
        connector, strategy = trainer._checkpoint_connector, trainer.strategy
        on_close(replace_method(connector, "_get_lightning_module_state_dict", self._instead(self._stated)))
        on_close(replace_method(strategy, "optimizer_state", self._instead(lambda optimizer: optimizer.state_dict())))

    def _instead(self, dumped: Any) -> Any:
        """Lightning's own may gather, and reshards live parameters: not on a thread of ours."""

        def make(original: Any) -> Any:
            return lambda *args: dumped(*args) if self._run.state.dumping else original(*args)

        return make

    def _stated(self) -> dict[str, Any]:
        """What a user's `on_save_checkpoint` finds in a gasp: this rank's parts."""
        return {str(leaf.path[-1]): leaf.value for leaf in self.shards.found.tensors if leaf.path[0] == _MODEL}

    # -- what a checkpoint has ----------------------------------------------------------------------------

    @property
    def recorder(self) -> AuxRecorder:
        """The fit's."""
        found: AuxRecorder = self._run.state.recorder
        return found

    def target(self, step: int) -> Path:
        """As of any gasp of this fit."""
        return gasp_path(self.config.directory, step, self._run.fit.number())

    def require(self, step: int) -> None:
        """As `LightningState.require`."""
        self._run.state.require(step)

    def buffers(self, step: int, own: bytes) -> Mapping[str, Tensor]:
        """As `buffers_of`."""
        found = buffers_of(step, {self.rank: own} if own else {}, self.recorder, [self.rank])
        return {f"{_MODEL}.{name}": value for name, value in found.items()}

    def dump_small(self, kept: Snapshot) -> dict[str, Any]:
        """Lightning's checkpoint as it stands now, for `beside`."""
        checkpoint: dict[str, Any] = self._run.state.dump_live()
        if checkpoint["state_dict"].keys() != self._stated().keys():
            self._run.session.note("on_save_checkpoint has changed checkpoint['state_dict']: a gasp of a sharded model "
                                   "has what the model has")  # fmt: skip
        return checkpoint

    def beside(self, kept: Snapshot, small: dict[str, Any], aux: Mapping[int, bytes]) -> Mapping[str, Any]:
        """Lightning's file, and what a bit-equal resume needs."""
        checkpoint, record = dict(small), self._run.state.at_boundary(small, kept, aux)
        for key in ("state_dict", "optimizer_states"):
            checkpoint.pop(key)
        return {META: checkpoint, OWN: record}
