"""Which rank holds which shard of a MindSpore job, and what a lost rank costs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import mindspore

from lastgasp.adapter import BackendChoice, ReplicaGroups, choose_backend, data_parallel


def parallel_setting(name: str) -> Any:
    """One setting of MindSpore's auto-parallel context."""
    return mindspore.get_auto_parallel_context(name)


def replicas_of(world_size: int) -> ReplicaGroups:
    """The ranks that should hold the same, until their digests are compared.

    In data parallel that is one shard that all ranks hold. In semi-automatic and automatic parallel the layout is known
    only once the graph is compiled, later than the ranks must agree; and with MindSpore's default, stand_alone, nobody
    but the user's own code makes ranks hold the same. There each rank is the only holder of what it holds.
    """
    if is_whole():
        return data_parallel(world_size)
    return tuple((rank,) for rank in range(world_size))


def is_whole() -> bool:
    """Each rank holds the whole state, and all hold the same."""
    return parallel_setting("parallel_mode") == "data_parallel" and not parallel_setting("enable_parallel_optimizer")


def is_sharded() -> bool:
    """Each rank holds a part of one training, as far as MindSpore says."""
    return not is_whole() and parallel_setting("parallel_mode") != "stand_alone"


def is_broadcast() -> bool:
    """Ranks may begin with different parameters: MindSpore sends those of rank 0 to all in the first step."""
    return bool(parallel_setting("parameter_broadcast"))


def protection(world_size: int, arenas: bool = False) -> str:
    """What can be saved after a fault, and what cannot; one line. `arenas`: steps are copied into them."""
    if world_size == 1:
        return (
            "one process: after an exception or SIGTERM no step is lost; one that is killed goes back to its newest "
            "periodic checkpoint"
        )
    mode = parallel_setting("parallel_mode")
    if is_whole():
        return (
            f"parallel_mode {mode}: every rank holds everything, so that a rank that is killed or raises costs no step"
        )
    sharded = "enable_parallel_optimizer" if mode == "data_parallel" else f"parallel_mode {mode}"
    if arenas:
        return (
            f"{sharded}: each rank holds its own shard. No step is lost after an exception or SIGTERM, each rank "
            "writes its own. A rank that is killed leaves its shard in memory, from which another one writes it: that "
            "costs the steps since the last copy. All ranks together, or a host, cost those since the newest checkpoint"
        )
    what = "trains a model of its own as far as MindSpore says" if mode == "stand_alone" else "holds its own shard"
    return (
        f"{sharded}: each rank {what}. SAVED: no step is lost after an exception or SIGTERM, each rank writes its own. "
        "NOT SAVED: a rank that is killed takes what it holds with it, and the job goes back to its newest periodic "
        "checkpoint. Save periodically, or set parallel_mode data_parallel where the model fits on one device and its "
        "gradients are reduced over all ranks"
    )


def advice(world_size: int, arenas: bool = False) -> str:
    """`protection` where a rank that is killed costs steps; else empty."""
    return "" if world_size == 1 or is_whole() or arenas else protection(world_size)


def left_to_mindspore() -> bool:
    """MindSpore's own TrainFaultTolerance saves after a fault: `MS_ENABLE_TFT` with one of its features, on Ascend."""
    wanted = os.environ.get("MS_ENABLE_TFT", "")
    return mindspore.get_context("device_target") == "Ascend" and any(name in wanted for name in _TFT)


_TFT = ("TTP:1", "UCE:1", "ARF:1", "HCCE:1")


def embedded_backend() -> BackendChoice:
    """The embedded engine, unless the user insists on another (`LASTGASP_BACKEND`).

    In a MindSpore job MindIO is driven by MindSpore's own TrainFaultTolerance (mindformers.md §3), which starts
    its controller and registers its handlers; a second one in the same process would take them away.
    """
    choice = choose_backend()
    insists = choice.wanted == "ascend" and not left_to_mindspore()
    return choice if insists else replace(choice, backend="embedded")
