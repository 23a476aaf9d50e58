"""What an exception that ended training says about its origin."""

from __future__ import annotations

import re

from lastgasp.events import FaultKind
from lastgasp.origin import cause_of, kind_by

__all__ = ["cause_of", "is_success", "kind_of"]

# On CPU a collective whose peer is gone never returns (observed with mindspore 2.9.0); these come from other parts of
# MindSpore's cluster, and from HCCL on Ascend.
_PEER = re.compile(r"HCCL|EI0006|Communication.*(timeout|disconnect)|heartbeat|Connection (reset|closed) by peer")


def kind_of(error: BaseException) -> FaultKind:
    """exit and interrupt by type; peer where another rank is gone."""
    return kind_by(error, lambda one: isinstance(one, RuntimeError) and _PEER.search(str(one)) is not None)


def is_success(error: BaseException) -> bool:
    """Whether it is an exit with code 0."""
    return isinstance(error, SystemExit) and error.code in (None, 0)
