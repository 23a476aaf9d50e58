"""The arenas that a rank finds by itself once the controller is gone: its own, and those at its host's launcher."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from lastgasp import arena
from lastgasp.ports import StateSource

from . import messages as m
from .arena_decision import ArenasHeld
from .arena_files import BadArena, arena_of

log = logging.getLogger("lastgasp")
_HERE = "here"


@dataclass
class ArenasHere:
    """Arenas of this host's ranks, and copies of other hosts' ones, by the open files of the launcher.

    The launcher serves one job, and frees what is of an earlier attempt.
    """

    _found: dict[int, tuple[m.ArenaRef, tuple[int, ...], bool]] = field(default_factory=dict)
    """How it is opened, its steps, and whether it is a copy."""

    @classmethod
    def look(cls, source: StateSource) -> ArenasHere:
        """What there is; nothing where this rank has no arena, its own where its launcher is gone."""
        found, launcher, own = cls(), os.getppid(), arena_of(source)
        if own is None:
            return found
        if steps := arena.steps(own.fd, own.identity):
            mine = m.ArenaRef(rank=source.rank, pid=os.getpid(), fd=own.fd, identity=own.identity)
            found._found[source.rank] = mine, steps, False
        try:
            for name in os.listdir(f"/proc/{launcher}/fd"):
                found._open(launcher, int(name))
        except OSError as error:
            log.debug("the launcher's arenas cannot be seen: %s", error)
        return found

    def _open(self, launcher: int, number: int) -> None:
        path = f"/proc/{launcher}/fd/{number}"
        try:
            if arena.NAME not in os.readlink(path):
                return
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            known = arena.whose(fd)
            if known is None:
                return
            rank, identity, copy = known
            steps = arena.steps(fd, identity)
        finally:
            os.close(fd)
        if steps and (rank not in self._found or max(steps) > max(self._found[rank][1])):
            self._found[rank] = m.ArenaRef(rank=rank, pid=launcher, fd=number, identity=identity), steps, copy

    def held(self) -> ArenasHeld:
        """For the decision: all of them are on this host."""
        own, copies = self.steps(copies=False), self.steps(copies=True)
        return ArenasHeld(
            own, dict.fromkeys(own, _HERE), {rank: (_HERE, steps) for rank, steps in copies.items()}
        )  # fmt: skip

    def steps(self, *, copies: bool) -> dict[int, tuple[int, ...]]:
        """Those of this host's ranks, or of the copies of other ranks' arenas."""
        return {rank: steps for rank, (_, steps, copy) in self._found.items() if copy == copies}

    def without(self, rank: int, step: int) -> ArenasHeld:
        """The same once that step of that rank has turned out to be damaged."""
        reference, steps, copy = self._found[rank]
        self._found[rank] = reference, tuple(one for one in steps if one != step), copy
        return self.held()

    def references(self, owners: Iterable[int]) -> tuple[m.ArenaRef, ...]:
        """How those are opened; -1 stands for none.

        Raises:
            BadArena: one is not here (any more).
        """
        wanted = [owner for owner in dict.fromkeys(owners) if owner >= 0]
        for owner in wanted:
            if owner not in self._found:
                raise BadArena(owner, "is not at this host's launcher")
        return tuple(self._found[owner][0] for owner in wanted)
