"""Which rank holds which shard of a MindSpore job, and what a lost rank costs."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import mindspore

from lastgasp.backends import Choice, choose_backend
from lastgasp.topology import ReplicaGroups, data_parallel

_WHOLE = ("stand_alone", "data_parallel")
"""Parallel modes in which each rank holds everything."""


def parallel_setting(name: str) -> Any:
    """One setting of MindSpore's auto-parallel context."""
    return mindspore.get_auto_parallel_context(name)


def replicas_of(world_size: int) -> ReplicaGroups:
    """The holders of each shard.

    Plain data parallel is one shard that all ranks hold. In the other modes the layout is known only once the graph
    is compiled, later than the ranks must agree: there each rank is the only holder of its own shard.
    """
    if is_whole():
        return data_parallel(world_size)
    return tuple((rank,) for rank in range(world_size))


def is_whole() -> bool:
    """Each rank holds the whole state."""
    return parallel_setting("parallel_mode") in _WHOLE and not parallel_setting("enable_parallel_optimizer")


def advice(world_size: int) -> str:
    """What would keep a lost rank's shard; empty where nothing is needed."""
    if world_size == 1 or is_whole():
        return ""
    mode = parallel_setting("parallel_mode")
    return (
        f"parallel_mode {mode}: each rank holds its own shard, so a rank that is killed takes its shard with it, and "
        "the job goes back to its newest periodic checkpoint; after an exception or SIGTERM no step is lost. "
        "Save periodically, or train with parallel_mode data_parallel where the model fits on one device."
    )


def left_to_mindspore() -> bool:
    """MindSpore's own TrainFaultTolerance saves after a fault: `MS_ENABLE_TFT` with one of its features, on Ascend."""
    wanted = os.environ.get("MS_ENABLE_TFT", "")
    return mindspore.get_context("device_target") == "Ascend" and any(name in wanted for name in _TFT)


_TFT = ("TTP:1", "UCE:1", "ARF:1", "HCCE:1")


def embedded_backend() -> Choice:
    """The embedded engine, unless the user insists on another (`LASTGASP_BACKEND`).

    In a MindSpore job MindIO is driven by MindSpore's own TrainFaultTolerance (facts/mindformers.md §3), which starts
    its controller and registers its handlers; a second one in the same process would take them away.
    """
    choice = choose_backend()
    insists = choice.wanted == "ascend" and not left_to_mindspore()
    return choice if insists else replace(choice, backend="embedded")
