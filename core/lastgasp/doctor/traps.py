"""The table of traps: each has an id, a weight, the fact behind it, and the function that looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from .machine import Machine

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Hit:
    """What is wrong, and what to do."""

    what: str
    fix: str


Look = Callable[[Machine], Iterator[Hit]]


@dataclass(frozen=True)
class Trap:
    """One trap.

    Attributes:
        id: in findings and in the documentation.
        severity: with an error the job does not start, does not recover, or loses data; a warning costs less.
        source: where the fact stands, a file of facts/ with its section.
        title: one line.
        look: yields what is wrong on a machine.
    """

    id: str
    severity: Severity
    source: str
    title: str
    look: Look


class Finding(msgspec.Struct, frozen=True):
    """A trap that this machine has."""

    trap: str
    severity: Severity
    source: str
    what: str
    fix: str


TRAPS: dict[str, Trap] = {}


def trap(id: str, severity: Severity, source: str, title: str) -> Callable[[Look], Look]:
    """Register the function that looks for it."""

    def register(look: Look) -> Look:
        assert id not in TRAPS
        TRAPS[id] = Trap(id, severity, source, title, look)
        return look

    return register


def examine(machine: Machine) -> list[Finding]:
    """Every trap that this machine has, errors first."""
    from . import mindcluster, network, software, storage, tls  # they fill the table

    assert all((mindcluster, network, software, storage, tls))
    found = [
        Finding(one.id, one.severity, one.source, hit.what, hit.fix)
        for one in TRAPS.values()
        for hit in one.look(machine)
    ]
    return sorted(found, key=lambda one: (one.severity, one.trap))
