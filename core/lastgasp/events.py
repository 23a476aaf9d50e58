"""The incident record: one JSON document per fault, versioned, written by whoever leads the recovery.

Every phase is a wall-clock time in ns since the epoch, or None while (or because) it did not happen.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FaultKind = Literal["killed", "exception", "exit", "sigterm", "interrupt", "hang", "lost", "peer"]
"""killed: the process is gone. exit: it ended with an exit code of its own, by SystemExit in user code or as seen
from outside. lost: host or link silent. peer: a collective failed and no rank has owned up to it."""

Ending = Literal["saved", "nothing_to_save", "gave_up", "open"]

INCIDENT_VERSION = 1


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that went wrong on one rank."""

    kind: FaultKind
    rank: int
    cause: str
    """One line for people: the exception's text, the signal, the evidence of death."""
    step: int
    """The last step that the rank is known to have completed."""
    seen_ns: int


class Unused(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that did not save, and why."""

    rank: int
    why: str


class Phases(msgspec.Struct, kw_only=True):
    """When each phase of one recovery began; wall-clock ns since the epoch."""

    fault: int | None = None
    detected: int | None = None
    agreed: int | None = None
    first_byte: int | None = None
    saved: int | None = None
    committed: int | None = None
    released: int | None = None
    restarted: int | None = None
    first_step: int | None = None


class Incident(msgspec.Struct, kw_only=True):
    """Everything about one fault and what came of it."""

    version: int = INCIDENT_VERSION
    id: str
    job: str
    attempt: int
    world_size: int
    ending: Ending = "open"
    reason: str = ""
    """Why there is no checkpoint, or a note about the one there is; empty when all went well."""
    faults: list[Fault] = []
    phases: Phases = msgspec.field(default_factory=Phases)
    step_saved: int | None = None
    steps_lost: int | None = None
    """Steps that some rank had completed and that no checkpoint holds."""
    nbytes: int = 0
    files: list[str] = []
    savers: list[int] = []
    unused: list[Unused] = []
    notes: list[str] = []
    led_by: str = ""
    """controller, or rank N where the controller was gone; MindIO where that led."""
    backend: str = "embedded"
    """Whose gasp it was: embedded or mindio. Records of earlier versions have no such field."""


def encode_incident(incident: Incident) -> bytes:
    """The JSON document, two-space indented, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(incident), indent=2) + b"\n"


def decode_incident(data: bytes) -> Incident:
    """Read one document.

    Raises:
        msgspec.ValidationError: no incident, or of a newer version than this lastgasp knows.
    """
    incident = msgspec.json.decode(data, type=Incident)
    if incident.version > INCIDENT_VERSION:
        raise msgspec.ValidationError(
            f"incident version {incident.version} is newer than {INCIDENT_VERSION}: update lastgasp"
        )
    return incident
