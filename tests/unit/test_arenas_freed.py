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


def test_while_ranks_enter_again_what_was_left_is_their_arena() -> None:
    """For a second fault in the meantime; once a new process has begun, its own is. Nothing of it counts as saved."""
    gc.collect()
    arenas = Arenas(Keepers(lambda rank, step: None), "token", lambda text: None)
    before = held()
    arenas.begin(durable=0)
    attempt(arenas, 3)
    arenas.begin(durable=0, same_attempt=True)
    host = host_identity()
    assert arenas.steps() == {0: (3,), 1: (3,)} and arenas.hosts() == {0: host, 1: host}
    left = arenas.reference(1)
    fd = os.open(f"/proc/{left.pid}/fd/{left.fd}", os.O_RDWR)
    new = Arena()
    new.adopt(fd, left.identity, 3)
    new.copy(4, [bytes(5000)])
    assert arenas.steps()[1] == (4, 3)  # a survivor fills its arena when it is told to enter again
    arenas.keep(1, host, os.getpid(), m.Begin(step=3, durable=0, buffer_fd=-1, arena_fd=new.fd, arena_id=new.identity))
    assert arenas.reference(1) != left and arenas.steps() == {0: (3,), 1: (4, 3)}
    arenas.begin(durable=0)  # a restart, as rank 0 has not begun
    assert arenas.steps() == {}
    assert (found := arenas.left(0, host, RANKS)).step == 3 and found.durable == 0
    new.close()
    del new  # its mapping has a descriptor of its own
    arenas.clear()
    assert held() == before


def entering_again() -> tuple[Arenas, int]:
    """Those of an attempt whose ranks enter once more, and how many descriptors were held before."""
    gc.collect()
    arenas, before = Arenas(Keepers(lambda rank, step: None), "token", lambda text: None), held()
    arenas.begin(durable=0)
    attempt(arenas, 3)
    arenas.begin(durable=0, same_attempt=True)
    return arenas, before


def test_who_begins_with_a_replicas_arena_leaves_the_others_theirs() -> None:
    """Until all have begun; then nothing is kept of what was left."""
    (arenas, before), host = entering_again(), host_identity()
    new = Arena()
    arenas.keep(1, host, os.getpid(), m.Begin(step=3, durable=0, buffer_fd=-1, arena_fd=new.fd, arena_id=new.identity))
    assert arenas.steps() == {0: (3,), 1: ()} and held() - before == 2 + 2
    own = arenas.reference(0)
    arenas.keep(0, host, own.pid, m.Begin(step=3, durable=0, buffer_fd=-1, arena_fd=own.fd, arena_id=own.identity))
    assert arenas.steps() == {0: (3,), 1: ()} and held() - before == 1 + 2
    new.close()
    del new
    arenas.clear()
    assert held() == before


def test_where_ranks_enter_once_more_before_all_have_begun_each_has_what_it_had_last() -> None:
    """New processes were told to begin with it; each is opened only once they come."""
    (arenas, before), host = entering_again(), host_identity()
    own = arenas.reference(0)
    arenas.keep(0, host, own.pid, m.Begin(step=3, durable=0, buffer_fd=-1, arena_fd=own.fd, arena_id=own.identity))
    told = [arenas.reference(rank) for rank in range(RANKS)]
    arenas.begin(durable=0, same_attempt=True)
    assert [arenas.reference(rank) for rank in range(RANKS)] == told
    assert all(arena.NAME in os.readlink(f"/proc/{one.pid}/fd/{one.fd}") for one in told)
    assert arenas.steps() == {0: (3,), 1: (3,)} and held() - before == RANKS
    arenas.begin(durable=0)  # a restart
    assert arenas.left(0, host, RANKS).step == 3
    arenas.clear()
    assert held() == before
