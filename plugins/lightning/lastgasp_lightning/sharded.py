"""A fit of which each rank holds a part (`ModelParallelStrategy`, `FSDPStrategy`): its gasps are directories as
Lightning writes them.

Lightning restores such a fit once the strategy is set up, after `on_fit_start`, and has the optimizers make an update
for that. So what hooks optimizers comes in `on_train_start` there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lastgasp.adapter import ConfigError, ManifestWriter, NotSaveable, cause_of
from lastgasp.adapter.again import Again
from lastgasp.adapter.arenas import ArenaMode, Taken
from lastgasp.adapter.checkpoint import Staged
from lastgasp.adapter.sharded import Payload, ShardedSource, Shards, fill, is_sharded, stays_alive, unsupported
from lastgasp.adapter.torch import AuxRecorder, buffers_of, persistent_buffers
from lastgasp_lightning import fsdp
from lastgasp_lightning.again import gasp_path
from lastgasp_lightning.checkpoint_io import SHARDED
from lastgasp_lightning.compat import replace_method
from lastgasp_lightning.leaving import Files, Leaving, Restored
from lastgasp_lightning.snapshot import Snapshot
from lastgasp_lightning.state import KEY

if TYPE_CHECKING:
    from lastgasp_lightning.parts_again import HeldFit

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

    def __init__(self, run: Any, writer: ManifestWriter, mode: ArenaMode) -> None:
        super().__init__(run.life, writer, run.config, mode)
        self._run, self._trainer = run, run.trainer
        self.rename = fsdp.named if fsdp.is_fsdp(run.trainer.strategy) else named
        self._leaving = Leaving(run)

    def begin(self) -> None:
        """The state is loaded: see what this rank has of it. All ranks call it together.

        Raises:
            ConfigError: something of it cannot be saved by the survivors.
        """
        trainer, on_close = self._trainer, self._run.life.on_close
        models, optimizers = self.parts()
        if found := unsupported(models, optimizers):
            raise ConfigError("model", *found)
        if not is_sharded(models):
            raise ConfigError("model", "configure_model() shards nothing", "parameters of which ranks hold parts",
                              "Shard layers in it, or use strategy='ddp'.")  # fmt: skip
        self.describe(Shards(models, optimizers, self.rank, trainer.world_size, single_optimizer=False,
                             parts_too=False))  # fmt: skip
        connector, strategy = trainer._checkpoint_connector, trainer.strategy
        on_close(replace_method(connector, "_get_lightning_module_state_dict", self._instead(self._stated)))
        on_close(replace_method(strategy, "optimizer_state", self._instead(lambda optimizer: optimizer.state_dict())))

    def parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model and the optimizers, by name."""
        optimizers = {str(number): optimizer for number, optimizer in enumerate(self._trainer.optimizers)}
        return {_MODEL: self._trainer.strategy.model}, optimizers  # of FSDP1 the wrapper, which has some of the parts

    @property
    def _prefix(self) -> str:
        """Of the names that the LightningModule's buffers have in it."""
        modules, own = self._trainer.strategy.model.named_modules(), self._trainer.lightning_module
        name = next(name for name, module in modules if module is own)
        return f"{_MODEL}.{name}." if name else f"{_MODEL}."

    def _instead(self, dumped: Any) -> Any:
        """Lightning's own may gather, and reshards live parameters: not on a thread of ours."""

        def make(original: Any) -> Any:
            return lambda *args: dumped(*args) if self._run.state.dumping else original(*args)

        return make

    def _stated(self) -> dict[str, Any]:
        """What a user's `on_save_checkpoint` finds in a gasp: this rank's parts."""
        return {str(leaf.path[-1]): leaf.value for leaf in self.shards.found.tensors if leaf.path[0] == _MODEL}

    # -- from what was left in arenas -----------------------------------------------------------------------

    def begin_with(self, load: Callable[[dict[str, Any]], None]) -> bool:
        """Restore the fit from it; False where there is nothing, or as new a checkpoint. All ranks call it together.

        A checkpoint of the same step may know more: ModelCheckpoint saves behind the copy, and remembers its files.

        Args:
            load: has Lightning restore from its checkpoint but for tensors.

        Raises:
            CheckpointMismatch: it is of another model or optimizer.
            LastgaspError: as `take_over`.
        """
        return self.take_over(self._leaving.why_not,
                              lambda taken, payload: self._take(load, taken, payload, bytes(payload.more)),
                              newer=True)  # fmt: skip

    def _take(self, load: Callable[[dict[str, Any]], None], taken: Taken, payload: Payload, more: bytes) -> Restored:
        own = {self.rank: payload.aux} if payload.aux else {}
        first = self._run.session.gather("arenas/first", payload.aux if self.rank == 0 else b"")[0]  # what was logged
        restored = Restored.of(taken.step, more, own | ({0: first} if first else {}))
        models, optimizers = self.parts()
        fill(payload.shards, models, optimizers, rank=self.rank, world_size=self._trainer.world_size,
             single_optimizer=False, parts_too=False)  # fmt: skip
        checkpoint, record = restored.files(restored.aux)
        load(checkpoint | {KEY: record})
        return restored

    def more(self, kept: Any) -> bytes:
        """Lightning's checkpoint of that step, and what a bit-equal resume needs."""
        return self._leaving.written(lambda: self._all_files(kept))

    def _all_files(self, kept: Snapshot) -> Files:
        own = self.capture(kept.step)
        return self._files(kept, self.dump_small(kept), {self.rank: own} if own else {})

    # -- entered again ------------------------------------------------------------------------------------

    def cannot_again(self) -> str:
        """As in the base; and where a new process could not know what stands beside the tensors."""
        if stays_alive(self._trainer.strategy.model):
            return "a part is held by several ranks in FSDP1, which keeps a model in memory whose backward pass fails"
        return super().cannot_again() or self._leaving.cannot()

    def settle_buffers(self, step: int) -> None:
        """As in the base."""
        live, prefix = dict(persistent_buffers(self._trainer.lightning_module)), self._prefix
        for name, value in self.buffers(step, self.capture(step)).items():
            holder, key = live[name.removeprefix(prefix)]
            if (there := holder[key]) is not None:
                there.detach().copy_(value)

    def held(self, step: int) -> HeldFit:
        """As in the base, with Lightning's checkpoint as it is now.

        Raises:
            NotSaveable: this rank does not hold the step, or a callback's state cannot be dumped.
        """
        from lastgasp_lightning.parts_again import HeldFit

        self.bring(step)
        kept, fit, number = self.kept(step), self._run.fit.fit, self._run.fit.number()
        try:
            more = kept.more if isinstance(kept, Restored) else self._leaving.dumped(self._all_files(kept))
        except Exception as error:  # of the user's objects
            raise NotSaveable(f"what stands beside step {step} cannot be dumped ({cause_of(error)})") from error
        writer = replace(self._writer, fit=lambda: fit)
        found = HeldFit(self.hand_on(), writer, self.config, number, more)
        found.alike, found.present, found.rename = self.alike, self.present, self.rename
        return found

    def enter(
        self, load: Callable[[dict[str, Any]], None], again: Again, held: HeldFit | None, more: bytes
    ) -> frozenset[str] | None:
        """Restore the fit from this rank's part of a step. All ranks call it together.

        Args:
            load: as for `begin_with`; again, held: as for `enter_again`.
            more: Lightning's checkpoint without tensors, the same for all ranks.

        Returns:
            The manifests that were there when training began.

        Raises:
            CheckpointMismatch: it is of another model or optimizer.
            LastgaspError: as `enter_again`.
        """
        self.enter_again(again, held, self._leaving.why_not, lambda t, payload: self._take(load, t, payload, more))
        return self.present

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
        prefix = self._prefix
        return {f"{prefix}{name}": value for name, value in found.items()}

    def dump_small(self, kept: Snapshot | Restored) -> dict[str, Any]:
        """Lightning's checkpoint as it stands now, for `beside`; before the first step as it was left."""
        if isinstance(kept, Restored):
            return {}
        checkpoint: dict[str, Any] = self._run.state.dump_live()
        if checkpoint["state_dict"].keys() != self._stated().keys():
            self._run.session.note("on_save_checkpoint has changed checkpoint['state_dict']: a gasp of a sharded model "
                                   "has what the model has")  # fmt: skip
        return checkpoint

    def write_own(self, staged: Staged, step: int, *, plain: bool, **more: Any) -> bytes:
        """As in the base."""
        if plain:
            self._run.note_unsaved()
        return super().write_own(staged, step, plain=plain, **more)

    def beside(
        self, kept: Snapshot | Restored, small: dict[str, Any], aux: Mapping[int, bytes]
    ) -> Mapping[str, Any]:
        """Lightning's file, and what a bit-equal resume needs."""
        checkpoint, record = kept.files(aux) if isinstance(kept, Restored) else self._files(kept, small, aux)
        return {META: checkpoint, OWN: record}

    def _files(self, kept: Snapshot, small: dict[str, Any], aux: Mapping[int, bytes]) -> Files:
        checkpoint, record = dict(small), self._run.state.at_boundary(small, kept, aux)
        for key in ("state_dict", "optimizer_states"):
            checkpoint.pop(key)
        return checkpoint, record
