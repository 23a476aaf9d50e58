"""The table of rules: each has an id, a severity, a source, and the function that checks it.

A rule yields its matches: where, what is wrong, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from .model import Job
from .tree import Node

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Match:
    """One violation: the node, what is wrong, and the fix."""

    node: Node
    what: str
    fix: str


Look = Callable[[Job], Iterator[Match]]


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        id: in findings and in the documentation.
        severity: an error is refused by the cluster, or has another effect than it seems; a warning may be intended.
        source: section of docs/facts/job_yaml.md; `YAML` for what Kubernetes' parser refuses, `CRD` for the schema of
            AscendJob, `operator` and `volcano` for the sources of those two (mind-cluster, commit 22bb3d98), `lastgasp`
            for what lastgasp itself needs.
        title: one line.
        look: finds violations; None for rules that are checked while the file is read.
    """

    id: str
    severity: Severity
    source: str
    title: str
    look: Look | None = None


RULES: dict[str, Rule] = {}


def rule(id: str, severity: Severity, source: str, title: str) -> Callable[[Look], Look]:
    """Register the function that checks it."""

    def register(look: Look) -> Look:
        assert id not in RULES
        RULES[id] = Rule(id, severity, source, title, look)
        return look

    return register


def reading_rule(id: str, severity: Severity, title: str) -> None:
    """Register a rule that is checked while the file is read."""
    RULES[id] = Rule(id, severity, "YAML", title)


reading_rule("yaml-syntax", "error", "The file is not YAML")
reading_rule("yaml-not-mapping", "error", "A document is not a map")
reading_rule("other-kind", "warning", "A document runs training and is not an AscendJob")
