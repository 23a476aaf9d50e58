"""The state of a Megatron run: counted at each step, saved by the engine as a genuine checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from lastgasp.config import GaspConfig
from lastgasp.errors import ConfigError
from lastgasp.pytorch.statedigest import digests_of
from lastgasp.topology import Place, ReplicaGroups
from lastgasp_megatron.aux_state import RandomState
from lastgasp_megatron.compose import Composer, is_distributed
from lastgasp_megatron.devices import Device
from lastgasp_megatron.sound import unsound
from lastgasp_megatron.source import MegatronSource
from lastgasp_megatron.steps import Steps, is_stub, only
from lastgasp_megatron.topology import advice, shard_of

log = logging.getLogger("lastgasp")

_FP32 = 4
_OF_ONE_CUT = (
    "periodic checkpoints are of format torch_dist and load under other tensor and pipeline parallel sizes; what "
    "survivors save after a fault is of format torch and does not: before you change the sizes, let a periodic save end"
)


class MegatronState:
    """The state of one training.

    Order: the constructor and `install` after the model was loaded; per iteration `iteration_begin`, `iteration_end`;
    `finish_step` when `train` raised; `undo` at the end. The engine calls `source` from its own threads.

    Args:
        args, model, optimizer, scheduler: Megatron's.
        config: where and how to save; place: who this rank is.
        before_update: called before parameters change; may raise, and then they do not.
        step_completed: called as soon as a step is complete.

    Raises:
        ConfigError: an optimizer that cannot be saved.
    """

    def __init__(
        self,
        args: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        *,
        config: GaspConfig,
        place: Place,
        before_update: Callable[[], None],
        step_completed: Callable[[int], None],
    ) -> None:
        _check(optimizer)
        chunks, shard = (list(model) if isinstance(model, list | tuple) else [model]), shard_of(args)
        self._args, self._optimizer, self._place = args, optimizer, place
        self._chunks = chunks
        self._device, self._step_completed = Device(_device(chunks)), step_completed
        self._random = RandomState(self._device.device)
        self._steps = Steps(
            args,
            optimizer,
            scheduler,
            capture=self._random.capture,
            before_update=before_update,
            step_completed=self._ended,
        )
        composer = Composer(args, chunks, optimizer, shard, place.rank)
        self.source = MegatronSource(self._steps, self._random, composer, optimizer, (place, shard))
        self.source.configure(config, self._device)
        self._device.mark()
        self._device.mark_copied()
        self._steps.on_settled = self._device.mark_copied
        self._looked = False

    def _ended(self, step: int) -> None:
        self._device.mark()
        self._step_completed(step)

    @property
    def step(self) -> int:
        """Completed iterations."""
        return self._steps.step

    @property
    def replicas(self) -> ReplicaGroups:
        """The holders of each shard."""
        return self._place.replicas

    def install(self) -> None:
        """Watch the optimizer, and say once what a lost rank would cost. Idempotent."""
        self._steps.install()
        if self._place.rank != 0:
            return
        if self.advice:
            log.warning("%s", self.advice)
        if getattr(self._args, "ckpt_format", "torch") == "torch_dist":
            log.info("%s", _OF_ONE_CUT)

    def undo(self) -> None:
        """Put everything back as it was. Idempotent."""
        self._steps.uninstall()
        self._random.recorder.close()

    def iteration_begin(self) -> None:
        """Call before each `train_step`."""
        self._steps.iteration_begin()
        if self._steps.updated and not self._looked:
            self._look()

    def _look(self) -> None:
        """Once, behind the first update: what a gasp would find is told now, and not when one is needed."""
        self._looked = True
        problem = unsound(self._optimizer, settled=self._steps.settled)
        if problem:
            self.source.unsound = problem
            log.error("rank %d can save nothing after a fault: %s. Leave that option out", self._place.rank, problem)

    def iteration_end(self) -> None:
        """Call after each `train_step` that returned."""
        self._steps.iteration_end()

    def finish_step(self) -> bool:
        """Call when `train` raised. Returns whether the state is that of `step`, and not between two."""
        return not self._steps.inside

    def log_written(self) -> None:
        """Call after each `training_log` that returned."""
        self._steps.logged = self._steps.step

    @property
    def unlogged(self) -> str:
        """What of a step that is complete Megatron has not logged, for people; empty where nothing is missing.

        Its last rank is the one that prints and writes to TensorBoard.
        """
        step, rank = self.step, self._place.rank
        if self._steps.logged >= step or rank != self._place.world_size - 1:
            return ""
        return f"iteration {step} was cut short on rank {rank} after its update: it counts, and no log has a line of it"

    def digests(self) -> dict[str, bytes]:
        """Of what all holders of this rank's shard have in common: weights, and its part of the optimizer's state."""
        optimizer = only(self._optimizer)
        optimizers = {} if is_stub(optimizer) else {"optimizer": optimizer.optimizer}
        return digests_of({f"model chunk {i}": chunk for i, chunk in enumerate(self._chunks)}, optimizers)

    @property
    def advice(self) -> str:
        """What would keep a lost rank's shard, and what it costs in memory; empty where nothing is needed."""
        return advice(self._place.replicas, self._args, _bytes_held(only(self._optimizer)))


def _bytes_held(optimizer: Any) -> int:
    """Of optimizer state on this rank: fp32 weights and two moments, 12 bytes per parameter that it owns."""
    if is_stub(optimizer):
        return 0
    owned: int = sum(param.numel() for group in optimizer.optimizer.param_groups for param in group["params"])
    return owned * 3 * _FP32


def _check(optimizer: Any) -> None:
    real = [one for one in getattr(optimizer, "chained_optimizers", [optimizer]) if not is_stub(one)]
    if len(real) > 1:
        names = ", ".join(type(one).__name__ for one in real)
        raise ConfigError("optimizer", names, "one optimizer", "Train without experts and without several optimizers.")
    one = only(optimizer)
    known = is_stub(one) or is_distributed(one) or type(one).__name__ in _KNOWN
    if not known:
        raise ConfigError("optimizer", type(one).__name__, f"DistributedOptimizer or one of {_KNOWN}", "Use Adam.")


_KNOWN = ("Float16OptimizerWithFloat16Params", "FP32Optimizer")


def _device(chunks: list[Any]) -> torch.device:
    first = next((param for chunk in chunks for param in chunk.parameters()), None)
    return first.device if first is not None else torch.device("cpu")
