"""What an exception that ended training says about its origin."""

from __future__ import annotations

import re

import torch.distributed
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lastgasp.events import FaultKind

# How collectives fail when another rank is gone: gloo (facts/lightning.md), NCCL, HCCL, and the store.
_PEER = re.compile(
    r"Connection closed by peer|Connection reset by peer|Timed out waiting|gloo/transport|NCCL|HCCL"
    r"|Socket closed|recvValue failed|Broken pipe|DistNetworkError|DistStoreError"
)


def kind_of(exception: BaseException) -> FaultKind:
    """exit, interrupt and sigterm by type; peer where a collective says that another rank is gone."""
    if isinstance(exception, SIGTERMException):
        return "sigterm"
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
