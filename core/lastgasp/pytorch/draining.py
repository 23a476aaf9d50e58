"""Lets an accelerator finish what was queued, before process groups are dropped."""

from __future__ import annotations

import os
from typing import Any

import torch

from lastgasp import _clock

DRAIN = 5.0
"""Seconds that the work queued on an accelerator gets to end before the process groups are dropped."""


def drain() -> None:
    """Let queued work end before its process groups are aborted: an abort during transfers can cost the whole node.

    Not tested: no machine with several accelerators was at hand.
    """
    cuda: Any = torch.cuda  # its calls are not annotated
    if not cuda.is_initialized():
        return
    deadline, done = _clock.monotonic() + DRAIN, cuda.Event()
    done.record()
    while not done.query() and _clock.monotonic() < deadline:
        os.sched_yield()
