"""The state of a Megatron run: counted at each step, saved by the engine as a genuine checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lastgasp.adapter import ConfigError, Digests, GaspConfig, Place, Session
from lastgasp.adapter.arenas import ArenaMode
from lastgasp.adapter.torch import digests_of
from lastgasp_megatron.aux_state import RandomState
from lastgasp_megatron.compose import Composer
from lastgasp_megatron.devices import Device
from lastgasp_megatron.keeping import Keeping, needs_arenas
from lastgasp_megatron.sound import unsound
from lastgasp_megatron.source import MegatronSource
from lastgasp_megatron.steps import Boundary, Built, Steps, chain_of, parts_of
from lastgasp_megatron.topology import advice, shard_of
from lastgasp_megatron.trainings import name_of, writer_of

log = logging.getLogger("lastgasp")

_FP32 = 4
_OF_ONE_CUT = (
    "periodic checkpoints are of format torch_dist and load under other tensor and pipeline parallel sizes; what "
    "survivors save after a fault is of format torch and does not: before you change the sizes, let a periodic save end"
)


class MegatronState:
    """The state of one training, as `lastgasp.adapter.Training` wants it. The engine calls `source` from its threads.

    Order: the constructor and `install` after the model was loaded; per iteration `iteration_begin`; at the end
    `close`, after `steps.uninstall`.

    Args:
        built: Megatron's.
        config: where and how to save; place: who this rank is.
        session: is asked before parameters change, told each completed step, and what people must know.
        alike: whether all replicas were found to hold the same.
        arena: which steps are copied into an arena, where a shard has no replica.
        number: of the training in its script (`Trainings`).

    Attributes:
        steps: counts them.

    Raises:
        ConfigError: an optimizer that cannot be saved.
    """

    def __init__(
        self,
        built: Built,
        config: GaspConfig,
        place: Place,
        session: Session,
        alike: Callable[[], bool] = lambda: True,
        *,
        arena: ArenaMode = 0,
        number: int = 0,
    ) -> None:
        # A stage of a pipeline may have no experts, and then has one optimizer.
        shard = replace(shard_of(built.args), has_experts=len(chain_of(built.optimizer)) > 1)
        check_optimizer(built.optimizer, len(shard.cuts))
        self._args, self._chunks, self._optimizer, _ = built
        self._place, self._session = place, session
        self._device = Device(_device(built.model))
        self._random = RandomState(self._device.device)
        self.steps = Steps(
            built,
            capture=self._random.capture,
            before_update=self._device.gate(session),
            step_completed=self._completed,
            keep=self._keep,
            note=session.note,
        )
        self._begun = self.steps.step
        composer, writer = Composer(built, shard), writer_of(place, number)
        self.source = MegatronSource(
            self.steps, self._random, composer, self._device, writer, config, alike=alike, note=session.note,
            training=name_of(number, config.directory),
        )  # fmt: skip
        self._off = arena == 0
        wanted = arena != 0 and needs_arenas(place, session)
        self._keeping = Keeping(self.source, arena, place, session, self._device.settle) if wanted else None
        self._device.mark()
        self._device.mark_copied()
        self.steps.on_settled = self._device.mark_copied

    def _completed(self, step: int) -> None:
        self._device.mark()
        self._session.step_completed(step)  # looked up anew: the first one is another method

    def _keep(self, boundary: Boundary) -> None:
        if self._keeping is not None:
            self._keeping.keep(boundary)

    def install(self) -> None:
        """Watch the optimizer, and say once what a lost rank would cost. Idempotent."""
        self.steps.install()
        if self._place.rank != 0:
            return
        if self._keeping is None and self.advice():
            log.warning("%s", self.advice())
        if getattr(self._args, "ckpt_format", "torch") == "torch_dist":
            log.info("%s", _OF_ONE_CUT)

    def close(self) -> None:
        """Release the crash-safe buffer and the arena, once no gasp can be taken any more."""
        self._random.recorder.close()
        if self._keeping is not None:
            self._keeping.close()

    def iteration_begin(self) -> None:
        """Call before each `train_step`."""
        self.steps.iteration_begin()
        if self.steps.updated and not self.source.looked:
            self._look()
        if self._keeping is not None and self.steps.step > self._begun:
            self._keeping.begin(self.steps.boundary)

    def _look(self) -> None:
        """Once, after the first update: report now what would make a gasp impossible, not when one is needed."""
        self.source.looked = True
        problem = unsound(self._optimizer, settled=self.steps.settled)
        if problem:
            self.source.unsound = problem
            if self._keeping is not None:
                self._keeping.forget()
            log.error("rank %d can save nothing after a fault: %s. Leave that option out", self._place.rank, problem)

    # -- the engine asks --------------------------------------------------------------------------

    def digests(self) -> Digests:
        """Of what all holders of this rank's shard have in common: weights, and its part of the optimizer's state."""
        parts = parts_of(self._optimizer)
        optimizers = {f"optimizer {i}" if i else "optimizer": one.optimizer for i, one in enumerate(parts)}
        return digests_of({f"model chunk {i}": chunk for i, chunk in enumerate(self._chunks)}, optimizers)

    def settle(self, cause: str) -> str:
        """A step is complete with the inner optimizer's update, whatever is missing behind it. Where another rank holds
        a shard of the step before alone, it does not count, and is done again.

        Its last rank is the one that prints and writes to TensorBoard.
        """
        step, rank = self.steps.step, self._place.rank
        if self.steps.logged < step and rank == self._place.world_size - 1:
            self._session.note(f"iteration {step} was cut short on rank {rank} after its update: no log has a line of "
                               "it, unless it is done again")  # fmt: skip
        return "raised inside the update, so the state is between two steps" if self.steps.inside else ""

    def before_exit(self) -> None:
        """Megatron's own writers are left alone."""

    def advice(self) -> str:
        """What would keep a lost rank's shard, and what it costs in memory; empty where nothing is needed."""
        return advice(self._place.replicas, self._args, _bytes_held(self._optimizer), off=self._off)


