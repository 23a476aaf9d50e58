"""What is told about the ranks of a job: to the controller when they start, and by it to operators."""

from __future__ import annotations

from typing import Literal

import msgspec

JobState = Literal["waiting", "running", "recovering", "over", "ended"]
"""waiting: no rank has joined yet. over: a recovery has ended, and the ranks leave. ended: all have left."""
RankState = Literal["awaited", "running", "hung", "left", "dead"]
"""awaited: has not joined yet. left: its training ended. dead: its process or its connection ended before."""


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True):
    """Who one worker (one rank's process) is."""

    rank: int
    node: str
    """Host name."""
    pid: int
    device: str = ""
    """As the framework writes it: cpu, cuda:0, npu:3; empty where nobody said."""
    versions: dict[str, str] = {}
    """lastgasp, python, and what the adapter adds."""
    started_ns: int = 0
    """When the worker registered; wall-clock ns since the epoch."""


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as the controller sees it now."""

    rank: int
    state: RankState
    why: str = ""
    """The evidence of a death."""
    card: WorkerCard | None = None
    """None until it has registered."""
    step: int | None = None
    """The last step that it is known to have completed; None until its training has begun."""
    phase: str = ""
    marks: int | None = None
    """The marks that are on (`steps.bits`), at its last heartbeat; None where nothing is marked."""
    heard_s: float | None = None
    """Seconds since it was last heard; None where it never was."""


class SwitchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did about a switch."""

    rank: int
    mask: int | None = None
    """The marks that are on there now; None where it did not acknowledge."""
    why: str = ""
    """Why it did not; empty where it did."""
