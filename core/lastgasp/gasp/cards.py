"""Descriptions of a job's ranks, sent to the controller at start and from there to operators."""

from __future__ import annotations

from typing import Literal

import msgspec

JobState = Literal["waiting", "running", "recovering", "over", "ended"]
"""waiting: no rank has joined yet. over: a recovery has ended and the ranks are exiting. ended: all have exited."""
RankState = Literal["awaited", "running", "hung", "left", "dead"]
"""awaited: not joined yet. left: its training ended. dead: its process or connection ended before that."""


UNPROTECTED = "protected"
"""Key in `WorkerCard.versions` of a worker that only registers and marks: its end is no fault, its state is unknown."""


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of one worker (one rank's process)."""

    rank: int
    node: str
    """Host name."""
    pid: int
    device: str = ""
    """In the framework's notation (cpu, cuda:0, npu:3); empty if unknown."""
    versions: dict[str, str] = {}
    """Versions of lastgasp and Python, and of what the adapter adds."""
    started_ns: int = 0
    """When the worker registered; wall-clock ns since the epoch."""

    @property
    def protected(self) -> bool:
        """Whether an adapter of lastgasp's protects it, and not only a registration interface of another system."""
        return UNPROTECTED not in self.versions


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """Current state of one rank as seen by the controller."""

    rank: int
    state: RankState
    why: str = ""
    """The evidence of a death."""
    card: WorkerCard | None = None
    """None until it has registered."""
    step: int | None = None
    """The last step it is known to have completed; None until its training has begun."""
    phase: str = ""
    marks: int | None = None
    """The marks enabled at its last heartbeat (`steps.bits`); None where nothing is marked."""
    heard_s: float | None = None
    """Seconds since its last message; None if there was none."""


class SwitchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's response to a switch."""

    rank: int
    mask: int | None = None
    """The marks now enabled on it; None if it did not acknowledge."""
    why: str = ""
    """Why it did not acknowledge; empty if it did."""
