"""Nobody waits in torch's exit barrier for launchers that have died."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import _TERMINAL_STATE_SYNC_ID
from torch.distributed.elastic.utils.store import barrier

from lastgasp.gasp import messages as m
from lastgasp.gasp.keeper import BufferKeeper
from lastgasp.gasp.serve import ControllerThread, new_token
from lastgasp.launch import exitbarrier
from lastgasp.launch.exitbarrier import wait_for_living
from support.waiting import until

LIMIT = 60.0
FOREVER = 1e9
"""The launcher's clock runs ahead of all threads: a limit that is over for no thread that is late."""


@dataclass
class Clock:
    """Looks take no time but that of this clock."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """As time.sleep; whoever else runs gets a turn."""
        self.now += seconds
        threading.Event().wait(0.001)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of this machine's, for the launcher that looks."""
    found = Clock()
    monkeypatch.setattr(exitbarrier, "_clock", SimpleNamespace(monotonic=found))
    monkeypatch.setattr(exitbarrier, "time", found)
    return found


@pytest.fixture
def others() -> Iterator[Callable[[HashStore], threading.Thread]]:
    """Launchers that come to the barrier; each has left it in the end."""
    threads: list[threading.Thread] = []

    def comes(store: HashStore) -> threading.Thread:
        def run() -> None:
            barrier(store, 3, _TERMINAL_STATE_SYNC_ID, LIMIT)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return threads[-1]

    yield comes
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


def come(store: HashStore, count: int) -> None:
    """So many launchers are in the barrier."""
    until(lambda: int(store.add(exitbarrier._MEMBERS, 0)) == count, f"{count} launchers in the barrier")


def test_the_barrier_opens_for_those_that_live(others: Callable[[HashStore], threading.Thread]) -> None:
    store = HashStore()
    waiting = others(store)
    assert wait_for_living(store, 3, lambda size: size - 1, FOREVER) == 1
    barrier(store, 3, _TERMINAL_STATE_SYNC_ID, 1.0)
    waiting.join(LIMIT)


def test_living_ranks_are_waited_for(others: Callable[[HashStore], threading.Thread]) -> None:
    """It has ranks that are not at their end; the third one has died."""
    store, looks = HashStore(), 0

    def living(size: int) -> int:
        nonlocal looks
        looks += 1
        if looks == 60:  # long behind the grace
            others(store)
        return size - 1

    assert wait_for_living(store, 3, living, FOREVER) == 1
    assert looks > 60
    barrier(store, 3, _TERMINAL_STATE_SYNC_ID, 1.0)


@pytest.mark.parametrize("living", [lambda size: None, lambda size: size], ids=["unknown", "all"])
def test_torchs_own_limit_stays(living: Callable[[int], int | None]) -> None:
    store = HashStore()
    assert wait_for_living(store, 3, living, LIMIT) == 0
    assert not store.check([f"{_TERMINAL_STATE_SYNC_ID}/last_member"])


def test_one_that_comes_back_starts_the_grace_period_again(clock: Clock) -> None:
    """Its connection was cut for a moment."""
    turns, begun = iter(range(10_000)), clock.now
    assert wait_for_living(HashStore(), 2, lambda size: 2 if next(turns) == 30 else 1, LIMIT) == 1
    assert clock.now - begun >= 30 * exitbarrier.LOOK + exitbarrier.GRACE


def test_a_store_that_is_gone_is_torchs_own_matter() -> None:
    class Gone(HashStore):
        def add(self, key: str, amount: int) -> int:
            raise DistNetworkError("Connection reset by peer")

    assert wait_for_living(Gone(), 2, lambda size: 1, LIMIT) == 0


def test_all_have_come(others: Callable[[HashStore], threading.Thread]) -> None:
    store = HashStore()
    others(store), others(store)
    come(store, 2)
    assert wait_for_living(store, 3, lambda size: 1, LIMIT) == 0
    barrier(store, 3, _TERMINAL_STATE_SYNC_ID, 1.0)


def test_the_controller_counts_the_launchers_that_are_connected() -> None:
    controller = ControllerThread(new_token())
    keepers, end = controller._controller.keepers, controller.endpoint
    try:
        one, two = (BufferKeeper(end.address, end.token) for _ in range(2))
        until(lambda: keepers.connected == 2, "both are connected")
        two.close()
        until(lambda: keepers.connected == 1, "one has gone")
        assert (keepers.most, controller.living_launchers(0, 3)) == (2, None), "no rank has joined"
        one.close()
    finally:
        controller.stop()


def test_a_launcher_that_waits_to_be_taken_in_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has come back to a job that goes on with fewer ranks, and is connected like all others."""
    controller = ControllerThread(new_token())
    keepers, end = controller._controller.keepers, controller.endpoint
    member: Any = SimpleNamespace(left=True, gone=False)
    found: Any = SimpleNamespace(
        hello=SimpleNamespace(incarnation=0), machine=SimpleNamespace(members={0: member}), again=None
    )
    monkeypatch.setattr(controller, "_attempt", lambda number: found)
    try:
        one, guest = (BufferKeeper(end.address, end.token) for _ in range(2))
        one.can_fork(m.Forks(attempt=0, cannot=""))
        until(lambda: keepers.connected == 2 and keepers.taking_part(0) == 1, "both are connected")
        assert controller.living_launchers(0, 3) == 3
        found.again = SimpleNamespace(members=(0, 1))
        assert controller.living_launchers(0, 3) == 2
        one.close()
        guest.close()
    finally:
        controller.stop()
