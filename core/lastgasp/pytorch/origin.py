"""What an exception that ended training says about its origin."""

from __future__ import annotations

import re

import torch.distributed

from lastgasp.events import FaultKind

# How collectives fail when another rank is gone: gloo (facts/lightning.md, megatron.md §3), NCCL, HCCL, and the store.
_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Timed out waiting|gloo/transport|NCCL|HCCL"
    r"|Socket closed|recvValue failed|Broken pipe|DistNetworkError|DistStoreError"
)


def kind_of(exception: BaseException) -> FaultKind:
    """exit and interrupt by type; peer where a collective says that another rank is gone."""
    if isinstance(exception, SystemExit):
        return "exit"
    if isinstance(exception, KeyboardInterrupt):
        return "interrupt"
    if isinstance(exception, torch.distributed.DistError):
        return "peer"
    if isinstance(exception, RuntimeError) and _PEER.search(str(exception)):
        return "peer"
    return "exception"


def cause_of(exception: BaseException) -> str:
    """One line: type and the first line of the text."""
    text = str(exception).strip().splitlines()
    return f"{type(exception).__name__}: {text[0][:300]}" if text else type(exception).__name__
