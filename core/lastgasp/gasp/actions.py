"""Actions that the controller's state machine requests and the code around it carries out."""

from __future__ import annotations

from typing import Literal

import msgspec

from . import messages as m


class Send(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Send `message` to `rank`, as it is."""

    rank: int
    message: m.Message


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """Send SIGKILL to the hung process of `rank`, so that its peers' collectives raise."""

    rank: int


class RecordPhase(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of the incident began, or its ending is known; "called_off": there is none, and all train on."""

    phase: Literal["detected", "agreed", "saved", "committed", "released", "called_off"]


class WentOn(msgspec.Struct, frozen=True, kw_only=True):
    """Another leader has repaired the fault in place: training goes on, in new processes of these ranks."""

    replaced: tuple[int, ...]


class Remark(msgspec.Struct, frozen=True, kw_only=True):
    """A note for the incident's record."""

    text: str


class AgreedAnew(msgspec.Struct, frozen=True, kw_only=True):
    """Tell the launchers of other hosts once more how the recovery has ended, and write it down."""


Action = Send | Kill | RecordPhase | Remark | WentOn | AgreedAnew
