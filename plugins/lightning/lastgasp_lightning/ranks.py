"""Strategy and ranks, and how they reach the controller."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lastgasp.adapter import ConfigError, Contact, Place, contact_of, data_parallel, place_in_job
from lastgasp.adapter.torch import from_rank_0


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
        remedy = "Use strategy='ddp', or take LastGasp out of the callbacks."
        raise ConfigError("strategy", value, "'ddp' or a single device", remedy)
    if plain and strategy._model_averaging_period is not None:
        raise ConfigError(
            "model_averaging_period", strategy._model_averaging_period, "None", "Its ranks hold different weights."
        )


def place_of(trainer: Any) -> Place:
    """Rank, size, attempt and job; the job's name comes from the launcher or from rank 0."""
    size: int = trainer.world_size
    return place_in_job(trainer.global_rank, size, data_parallel(size), from_rank_0)


def connect(trainer: Any, place: Place) -> Contact | None:
    """The launcher's controller, or one that rank 0 starts; none for a job of one rank.

    Raises:
        ConfigError: the job spans several nodes, and where the controller may listen is not configured.
        ControlError, DeadlineExceeded: it could not be started.
    """
    nodes = trainer.num_nodes
    return contact_of(place, f"this job spans {nodes} nodes" if nodes > 1 else "", from_rank_0)


def versions() -> dict[str, str]:
    """What this worker runs, for the table of `lastgasp ps`."""
    return {"lightning": lightning.__version__, "torch": torch.__version__}
