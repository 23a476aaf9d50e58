"""Strategy and ranks, and how they reach the controller."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from lastgasp.adapter import ConfigError, Contact, Place, contact_of, data_parallel, place_in_job
from lastgasp.adapter.torch import from_rank_0
from lastgasp_lightning.compat import WeightAveraging
from lastgasp_lightning.fsdp import is_fsdp, require_known


def require_same_lightning(trainer: Any) -> None:
    """Lightning is published under two names, whose classes are not the same.

    Raises:
        ConfigError: the trainer is not of the one that this plugin is for.
    """
    if isinstance(trainer, Trainer):
        return
    theirs = next(cls.__module__ for cls in type(trainer).__mro__ if cls.__name__ == "Trainer").split(".")[0]
    raise ConfigError("trainer", f"a Trainer of {theirs}", f"one of {Trainer.__module__.rpartition('.trainer.')[0]}",
                      f"Write `from lastgasp_{theirs} import LastGasp`.")  # fmt: skip


def require_supported(trainer: Any) -> None:
    """Refuse strategies whose state this version cannot save from the survivors alone.

    Raises:
        ConfigError: names the strategy and what is supported.
    """
    strategy = trainer.strategy
    plain = type(strategy) is DDPStrategy and strategy._start_method == "popen"
    if is_sharded_by(strategy):
        _require_parts(trainer)
    elif not plain and type(strategy) is not SingleDeviceStrategy:
        name = type(strategy).__name__
        started = getattr(strategy, "_start_method", "popen")
        value = name if started == "popen" else f"{name} with start method {started}"
        remedy = "Use strategy='ddp', or take LastGasp out of the callbacks."
        raise ConfigError(
            "strategy", value, "'ddp', ModelParallelStrategy, FSDPStrategy or a single device", remedy
        )
    if plain and strategy._model_averaging_period is not None:
        raise ConfigError(
            "model_averaging_period", strategy._model_averaging_period, "None", "Its ranks hold different weights."
        )


def require_supported_optimizers(trainer: Any) -> None:
    """The same for optimizers, once they are there.

    Raises:
        ConfigError: names the optimizer and what is supported.
    """
    for optimizer in trainer.optimizers:
        if hasattr(optimizer, "consolidate_state_dict"):
            remedy = (
                "Use a plain optimizer, or ModelParallelStrategy with fully_shard in configure_model() "
                "(docs/sharded.md), or take LastGasp out of the callbacks."
            )
            raise ConfigError("optimizer", type(optimizer).__name__, "one that each rank holds completely", remedy)


def is_sharded_by(strategy: Any) -> bool:
    """Whether each rank holds a part of the state."""
    return type(strategy) is ModelParallelStrategy or is_fsdp(strategy)


def _require_parts(trainer: Any) -> None:
    strategy, name = trainer.strategy, type(trainer.strategy).__name__
    if is_fsdp(strategy):
        require_known(strategy)
    elif not strategy._save_distributed_checkpoint:
        raise ConfigError("save_distributed_checkpoint", False, "True", "Each rank saves its part then, as after a "
                          "fault: a rank that is alone cannot gather the whole.")  # fmt: skip
    if any(isinstance(callback, WeightAveraging) for callback in trainer.callbacks):
        raise ConfigError("callbacks", "WeightAveraging", f"none of it with {name}", "Lightning does not "
                          "shard averaged models. Leave it out, or take LastGasp out of the callbacks.")  # fmt: skip


def place_of(trainer: Any) -> Place:
    """Rank, size, attempt and job; the job's name comes from the launcher or from rank 0."""
    size: int = trainer.world_size
    alone = tuple((rank,) for rank in range(size))  # the model is not sharded yet, so nobody knows more
    replicas = alone if is_sharded_by(trainer.strategy) else data_parallel(size)
    return place_in_job(trainer.global_rank, size, replicas, from_rank_0)


def connect(trainer: Any, place: Place) -> Contact | None:
    """The launcher's controller, or one that rank 0 starts; none for a job of one rank.

    Raises:
        ConfigError: the job spans several nodes, and where the controller may listen is not configured.
        ControlError, DeadlineExceeded: it could not be started.
    """
    return connect_nodes(trainer.num_nodes, place)


def connect_nodes(nodes: int, place: Place) -> Contact | None:
    """As `connect`."""
    return contact_of(place, f"this job spans {nodes} nodes" if nodes > 1 else "", from_rank_0)


def versions() -> dict[str, str]:
    """What this worker runs, for the table of `lastgasp ps`."""
    return {"lightning": lightning.__version__, "torch": torch.__version__}
