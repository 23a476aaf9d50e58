"""Who is who: strategy, ranks, and how they reach the controller."""

from __future__ import annotations

import os
import uuid
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lastgasp.errors import ConfigError
from lastgasp.gasp.serve import start_detached
from lastgasp.session import Contact
from lastgasp.topology import Place, data_parallel

_LOOPBACK = "127.0.0.1"


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
    env = os.environ
    size: int = trainer.world_size
    job = env.get("LASTGASP_JOB") or env.get("TORCHELASTIC_RUN_ID")
    if not job:
        job = uuid.uuid4().hex[:12]
        job = trainer.strategy.broadcast(job) if size > 1 else job
    attempt = int(env.get("LASTGASP_ATTEMPT") or env.get("TORCHELASTIC_RESTART_COUNT") or 0)
    return Place(
        rank=trainer.global_rank, world_size=size, replicas=data_parallel(size), attempt=attempt, job=str(job)
    )


def connect(trainer: Any, place: Place) -> Contact | None:
    """The launcher's controller, or one of our own that rank 0 starts; none for a job of one rank.

    Raises:
        ConfigError: the job spans several nodes and nobody said where the controller may listen.
        ControlError, DeadlineExceeded: it could not be started.
    """
    contact = Contact.from_environment()
    if contact is not None or place.world_size == 1:
        return contact
    bind = os.environ.get("LASTGASP_BIND")
    if trainer.num_nodes > 1 and not bind:
        raise ConfigError(
            "LASTGASP_BIND",
            bind,
            f"the address of node 0, because this job spans {trainer.num_nodes} nodes",
            "Set it on every node to node 0's address on the training network; loopback cannot be reached.",
        )
    found = start_detached(bind or _LOOPBACK) if place.rank == 0 else None
    end = trainer.strategy.broadcast((found.address, found.token) if found is not None else None)
    return Contact(*end)


def versions() -> dict[str, str]:
    """What this worker runs, for the job's table of workers."""
    return {"lightning": lightning.__version__, "torch": torch.__version__}
