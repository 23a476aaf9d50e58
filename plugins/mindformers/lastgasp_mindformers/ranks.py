"""The ranks of this job, and how they reach the controller."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lastgasp.adapter import (
    ConfigError,
    Contact,
    Place,
    RankZero,
    ReplicaGroups,
    contact_of,
    data_parallel,
    place_in_job,
)

_LOOPBACK = ("127.", "localhost", "::1")


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks: from MindSpore once communication is up, before that from msrun.

    Raises:
        ConfigError: the environment holds no number.
    """
    management = sys.modules.get("mindspore.communication.management")
    if management is not None and management.GlobalComm.INITED:
        return int(management.get_rank()), int(management.get_group_size())
    size = _number(("MS_WORKER_NUM", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE"), 1)
    rank = _number(("RANK_ID", "MS_NODE_ID", "OMPI_COMM_WORLD_RANK"), 0 if size == 1 else None)
    return rank, size


def place_of(replicas: ReplicaGroups | None = None) -> Place:
    """Rank, size, attempt and job; the job's name comes from the launcher or from rank 0.

    Args:
        replicas: who holds which shard; None where each rank holds everything.

    Raises:
        ConfigError: the rank is not known, or rank 0 does not answer.
    """
    rank, size = rank_and_size()
    return place_in_job(rank, size, replicas or data_parallel(size), _from_rank_0(rank, size))


def dated(place: Place, started_s: int | None) -> Place:
    """The place with when the job began. msrun's launchers do not agree on it; the controller of all attempts knows.

    Args:
        started_s: when the controller started, unix seconds; None without one.
    """
    if place.since_ns or started_s is None or place.job == os.environ.get("MINDX_TASK_ID"):
        return place
    return replace(place, since_ns=started_s * 1_000_000_000)


def connect(place: Place) -> Contact | None:
    """The launcher's controller, or one that rank 0 starts; none for a job of one rank.

    Raises:
        ConfigError: rank 0 is on another node, and where the controller is is not configured.
        ControlError, DeadlineExceeded: it could not be started.
    """
    return contact_of(place, _several_nodes(), _from_rank_0(place.rank, place.world_size))


def device() -> str:
    """MindSpore's device in its own notation: CPU, Ascend:3."""
    context = sys.modules.get("mindspore.context")
    if context is None:
        return ""
    target = str(context.get_context("device_target"))
    return target if target == "CPU" else f"{target}:{context.get_context('device_id')}"


def versions() -> dict[str, str]:
    """What this worker runs, for the table of `lastgasp ps`."""
    names = [name for name in ("mindformers", "mindspore") if name in sys.modules]
    return {name: _version(name) for name in names}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get(name), "__version__", "unknown"))


def _number(names: tuple[str, ...], default: int | None) -> int:
    given = {name: os.environ[name] for name in names if os.environ.get(name)}
    for name, value in given.items():
        if not value.isdigit():
            raise ConfigError(name, value, "a number", "Fix the launcher's environment.")
        return int(value)
    if default is None:
        remedy = "Start the job with `lastgasp run --framework mindspore`, or call mindspore.communication.init()."
        raise ConfigError(names[0], None, "the number of this rank", remedy)
    return default


def _several_nodes() -> str:
    """Why the controller must be reached from other nodes; empty as far as this node knows."""
    host = os.environ.get("MS_SCHED_HOST", "127.0.0.1")
    local = int(os.environ.get("MS_LOCAL_WORKER") or 0)
    size = int(os.environ.get("MS_WORKER_NUM") or 1)
    if host.startswith(_LOOPBACK) or not local or local >= size:
        return ""
    return f"this job has {size} ranks, {local} of them on this node"


@functools.cache
def _from_rank_0(rank: int, size: int) -> Any:
    """One gather for the entire process: its calls are numbered."""
    env = os.environ
    key = f"{env.get('MS_SCHED_HOST', '')}:{env['MS_SCHED_PORT']}" if env.get("MS_SCHED_PORT") else ""
    key = key or env.get("RANK_TABLE_FILE", "") or env.get("OMPI_MCA_ess_base_jobid", "")
    needed = size > 1 and not (env.get("LASTGASP_JOB") and env.get("LASTGASP_CONTROLLER"))
    if not needed:
        return lambda value: value
    if not key:
        allowed = "host:port of the controller, because no scheduler (MS_SCHED_HOST, MS_SCHED_PORT) is told"
        remedy = "Start the job with `lastgasp run --framework mindspore` or with msrun."
        raise ConfigError("LASTGASP_CONTROLLER", env.get("LASTGASP_CONTROLLER"), allowed, remedy)
    return RankZero(key, rank, size)
