"""The arenas that this launcher keeps open for its host's ranks, and the controller's view of all arenas of the job."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from lastgasp import arena
from lastgasp.topology import host_identity

from . import messages as m
from .arena_decision import Steps
from .keeper import open_buffer
from .keepers import Keepers


@dataclass
class _Kept:
    host: str
    fd: int
    """Our own descriptor; -1 where another host's launcher has it."""
    identity: bytes


class Arenas:
    """All methods run on the controller's event loop. Implements `arena_decision.ArenaLook`.

    An arena is freed when its rank's successor has one, when another attempt begins, and at the end of this process.

    Args:
        keepers: of the arenas on other hosts.
    """

    def __init__(self, keepers: Keepers) -> None:
        self._keepers = keepers
        self._host = host_identity()
        self._kept: dict[int, _Kept] = {}

    def keep(self, rank: int, host: str, pid: int, begin: m.Begin) -> None:
        """Open a rank's arena, if it has one; on another host its launcher does."""
        if begin.arena_fd < 0:
            return
        self.drop(rank)
        fd = open_buffer(pid, begin.arena_fd) if host == self._host else -1
        if fd >= 0 or host != self._host:
            self._kept[rank] = _Kept(host, fd, begin.arena_id)

    def drop(self, rank: int) -> None:
        """Free a rank's arena."""
        kept = self._kept.pop(rank, None)
        if kept is not None and kept.fd >= 0:
            os.close(kept.fd)

    def clear(self) -> None:
        """Free all."""
        for rank in list(self._kept):
            self.drop(rank)

    def ask(self, ranks: Mapping[int, object]) -> None:
        """Have the launchers of other hosts say what they keep of these ranks."""
        for rank in ranks:
            if rank in self._kept and self._kept[rank].fd < 0:
                self._keepers.ask(rank)

    @property
    def awaited(self) -> bool:
        """As `ArenaLook` says."""
        return bool(self._kept) and self._keepers.awaited

    def steps(self) -> Steps:
        """As `ArenaLook` says."""
        return {rank: self._steps(rank, kept) for rank, kept in self._kept.items()}

    def _steps(self, rank: int, kept: _Kept) -> tuple[int, ...]:
        if kept.fd >= 0:
            return arena.steps(kept.fd, kept.identity)
        found = self._keepers.arena(rank)
        return found.arena if found is not None else ()

    def hosts(self) -> Mapping[int, str]:
        """As `ArenaLook` says."""
        return {rank: kept.host for rank, kept in self._kept.items()}

    def reference(self, rank: int) -> m.ArenaRef:
        """As `ArenaLook` says."""
        kept = self._kept.get(rank)
        if kept is None:
            return m.ArenaRef(rank=rank)
        pid, fd, found = os.getpid(), kept.fd, self._keepers.arena(rank)
        if fd < 0 and found is not None:
            pid, fd = found.arena_pid, found.arena_fd
        return m.ArenaRef(rank=rank, pid=pid, fd=fd, identity=kept.identity)
