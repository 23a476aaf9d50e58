"""The table of checks: each has an id, a severity, a source, and a function that inspects the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from .machine import Machine, under_run

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Match:
    """What is wrong and what to do; a severity if it differs from the check's."""

    what: str
    fix: str
    severity: Severity | None = None


Look = Callable[[Machine], Iterator[Match]]


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        id: used in the output and in the documentation.
        severity: with an error the job does not start, does not recover, or loses data; a warning is less severe.
        source: a page of docs/facts (or how-it-works.md) with the section that explains it.
        title: one line.
        look: yields the problems found on a machine.
    """

    id: str
    severity: Severity
    source: str
    title: str
    look: Look


class Diagnosis(msgspec.Struct, frozen=True):
    """A problem found on this machine."""

    check: str
    severity: Severity
    source: str
    what: str
    fix: str


_CHECKS: dict[str, Check] = {}


def check(id: str, severity: Severity, source: str, title: str) -> Callable[[Look], Look]:
    """Register the function that performs the check."""

    def register(look: Look) -> Look:
        assert id not in _CHECKS
        _CHECKS[id] = Check(id, severity, source, title, look)
        return look

    return register


def every_check() -> Mapping[str, Check]:
    """All checks by their ids."""
    from . import mindcluster, network, settings, software, storage, tls  # importing them fills the table

    assert all((mindcluster, network, settings, software, storage, tls))
    return _CHECKS


def examine(machine: Machine) -> list[Diagnosis]:
    """Run all checks; return the problems found, errors first.

    What `lastgasp run` corrects automatically is a warning, and its fix says so. A check that cannot be performed is
    reported as a warning, too.
    """
    found = _diagnoses(machine)
    stays = {one.check for one in _diagnoses(under_run(machine)) if one.severity == "error"}
    found = [one if one.severity == "warning" or one.check in stays else _done_by_run(one) for one in found]
    return sorted(found, key=lambda one: (one.severity, one.check))


def _diagnoses(machine: Machine) -> list[Diagnosis]:
    return [diagnosis for one in every_check().values() for diagnosis in _looked(one, machine)]


def _looked(one: Check, machine: Machine) -> Iterator[Diagnosis]:
    try:
        for match in one.look(machine):
            weight = match.severity or one.severity
            yield Diagnosis(one.id, weight, one.source, printable(match.what), printable(match.fix))
    except OSError as error:
        what = printable(f"could not be checked: {error}")
        yield Diagnosis(one.id, "warning", one.source, what, "Run doctor with the rights of the job's user.")


def _done_by_run(one: Diagnosis) -> Diagnosis:
    fix = f"Start the job with lastgasp run, which does it automatically. Else: {one.fix}"
    return msgspec.structs.replace(one, severity="warning", fix=fix)


def printable(text: str) -> str:
    """Escape what UTF-8 cannot encode, such as odd bytes in a path."""
    return text.encode(errors="backslashreplace").decode()
