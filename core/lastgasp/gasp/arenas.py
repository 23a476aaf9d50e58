"""The arenas that this launcher keeps open for its host's ranks, and the controller's view of all arenas of the job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lastgasp import arena
from lastgasp.topology import host_identity

from . import messages as m
from .arena_decision import Buddies, Steps
from .keeper import open_buffer
from .keepers import Keepers
from .partners import Partners

TRIES = 2
"""Attempts in a row that are given what was left without one of them having begun to train."""


@dataclass
class _Kept:
    host: str
    fd: int
    """Our own descriptor; -1 where another host's launcher has it."""
    identity: bytes


@dataclass(frozen=True)
class _Left:
    """The arena of a rank of the attempt before, with the process that has it open."""

    kept: _Kept
    steps: tuple[int, ...]
    reference: m.ArenaRef

    @property
    def now(self) -> tuple[int, ...]:
        """Its steps: a rank that enters its training again may fill its arena after it was left."""
        return arena.steps(self.kept.fd, self.kept.identity) if self.kept.fd >= 0 else self.steps


class Arenas:
    """All methods run on the controller's event loop. Implements `arena_decision.ArenaLook`.

    When another attempt begins, the arenas of the one before are kept until its ranks have begun to train: with what
    was left there, which they then go on with, or with arenas of their own. All are freed at the end of this process.

    Args:
        keepers: of the arenas on other hosts.
        token: the job's; note: takes what people should know.

    Attributes:
        partners: where copies of arenas go.
    """

    def __init__(self, keepers: Keepers, token: str, note: Callable[[str], None]) -> None:
        self._keepers = keepers
        self._host = host_identity()
        self._kept: dict[int, _Kept] = {}
        self.partners = Partners(keepers, self._host, token, note, self._own)
        self._left: dict[int, _Left] = {}
        self._durable = self._tries = 0
        self._same_attempt = False

    def keep(self, rank: int, host: str, pid: int, begin: m.Begin) -> bool:
        """Open a rank's arena, if it has one; on another host its launcher does.

        Returns:
            Whether it goes on with what was left there, or with a checkpoint that the ranks have made of that.
        """
        left = self._left.get(rank)
        again = left is not None and left.kept.identity == begin.arena_id
        written = bool(self._left) and begin.step == begin.durable == self._common() > self._durable
        if not again and not (self._same_attempt and begin.step > begin.durable):  # else it has copied a replica's
            self.drop_left()
        if begin.arena_fd < 0:
            return written
        if (kept := self._kept.get(rank)) is not None and kept.identity == begin.arena_id:
            return again or written  # it has entered its training again, with the same memory
        self._drop(rank)
        fd = open_buffer(pid, begin.arena_fd) if host == self._host else -1
        if fd >= 0 or host != self._host:
            self._kept[rank] = _Kept(host, fd, begin.arena_id)
        if self._same_attempt and self._kept.keys() == self._left.keys():  # all have begun
            self.drop_left()
        return again or written

    def _own(self, rank: int) -> tuple[int, bytes] | None:
        kept = self._kept.get(rank)
        return None if kept is None or kept.fd < 0 else (kept.fd, kept.identity)

    def _drop(self, rank: int) -> None:
        if (kept := self._kept.pop(rank, None)) is not None:
            self._close(kept)

    @staticmethod
    def _close(kept: _Kept) -> None:
        if kept.fd >= 0:
            os.close(kept.fd)

    def clear(self) -> None:
        """Free all."""
        for rank in list(self._kept):
            self._drop(rank)
        self.drop_left()
        self.partners.close()

    # -- from attempt to attempt --------------------------------------------------------------------------

    def begin(self, durable: int, same_attempt: bool = False) -> None:
        """Another attempt begins. Those that have begun with what was left, but not all, leave it as it was.

        In the same attempt they leave their own: new processes are told to begin with those, and not all have begun.

        Args:
            durable: the newest step on disk, as far as the attempt before knew.
            same_attempt: its ranks enter their training again. Until one has begun, what its predecessor has left, or
                it itself, is its arena for any decision.
        """
        self.partners.begin()
        self._same_attempt = same_attempt
        if same_attempt and self._left and self._kept.keys() < self._left.keys():
            for rank, kept in self._kept.items():
                self._close(self._left[rank].kept)
                self._left[rank] = self._leave(rank, kept)
            self._kept, self._durable = {}, max(self._durable, durable)
            return
        if self._left and self._kept.keys() != self._left.keys():
            for rank in list(self._kept):
                self._drop(rank)
            self._durable, self._tries = max(self._durable, durable), self._tries + 1
            return
        self.drop_left()
        found, self._kept = self._kept, {}
        self._left = {rank: self._leave(rank, kept) for rank, kept in found.items()}
        self._durable, self._tries = durable, 1

    def _leave(self, rank: int, kept: _Kept) -> _Left:
        return _Left(kept, self._steps(rank, kept), self._reference(rank, kept))

    def left(self, rank: int, host: str, world_size: int) -> m.Left:
        """What a rank's predecessor has left, if all have left one step, and nothing newer is on disk."""
        mine, whole = self._left.get(rank), self._left.keys() == {*range(world_size)}
        begun = bool(self._kept)  # what the next training of the same script begins with is something else
        if mine is None or mine.kept.host != host or not whole or begun or self._tries > TRIES:
            return m.Left()
        step = self._common()
        return m.Left(step=step, durable=self._durable, arena=mine.reference) if step >= self._durable else m.Left()

    def _common(self) -> int:
        return max(set.intersection(*(set(left.now) for left in self._left.values())), default=-1)

    def drop_left(self) -> None:
        """Free what was left: training begins with something else."""
        for left in self._left.values():
            self._close(left.kept)
        self._left = {}

    # -- a fault ------------------------------------------------------------------------------------------

    @property
    def awaited(self) -> bool:
        """As `ArenaLook` says."""
        return bool(self._kept) and self._keepers.awaited

    def steps(self) -> Steps:
        """As `ArenaLook` says."""
        left = {rank: one.now for rank, one in self._waiting().items()}
        return left | {rank: self._steps(rank, kept) for rank, kept in self._kept.items()}

    def _waiting(self) -> Mapping[int, _Left]:
        """What was left for ranks that are about to enter their training again."""
        return self._left if self._same_attempt else {}

    def _steps(self, rank: int, kept: _Kept) -> tuple[int, ...]:
        if kept.fd >= 0:
            return arena.steps(kept.fd, kept.identity)
        found = self._keepers.arena(rank)
        return found.arena if found is not None else ()

    def hosts(self) -> Mapping[int, str]:
        """As `ArenaLook` says."""
        left = {rank: one.kept.host for rank, one in self._waiting().items()}
        return left | {rank: kept.host for rank, kept in self._kept.items()}

    def buddies(self) -> Buddies:
        """As `ArenaLook` says."""
        return self.partners.held()

    def reference(self, rank: int, *, buddy: bool = False) -> m.ArenaRef:
        """As `ArenaLook` says."""
        if buddy:
            return self.partners.reference(rank)
        kept, left = self._kept.get(rank), self._waiting().get(rank)
        if kept is None:
            return m.ArenaRef(rank=rank) if left is None else left.reference
        return self._reference(rank, kept)

    def _reference(self, rank: int, kept: _Kept) -> m.ArenaRef:
        pid, fd, found = os.getpid(), kept.fd, self._keepers.arena(rank)
        if fd < 0 and found is not None:
            pid, fd = found.arena_pid, found.arena_fd
        return m.ArenaRef(rank=rank, pid=pid, fd=fd, identity=kept.identity)
