"""What the controller's machine wants done; the shell around it does it."""

from __future__ import annotations

from typing import Literal

import msgspec

from . import messages as m


class Send(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Send `message` to `rank`. A Save goes out with the auxiliary states that the shell can find."""

    rank: int
    message: m.Message


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """SIGKILL the hung process of `rank`; its peers' collectives then raise."""

    rank: int


class RecordPhase(msgspec.Struct, frozen=True, kw_only=True):
    """A phase of the incident began, or its ending is known."""

    phase: Literal["detected", "agreed", "saved", "committed", "released"]


Action = Send | Kill | RecordPhase
