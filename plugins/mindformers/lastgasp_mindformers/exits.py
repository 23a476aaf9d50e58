"""What an exception that ended training says about its origin."""

from __future__ import annotations

import re

from lastgasp.events import FaultKind

# On CPU a collective whose peer is gone never returns (observed with mindspore 2.9.0); these come from other parts of
# MindSpore's cluster, and from HCCL on Ascend.
_PEER = re.compile(r"HCCL|EI0006|Communication.*(timeout|disconnect)|heartbeat|Connection (reset|closed) by peer")


def kind_of(error: BaseException) -> FaultKind:
    """exit and interrupt by type; peer where another rank is gone."""
    if isinstance(error, SystemExit):
        return "exit"
    if isinstance(error, KeyboardInterrupt):
        return "interrupt"
    if isinstance(error, RuntimeError) and _PEER.search(str(error)):
        return "peer"
    return "exception"


def cause_of(error: BaseException) -> str:
    """One line: type and the first line of the text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def is_success(error: BaseException) -> bool:
    """Whether it is an exit with code 0."""
    return isinstance(error, SystemExit) and error.code in (None, 0)
