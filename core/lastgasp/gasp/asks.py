"""What operators ask the controller, and its answers."""

from __future__ import annotations

from .cards import JobState, RankRow, SwitchResult
from .wire import Message


class AskRanks(Message, frozen=True, kw_only=True):
    """Operator: who is in the job? Or a rank: am I?"""

    of: int | None = None
    """The rank whose row alone is wanted."""


class Ranks(Message, frozen=True, kw_only=True):
    """Controller: one row for each rank of the job's size."""

    job: str
    directory: str
    attempt: int
    world_size: int
    state: JobState
    started_s: int
    rows: tuple[RankRow, ...]
    incarnation: int = 0
    """How often the ranks of this attempt have been entered again in place."""
    replaced: tuple[int, ...] = ()
    """Ranks that got a new process then, oldest first."""
    ended_by_all: bool = False
    """Each rank has ended its training by itself: to its end, or by an exception of its own."""


class AskSwitch(Message, frozen=True, kw_only=True):
    """Operator: have these ranks (None: all) switch, and wait `wait` seconds at most for their answers."""

    ranks: tuple[int, ...] | None
    on: int
    off: int
    wait: float


class SwitchDone(Message, frozen=True, kw_only=True):
    """Controller: what each of them answered, by rank."""

    results: tuple[SwitchResult, ...]


class Operator(Message, frozen=True, kw_only=True):
    """Operator: the proof (in the role "operator", for rank -1). I ask; I am no rank."""

    protocol: int
    version: str
    nonce: bytes
    mac: bytes


class SwitchOrder(Message, frozen=True, kw_only=True):
    """Controller: turn the marks of `on` on and those of `off` off (`steps.bits`)."""

    order: int
    on: int
    off: int


class Switched(Message, frozen=True, kw_only=True):
    """Rank: done, and `mask` is on now; or -1, and why not."""

    order: int
    mask: int
    why: str = ""
