"""The crash-safe buffers that the controller can read: those open on this host, and reports from other hosts."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from lastgasp.crash_safe_buffer import CrashSafeBuffer, newest_step

from . import messages as m
from .keeper import open_buffer
from .keepers import Keepers
from .peers import Peer

log = logging.getLogger("lastgasp.controller")


class OpenBuffers:
    """Implements auxiliary.RankBuffers."""

    def __init__(self, peers: Mapping[int, Peer], keepers: Keepers) -> None:
        self._peers, self._keepers = peers, keepers

    @property
    def awaited(self) -> bool:
        """As in the protocol."""
        return self._keepers.awaited

    def exists(self, rank: int) -> bool:
        """As in the protocol."""
        return self._descriptor(rank) >= 0 or self._keepers.has_buffer(rank)

    def newest(self, rank: int) -> int:
        """As in the protocol."""
        descriptor = self._descriptor(rank)
        try:
            step = newest_step(descriptor) if descriptor >= 0 else None
        except Exception as error:
            _unreadable(rank, error)
            step = None
        return -1 if step is None else step

    def state(self, rank: int, step: int) -> bytes | None:
        """As in the protocol."""
        descriptor = self._descriptor(rank)
        try:
            state = CrashSafeBuffer.read(descriptor, step) if descriptor >= 0 else None
        except Exception as error:
            _unreadable(rank, error)
            state = None
        return self._keepers.aux(rank, step) if state is None else state

    def keep(self, peer: Peer, begin: m.Begin) -> None:
        """Open what must outlive the rank; on another host its launcher does."""
        if peer.pid is not None:
            opened = open_buffer(peer.pid, begin.buffer_fd)
            if opened >= 0 <= peer.buffer_fd:  # another backend leads, and the rank has entered its training again
                os.close(peer.buffer_fd)
            peer.buffer_fd = opened if opened >= 0 else peer.buffer_fd
        elif peer.elsewhere is not None and begin.buffer_fd >= 0:
            host, pid = peer.elsewhere
            order = m.Keep(
                rank=peer.rank, pid=pid, buffer_fd=begin.buffer_fd, arena_fd=begin.arena_fd, arena_id=begin.arena_id,
                buddy=begin.buddy,
            )  # fmt: skip
            self._keepers.keep(host, order)

    def _descriptor(self, rank: int) -> int:
        peer = self._peers.get(rank)
        return -1 if peer is None else peer.buffer_fd


def _unreadable(rank: int, error: Exception) -> None:
    """Another process wrote it and may have died of writing anything anywhere: the orders must not depend on it."""
    log.warning("the crash-safe buffer of rank %d cannot be read: %s", rank, error)
