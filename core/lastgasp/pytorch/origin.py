"""What an exception that ended training says about its origin."""

from __future__ import annotations

import re

import torch.distributed

from lastgasp.events import FaultKind
from lastgasp.origin import cause_of, kind_by

__all__ = ["cause_of", "kind_of"]

# How collectives fail when another rank is gone: gloo (facts/lightning.md, megatron.md §3), NCCL, HCCL, and the store.
_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Timed out waiting|gloo/transport|NCCL|HCCL"
    r"|Socket closed|recvValue failed|Broken pipe|DistNetworkError|DistStoreError"
)


def kind_of(exception: BaseException) -> FaultKind:
    """exit and interrupt by type; peer where a collective says that another rank is gone."""
    return kind_by(exception, _is_peer)


def _is_peer(exception: BaseException) -> bool:
    said = isinstance(exception, RuntimeError) and _PEER.search(str(exception)) is not None
    return said or isinstance(exception, torch.distributed.DistError)
