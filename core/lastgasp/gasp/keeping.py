"""What a launcher of another host keeps of its ranks and does for them, and how the controller asks it."""

from __future__ import annotations

from lastgasp.events import Ending

from .again import Again
from .arena_ref import ArenaRef
from .wire import Message


class AskLeft(Message, frozen=True, kw_only=True):
    """Rank, before it chooses a checkpoint: what have the ranks of the attempt before left in their arenas?"""


class Left(Message, frozen=True, kw_only=True):
    """Controller: this rank's predecessor has left `step` in its arena, and so has that of every other rank.

    -1: some have not, or it is older than what is on disk. `durable` is the newest step that is.
    """

    step: int = -1
    durable: int = 0
    arena: ArenaRef = ArenaRef(rank=-1)


class DropLeft(Message, frozen=True, kw_only=True):
    """Rank: not all ranks can use what was left; free it."""


class Keep(Message, frozen=True, kw_only=True):
    """Controller, to the keeper of a rank's host: open its buffer and its arena now, so that they outlive it."""

    rank: int
    pid: int
    buffer_fd: int
    arena_fd: int = -1
    arena_id: bytes = b""
    buddy: bool = False
    """Steps of its arena are to go to a partner host."""


class AskKept(Message, frozen=True, kw_only=True):
    """Controller: what is in the buffer of this dead rank?"""

    rank: int


class Kept(Message, frozen=True, kw_only=True):
    """Keeper: the auxiliary states of a rank, by step; `steps` and `states` belong together.

    And the steps in its arena, with the keeper's own process and descriptor of it.
    """

    rank: int
    steps: tuple[int, ...] = ()
    states: tuple[bytes, ...] = ()
    arena: tuple[int, ...] = ()
    arena_pid: int = 0
    arena_fd: int = -1


class Forks(Message, frozen=True, kw_only=True):
    """Keeper: whether ranks of its host can get new processes now; `cannot` says why not, empty where they can."""

    attempt: int
    cannot: str


class Agreed(Message, frozen=True, kw_only=True):
    """Controller, to all keepers: how the recovery of this attempt ends; `again`: which ranks need new processes."""

    attempt: int
    ending: Ending
    again: Again | None = None


class RefusedToStart(Message, frozen=True, kw_only=True):
    """Controller, to all keepers: a rank of this attempt has refused to start, and would refuse again."""

    attempt: int


class JobOver(Message, frozen=True, kw_only=True):
    """Controller, to all keepers: the first launcher ends the job with this code; another start would end alike."""

    code: int
    why: str


class Completed(Message, frozen=True, kw_only=True):
    """Controller, to all keepers: all ranks of this attempt have completed their training; -1: some train (again)."""

    attempt: int


class Exited(Message, frozen=True, kw_only=True):
    """Keeper: the process that was to be `rank` in this incarnation has ended before it joined, or was not made."""

    attempt: int
    incarnation: int
    rank: int
    how: str


class Keeper(Message, frozen=True, kw_only=True):
    """Launcher of another host: the proof (in the role "keeper", for rank -1). I keep the buffers of the ranks here."""

    protocol: int
    version: str
    nonce: bytes
    mac: bytes
    host: str
