"""The incident record: one versioned JSON document per fault, written by the leader of the recovery.

Every phase is a wall-clock time in ns since the epoch, or None as long as it has not happened.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FaultKind = Literal["killed", "exception", "exit", "sigterm", "interrupt", "hang", "lost", "peer"]
"""killed: the process was killed. exit: it ended with an exit code, by SystemExit in user code or as observed from
outside. lost: its host or link is silent. peer: a collective failed and no rank has reported the cause."""

Ending = Literal["saved", "nothing_to_save", "gave_up", "in_place", "in_arenas", "open"]
"""in_place: the step is held in the memory of the ranks, which enter their training again. in_arenas: no rank was left
that could save it, and the next attempt has begun with it: launchers had kept it in memory."""

INCIDENT_VERSION = 1


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault on one rank."""

    kind: FaultKind
    rank: int
    cause: str
    """One line for people: the exception's text, the signal, or the evidence of death."""
    step: int
    """The last step the rank is known to have completed."""
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
    """The record of one fault and its recovery."""

    version: int = INCIDENT_VERSION
    id: str
    job: str
    attempt: int
    world_size: int
    ending: Ending = "open"
    reason: str = ""
    """Why there is no checkpoint, or a note about it; empty if all went well."""
    faults: list[Fault] = []
    phases: Phases = msgspec.field(default_factory=Phases)
    step_saved: int | None = None
    steps_lost: int | None = None
    """Steps that survivors of every shard had completed and that no checkpoint contains."""
    nbytes: int = 0
    """0 also where only somebody's own save handler knows."""
    files: list[str] = []
    savers: list[int] = []
    unused: list[Unused] = []
    notes: list[str] = []
    led_by: str = ""
    """controller, or rank N if the controller was lost; MindIO if that led."""
    backend: str = "embedded"
    """The backend: embedded or mindio. Records of earlier versions lack this field."""
    restart: str = ""
    """How the controller's host started its ranks again: warm, or cold and why; empty where it did not."""
    rung: str = ""
    """How a fault was answered in place: retry, replace or shrink; grow where there was none, and ranks that were
    missing were taken in again; empty if neither."""
    from_files: bool = False
    """Answered in place, all ranks began with the checkpoint, and not with what some held in memory."""
    incarnation: int = 0
    """How often the ranks of this attempt had been entered again in place before."""
    not_in_place: str = ""
    """Why a job that can be entered again was not, or in the end was not (a rank could not be replaced); else empty."""


def encode_incident(incident: Incident) -> bytes:
    """Encode it as JSON, indented by two spaces, with a final newline."""
    return msgspec.json.format(msgspec.json.encode(incident), indent=2) + b"\n"


def decode_incident(data: bytes) -> Incident:
    """Decode one document.

    Raises:
        msgspec.ValidationError: it is not an incident, or of a newer version than this lastgasp supports.
    """
    incident = msgspec.json.decode(data, type=Incident)
    if incident.version > INCIDENT_VERSION:
        raise msgspec.ValidationError(
            f"incident version {incident.version} is newer than {INCIDENT_VERSION}: update lastgasp"
        )
    return incident
