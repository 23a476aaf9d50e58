"""What an exception that ended training says about its origin."""

from __future__ import annotations

import re

from lastgasp.adapter import FaultKind, Verdict, cause_of, checkpoint, is_success, kind_by

__all__ = ["cause_of", "is_about_content", "is_success", "is_to_be_repeated", "kind_of", "verdict_of"]

# On CPU a collective whose peer is gone never returns (observed with mindspore 2.9.0); these come from other parts of
# MindSpore's cluster, and from HCCL on Ascend.
_PEER = re.compile(r"HCCL|EI0006|Communication.*(timeout|disconnect)|heartbeat|Connection (reset|closed) by peer")


_MEMORY = re.compile(r"out of memory|memory (is )?not enough|[Aa]lloc\w* .*(failed|memory)", re.IGNORECASE)


def is_about_content(error: BaseException) -> bool:
    """Whether an error of loading is about the checkpoint, and not caused by memory, a device or a peer."""
    said = str(error)
    return checkpoint.is_about_content(error) and not _MEMORY.search(said) and not _PEER.search(said)


_VERDICTS = {
    # `check_for_nan_in_loss_and_grad`, after an update that spoilt the weights
    re.compile(r"terminate training$"): "MindFormers found NaN or inf",
    # mindspore.train.LossMonitor
    re.compile(r"loss is NAN or INF, .*terminating training$"): "MindSpore's LossMonitor found NaN or inf",
    # `use_skip_data_by_global_norm`
    re.compile(r"consecutive times greater than threshold .*stop training$"): "MindFormers found too large gradients",
}


def verdict_of(error: BaseException) -> Verdict | None:
    """What MindFormers and MindSpore say when they end a training for good; None for all other errors."""
    said = str(error).rstrip(". \n") if isinstance(error, ValueError) else ""
    found = next((what for pattern, what in _VERDICTS.items() if pattern.search(said)), None)
    return None if found is None else Verdict(1, f"{found} and ends the training ({cause_of(error)})")


def is_to_be_repeated(error: BaseException) -> bool:
    """Whether MindFormers (`check_for_global_norm`) rejects the step that has just ended, and wants it done again.

    It goes on behind that step where its gradients are as large in another attempt: a restart repeats nothing forever.
    """
    return isinstance(error, RuntimeError) and str(error).startswith("TREError")


def kind_of(error: BaseException) -> FaultKind:
    """exit and interrupt by type; peer where another rank is gone."""
    return kind_by(error, lambda one: isinstance(one, RuntimeError) and _PEER.search(str(one)) is not None)
