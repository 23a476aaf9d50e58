"""The table of traps: each has an id, a weight, the fact behind it, and the function that looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from .machine import Machine, under_run

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Hit:
    """What is wrong, and what to do; a weight where it is not the trap's own."""

    what: str
    fix: str
    severity: Severity | None = None


Look = Callable[[Machine], Iterator[Hit]]


@dataclass(frozen=True)
class Trap:
    """One trap.

    Attributes:
        id: in findings and in the documentation.
        severity: with an error the job does not start, does not recover, or loses data; a warning costs less.
        source: where the fact stands, a page of docs/facts (or how-it-works.md) with its section.
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
    """Every trap that this machine has, errors first.

    What `lastgasp run` sets right by itself is a warning, and its fix says so. A trap that cannot be looked at is one
    as well.
    """
    from . import mindcluster, network, software, storage, tls  # they fill the table

    assert all((mindcluster, network, software, storage, tls))
    found = _findings(machine)
    stays = {one.trap for one in _findings(under_run(machine)) if one.severity == "error"}
    found = [one if one.severity == "warning" or one.trap in stays else _done_by_run(one) for one in found]
    return sorted(found, key=lambda one: (one.severity, one.trap))


def _findings(machine: Machine) -> list[Finding]:
    return [finding for one in TRAPS.values() for finding in _looked(one, machine)]


def _looked(one: Trap, machine: Machine) -> Iterator[Finding]:
    try:
        for hit in one.look(machine):
            weight = hit.severity or one.severity
            yield Finding(one.id, weight, one.source, printable(hit.what), printable(hit.fix))
    except OSError as error:
        what = printable(f"could not be looked at: {error}")
        yield Finding(one.id, "warning", one.source, what, "Run doctor with the rights of the job's user.")


def _done_by_run(one: Finding) -> Finding:
    fix = f"Start the job with lastgasp run, which does it by itself. Else: {one.fix}"
    return msgspec.structs.replace(one, severity="warning", fix=fix)


def printable(text: str) -> str:
    """The same text; what UTF-8 cannot carry, as in a path's odd bytes, is escaped."""
    return text.encode(errors="backslashreplace").decode()
