"""Arenas are freed: a launcher holds those of two attempts at most, and none at the end, however many faults."""

from __future__ import annotations

import gc
import os

from lastgasp import arena
from lastgasp.arena import Arena
from lastgasp.gasp import messages as m
from lastgasp.gasp.arenas import Arenas
from lastgasp.gasp.keepers import Keepers
from lastgasp.topology import host_identity

RANKS, FAULTS = 2, 30


def held() -> int:
    """Arenas that are open in this process, as descriptors and as mappings."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(arena.NAME in os.readlink(link) for link in links if os.path.lexists(link))


def attempt(arenas: Arenas, step: int) -> None:
    """Ranks with arenas of their own begin, complete a step and die."""
    for rank in range(RANKS):
        own = Arena()
        own.reserve(5000)
        own.copy(step, [bytes(5000)])
        begin = m.Begin(step=0, durable=0, buffer_fd=-1, arena_fd=own.fd, arena_id=own.identity, buddy=True)
        arenas.keep(rank, host_identity(), os.getpid(), begin)
        arenas.partners.begins(rank, host_identity(), RANKS, ((0,), (1,)))
        own.close()


def test_after_thirty_faults_nothing_is_left() -> None:
    gc.collect()  # of other tests
    notes: list[str] = []
    before, arenas = held(), Arenas(Keepers(lambda rank, step: None), "token", notes.append)
    for number in range(FAULTS):
        arenas.begin(durable=0)
        attempt(arenas, number + 1)
        assert held() - before <= 2 * RANKS
    assert arenas.steps() == {0: (FAULTS,), 1: (FAULTS,)}
    arenas.clear()
    assert held() == before and notes == []
