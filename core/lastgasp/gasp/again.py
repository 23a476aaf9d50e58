"""What is agreed for a recovery in place: who enters the training again, from which step, and how its ranks meet."""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

import msgspec

from .arena_ref import ArenaRef

Rung = Literal["retry", "replace", "shrink", "grow"]
INCARNATION = "LASTGASP_INCARNATION"
"""Set by lastgasp alone: the number of the newest recovery in place."""
ORDER = "LASTGASP_AGAIN"
"""Set by lastgasp alone, for a process that takes the place of a dead rank: the encoded `Again`."""
LED = "LASTGASP_LED"
"""Set by lastgasp alone where another backend leads, which counts recoveries otherwise: the incarnation of our
controller's that this process is of."""
LAUNCHER = "LASTGASP_PARENT"
"""The same: the process id of the launcher that has started it."""

NOT_REPLACED = "could not be replaced: "
"""Begins what a launcher says of a rank that was to get a new process, and gets none."""

NEW = -1
"""In `Again.members`: a process that was not there before."""


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """The order to enter the training again.

    Attributes:
        incarnation: its number, from 1; whoever has a smaller one can neither join, nor save, nor commit.
        step: the completed step that all begin with.
        source: the rank that gives its state of that step to the takers; -1 where all begin with the saved checkpoint.
        takers: ranks that do not hold the step themselves.
        lost: those of them that get a new process.
        port: of the store, on the launcher's host, where the ranks meet.
        aux: the auxiliary states of `step` of all ranks, as a gasp would have saved them.
        pids: of the ranks' processes so far, on the controller's host.
        ends: the ranks' ends of the TCP connections between hosts, as "address port".
        host: where the store is, if the job has several hosts; empty where `MASTER_ADDR` stays.
        saved: the step was also written to disk, since only one rank holds it.
        members: where nobody takes the places of the lost ranks, or ranks that were missing are taken in again: who
            goes on, in the order of their new numbers, `NEW` for a process that was not there; empty where all ranks
            keep theirs. `source`, `takers` and `aux` go by the numbers before.
        vanished: addresses of hosts that have only ranks which are missing from now on: nothing may come from there,
            not even the end of a connection.
        rank: the own new number, for the process that has the order (`for_rank`); -1 in what all get.
        arenas: where each rank alone holds a part of the state and begins with its own: how the new processes open
            the arenas of the lost ranks, in their order, or of replicas; None where ranks hold all of the state.
    """

    incarnation: int
    step: int
    source: int
    takers: tuple[int, ...]
    lost: tuple[int, ...]
    port: int
    aux: dict[int, bytes] = {}
    pids: tuple[int, ...] = ()
    ends: tuple[str, ...] = ()
    host: str = ""
    saved: bool = False
    members: tuple[int, ...] = ()
    vanished: tuple[str, ...] = ()
    rank: int = -1
    arenas: tuple[ArenaRef, ...] | None = None

    @property
    def from_files(self) -> bool:
        """All begin with the checkpoint, and none with what ranks hold in memory."""
        return self.source < 0

    @property
    def environment(self) -> dict[str, str]:
        """What torch and lastgasp read to make the process group and to join."""
        port, number = str(self.port), str(self.incarnation)
        found = {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True", INCARNATION: number}
        if self.members:
            found["WORLD_SIZE"] = str(len(self.members))
        if self.rank >= 0:
            found["RANK"] = str(self.rank)
        return found | {"MASTER_ADDR": self.host} if self.host else found

    def for_rank(self, rank: int) -> Again:
        """For a rank that goes on, by its number before: the same by the numbers from this incarnation on."""
        if not self.members:
            return self
        number = self.numbers
        new = tuple(now for now, before in enumerate(self.members) if before == NEW)
        return msgspec.structs.replace(
            self,
            rank=number.get(rank, -1),
            source=number.get(self.source, -1),
            takers=tuple(sorted((*(number[one] for one in self.takers if one in number), *new))),
            aux={number[one]: state for one, state in self.aux.items() if one in number},
        )

    @property
    def numbers(self) -> dict[int, int]:
        """New numbers by those before, of the ranks that go on; empty where all keep theirs."""
        return {before: now for now, before in enumerate(self.members) if before != NEW}

    def is_new(self, rank: int, pid: int) -> bool:
        """Whether a process of the controller's host has taken that rank's place."""
        return rank in self.lost and pid > 0 and bool(self.pids) and pid not in self.pids

    def was_to_enter(self, rank: int, pid: int) -> bool:
        """Whether one that has ended is a survivor, or new; or could not be made (`pid` 0)."""
        return rank not in self.lost or not pid or self.is_new(rank, pid)

    def misses(self, rank: int, incarnation: int) -> bool:
        """The same of another host, whose launcher says of which incarnation it was.

        It may not have heard of the order yet, and only a survivor has to follow that.
        """
        before = incarnation == self.incarnation - 1 and not self.members
        return incarnation == self.incarnation or (before and rank not in self.lost)

    def in_vain(self, world_size: int, ended: Container[int]) -> bool:
        """Whether nobody can enter since ranks, by their new numbers, have ended before any has joined.

        Who begins with files joins only when all have met; else those that are left join, and a new process does not
        come alone.
        """
        if self.from_files:
            return any(rank in ended for rank in range(len(self.members) or world_size))
        if self.members:
            return all(now in ended for now, before in enumerate(self.members) if before != NEW)
        return all(rank in ended for rank in range(world_size) if rank not in self.lost)

    @property
    def rung(self) -> Rung:
        """shrink where ranks are missing from now on, replace where they get new processes, else retry.

        grow where ranks that were missing are there again.
        """
        if NEW in self.members:
            return "grow"
        return "shrink" if self.members else "replace" if self.lost else "retry"


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher can do for a recovery in place now.

    Attributes:
        attempt, incarnation: for which it is made.
        port: of a store that nobody has used; host: where it is, empty where the job has one host.
        others: launchers that the job has besides this one.
        no_process: why no rank can get a new process; empty where it can.
        least: with how many ranks the job may go on where none can be had; 0: with no less than it has.
        grow: `Again.members` of a job that takes in what waits for it; empty where nothing waits.
        complete: with how many ranks the attempt began.
    """

    attempt: int
    incarnation: int
    port: int
    host: str = ""
    others: int = 0
    no_process: str = ""
    least: int = 0
    grow: tuple[int, ...] = ()
    complete: int = 0
