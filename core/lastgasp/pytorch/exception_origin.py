"""What an exception that ended training says about its origin."""

from __future__ import annotations

import re

import torch.distributed

from lastgasp.checkpoint import trial
from lastgasp.events import FaultKind
from lastgasp.exception_origin import cause_of, kind_by

__all__ = ["cause_of", "is_about_content", "kind_of"]

# How collectives fail when another rank is gone: gloo (lightning.md, megatron.md §3), NCCL, HCCL, and the store.
_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Timed out waiting|gloo/transport|NCCL|HCCL"
    r"|Socket closed|recvValue failed|Broken pipe|DistNetworkError|DistStoreError"
)

_MEMORY = re.compile(r"out of memory|can't allocate memory", re.IGNORECASE)
# Newer versions of torch have a class for what goes wrong on a device.
_DEVICE = tuple(getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name))


def kind_of(exception: BaseException) -> FaultKind:
    """exit and interrupt by type; peer where a collective says that another rank is gone."""
    return kind_by(exception, _is_peer)


def is_about_content(error: BaseException) -> bool:
    """Whether an error of loading is about the checkpoint, and not caused by memory, a device or a peer."""
    if isinstance(error, _DEVICE) or _MEMORY.search(str(error)) is not None or _is_peer(error):
        return False
    return trial.is_about_content(error)


def _is_peer(exception: BaseException) -> bool:
    said = isinstance(exception, RuntimeError) and _PEER.search(str(exception)) is not None
    return said or isinstance(exception, torch.distributed.DistError)