def _bytes_held(optimizer: Any) -> int:
    """Of optimizer state on this rank: fp32 weights and two moments, 12 bytes per parameter that it owns."""
    groups = (group for one in parts_of(optimizer) for group in one.optimizer.param_groups)
    owned: int = sum(param.numel() for group in groups for param in group["params"])
    return owned * 3 * _FP32


def check_optimizer(optimizer: Any, cuts: int) -> None:
    """Whether its parts are those of `Shard.cuts`, and of kinds that are known.

    Raises:
        ConfigError: they are not.
    """
    parts = parts_of(optimizer)
    names = ", ".join(type(one).__name__ for one in parts)
    if len(parts) > cuts:
        allowed = "one optimizer, and with expert parallelism another one for the experts"
        raise ConfigError("optimizer", names, allowed, "Train without several optimizers.")
    if parts and len(parts) < cuts:
        allowed = "one for the experts, too, on each rank"
        raise ConfigError("optimizer", names, allowed, "Leave --expert-model-parallel-size out, or lastgasp.")
    for number, one in enumerate(parts):
        if any(group.get("is_expert_parallel", number > 0) != (number > 0) for group in one.optimizer.param_groups):
            allowed = "one for all but the experts, and behind it one for these"
            raise ConfigError("optimizer", names, allowed, "Train without several optimizers.")
        if not hasattr(one, "gbuf_ranges") and type(one).__name__ not in _KNOWN:
            raise ConfigError("optimizer", type(one).__name__, f"DistributedOptimizer or one of {_KNOWN}", "Use Adam.")


_KNOWN = ("Float16OptimizerWithFloat16Params", "FP32Optimizer")


def _device(chunks: list[Any]) -> torch.device:
    first = next((param for chunk in chunks for param in chunk.parameters()), None)
    return first.device if first is not None else torch.device("cpu")
