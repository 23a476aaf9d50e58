"""Lets an accelerator finish what was queued, before process groups are dropped; what cannot be finished is aborted."""

from __future__ import annotations

import os
from typing import Any

import torch

from lastgasp import _clock
from lastgasp.pytorch.aborting import abort_groups, failure

DRAIN = 2.0
"""Seconds that the work queued on an accelerator gets to end before the process groups are dropped."""


def drain() -> None:
    """Let queued work end before its process groups are aborted: an abort during transfers can cost the whole node.

    It is not waited for where NCCL has failed, since it would never end. Run with one GPU, whose ranks talk over
    sockets; no machine with several was at hand.
    """
    try:
        kind = torch.accelerator.current_accelerator()
    except RuntimeError:  # torch 2.6, where there is none
        return
    module: Any = torch.get_device_module(kind) if kind is not None else None
    begun = getattr(module, "is_initialized", None)
    if begun is None or not begun():
        return
    deadline, done = _clock.monotonic() + DRAIN, module.Event()
    done.record(module.current_stream())
    while not done.query() and _clock.monotonic() < deadline and not failure():
        os.sched_yield()
    abort_groups()
