"""What MindIO may do after a fault, as far as the adapter can: decided once, with a reason for each refusal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLES = ("HIGH_AVAILABILITY", "HIGH_AVAILABILITY_STRATEGY")
"""What MindCluster's operator, or a user, sets: a comma list."""
_NAMES = {"elastic": "elastic-training", "zit": "elastic-training", "arf": "recover", "uce": "retry"}


@dataclass(frozen=True)
class Strategies:
    """What is granted; `refused` holds strategy -> why, for what was asked for and is not.

    Args:
        retry: on-chip memory and network faults are repaired in place (UCE, HCCE).
        recover: one process is started anew and rejoins (ARF).
        elastic: the job continues with fewer ranks (ZIT).
        told: MindIO was told that single processes may be started anew, or be missing, before it was known whether
            they may: it then orders ranks to stop that can do neither, and gives up where one does not.
    """

    retry: bool
    recover: bool
    elastic: bool
    refused: Mapping[str, str]
    told: bool = False

    @property
    def any_in_place(self) -> bool:
        """After some fault processes stay, and go on."""
        return self.retry or self.recover or self.elastic

    @property
    def more(self) -> bool:
        """MindIO may order more than a retry: what fails in the middle of that is dumped, where all have stopped."""
        return self.recover or self.elastic or self.told


NOT_FEWER = "this adapter cannot continue with fewer ranks"
CANNOT = "this adapter cannot roll a step back and continue in the same process"


def asked_for(env: Mapping[str, str] = os.environ) -> str:
    """The comma list, whichever variable has it; empty where none has."""
    return next((env[name] for name in VARIABLES if env.get(name)), "")


def nodes_of(env: Mapping[str, str] = os.environ) -> int:
    """How many nodes the job has."""
    return int(env.get("GROUP_WORLD_SIZE") or env.get("MS_NODE_NUM") or 1)


def wanted_strategies(env: Mapping[str, str]) -> set[str]:
    """Their names in today's words."""
    words = [word.strip().lower() for word in asked_for(env).split(",") if word.strip()]
    return {_NAMES.get(word, word) for word in words}


def decide_strategies(
    asked: str,
    why_not: str,
    taskd: bool,
    nodes: int,
    mindspore: bool,
    no_recover: str = "",
    no_fewer: str = NOT_FEWER,
) -> Strategies:
    """`dump` is always there.

    Args:
        asked: the comma list; empty asks for what the adapter can do without TaskD.
        why_not: why the training cannot continue in the same process (ports.InPlace); empty where it can.
        taskd: the controller lives in TaskD: without it MindIO never recovers or shrinks (mindio_tft.md §7.1).
        nodes: of the job; ARF needs two, since it ignores faults of the controller's own node (mindio_tft.md §16.13).
        no_recover: why a new process could not join the others; empty where it could.
        no_fewer: why the training could not continue with fewer ranks; empty where it could.
    """
    wanted = wanted_strategies({VARIABLES[0]: asked}) or (set() if why_not else {"retry"})
    refused: dict[str, str] = {}
    for name in ("retry", "recover", "elastic-training"):
        why = _why_not(name, why_not, taskd, nodes, mindspore)
        why = why or {"recover": no_recover, "elastic-training": no_fewer or no_recover}.get(name, "")
        if name in wanted and why:
            refused[name] = why
    for name in sorted(wanted - {"dump", "retry", "recover", "elastic-training"}):
        refused[name] = "there is no such strategy"
    granted = wanted - set(refused)
    return Strategies("retry" in granted, "recover" in granted, "elastic-training" in granted, refused)


def _why_not(name: str, why_not: str, taskd: bool, nodes: int, mindspore: bool) -> str:
    if why_not:
        return f"{why_not}: the job restarts from the dump"
    if name == "elastic-training" and mindspore:
        return "MindIO has none of it with MindSpore"
    if name == "recover" and not taskd:
        return "MindIO starts single processes anew only where TaskD asks for it (MINDX_TASK_ID)"
    if name == "elastic-training" and not taskd:
        return "MindIO goes on with fewer ranks only where TaskD asks for it (MINDX_TASK_ID)"
    if name in ("recover", "elastic-training") and nodes < 2:
        return "it needs two nodes at least"
    return ""
