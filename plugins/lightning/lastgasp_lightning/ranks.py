"""Strategy and ranks, and how they reach the controller."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lastgasp.adapter import ConfigError, Contact, FromRank0, Place, contact_of, data_parallel, place_in_job


def require_supported(trainer: Any) -> None:
    """Refuse strategies whose state this version cannot save from the survivors alone.

    Raises:
        ConfigError: names the strategy and what is supported.
    """
    strategy = trainer.strategy
    plain = type(strategy) is DDPStrategy and strategy._start_method == "popen"
    if not plain and type(strategy) is not SingleDeviceStrategy:
        name = type(strategy).__name__
        started = getattr(strategy, "_start_method", "popen")
        value = name if started == "popen" else f"{name} with start method {started}"
        raise ConfigError(
            "strategy",
            value,
            "'ddp' or a single device",
            "Use strategy='ddp', or take LastGasp out of the callbacks.",
        )
    if plain and strategy._model_averaging_period is not None:
        raise ConfigError(
            "model_averaging_period", strategy._model_averaging_period, "None", "Its ranks hold different weights."
        )


def place_of(trainer: Any) -> Place:
    """Rank, size, attempt and job; the job's name comes from the launcher or from rank 0."""
    size: int = trainer.world_size
    return place_in_job(trainer.global_rank, size, data_parallel(size), _from_rank_0(trainer))


def connect(trainer: Any, place: Place) -> Contact | None:
    """The launcher's controller, or one that rank 0 starts; none for a job of one rank.

    Raises:
        ConfigError: the job spans several nodes, and where the controller may listen is not configured.
        ControlError, DeadlineExceeded: it could not be started.
    """
    nodes = trainer.num_nodes
    return contact_of(place, f"this job spans {nodes} nodes" if nodes > 1 else "", _from_rank_0(trainer))


def _from_rank_0(trainer: Any) -> FromRank0:
    def broadcast(value: Any) -> Any:
        return trainer.strategy.broadcast(value) if trainer.world_size > 1 else value

    return broadcast


def versions() -> dict[str, str]:
    """What this worker runs, for the table of `lastgasp ps`."""
    return {"lightning": lightning.__version__, "torch": torch.__version__}
