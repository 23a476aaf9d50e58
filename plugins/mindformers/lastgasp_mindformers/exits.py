"""What an exception that ended training says about its origin."""

from __future__ import annotations

import re

from lastgasp.adapter import FaultKind, Verdict, cause_of, checkpoint, is_success, kind_by

__all__ = ["cause_of", "is_about_content", "is_success", "kind_of", "verdict_of"]

# On CPU a collective whose peer is gone never returns (observed with mindspore 2.9.0); these come from other parts of
# MindSpore's cluster, and from HCCL on Ascend.
_PEER = re.compile(r"HCCL|EI0006|Communication.*(timeout|disconnect)|heartbeat|Connection (reset|closed) by peer")


_MEMORY = re.compile(r"out of memory|memory (is )?not enough|[Aa]lloc\w* .*(failed|memory)", re.IGNORECASE)


def is_about_content(error: BaseException) -> bool:
    """Whether an error of loading is about the checkpoint, and not caused by memory, a device or a peer."""
    said = str(error)
    return checkpoint.is_about_content(error) and not _MEMORY.search(said) and not _PEER.search(said)


def verdict_of(error: BaseException) -> Verdict | None:
    """What MindFormers' `check_for_nan_in_loss_and_grad` says after an update that spoilt the weights; else None."""
    if not isinstance(error, ValueError) or not str(error).rstrip(". \n").endswith("terminate training"):
        return None
    return Verdict(1, f"MindFormers found NaN or inf and ends the training ({cause_of(error)})")


def kind_of(error: BaseException) -> FaultKind:
    """exit and interrupt by type; peer where another rank is gone."""
    return kind_by(error, lambda one: isinstance(one, RuntimeError) and _PEER.search(str(one)) is not None)
