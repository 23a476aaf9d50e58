"""A store of the rendezvous that stops answering holds up nobody who watches ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from lastgasp import _clock
from lastgasp.launch import guest
from lastgasp.launch.bounded import Bounded, BoundedStore, NodesWaiting, Unanswered
from lastgasp.launch.guest import Guest, Host, Invitation
from support.waiting import until

CODE = {"__main__": "1"}


class Stalling:
    """A store whose host may be stopped; what was asked meanwhile is answered once it goes on."""

    def __init__(self) -> None:
        self.inner, self.goes = HashStore(), threading.Event()
        self.goes.set()
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> Any:
            self.asked += 1
            assert self.goes.wait(60)
            return getattr(self.inner, name)(*args)

        return ask


@pytest.fixture
def store() -> Iterator[Stalling]:
    """One that answers in the end."""
    found = Stalling()
    yield found
    found.goes.set()
    for thread in threading.enumerate():
        if thread.name == "lastgasp-store":
            thread.join(30)


def test_an_answer_an_error_and_a_call_that_is_late() -> None:
    bounded, goes = Bounded(60), threading.Event()
    assert bounded(lambda: 7) == 7
    with pytest.raises(KeyError, match="gone"):
        bounded(lambda: dict[str, int]()["gone"])
    bounded._limit = 0.05
    with pytest.raises(Unanswered, match="not answered in"):
        bounded(lambda: goes.wait(60))
    with pytest.raises(Unanswered, match="earlier"):
        bounded(lambda: 7)
    goes.set()
    assert bounded._under_way is not None
    bounded._under_way.join(30)
    bounded._limit = 60
    assert bounded(lambda: 8) == 8


def test_a_store_that_answers_is_as_ever(store: Stalling) -> None:
    bounded = BoundedStore(store)
    assert not bounded.check("a")
    bounded.set("a", "b")
    assert (bounded.check("a"), bounded.get("a")) == (True, b"b")
    assert (bounded.add("n", 2), bounded.add("n", 1)) == (2, 3)
    bounded.delete("a")
    assert not bounded.check("a")


def test_threads_wait_for_each_others_calls() -> None:
    """None of them takes the other's call for an answer that is late."""
    bounded, first, goes, found = Bounded(60), threading.Event(), threading.Event(), list[int]()

    def slow() -> int:
        first.set()
        goes.wait(60)
        return 1

    threads = [threading.Thread(target=lambda: found.append(bounded(slow)))]
    threads[0].start()
    assert first.wait(60)
    threads.append(threading.Thread(target=lambda: found.append(bounded(lambda: 2))))
    threads[1].start()
    goes.set()
    for thread in threads:
        thread.join(60)
    assert sorted(found) == [1, 2]


def test_who_waits_is_asked_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waiting, asked = [10.0], [0], list[float]()
    monkeypatch.setattr(_clock, "monotonic", lambda: now[0])

    def ask() -> int:
        asked.append(now[0])
        return waiting[0]

    nodes = NodesWaiting(ask)
    assert [nodes() for _ in range(3)] == [0, 0, 0] and asked == [10.0]
    now[0], waiting[0] = 11.0, 2
    assert [nodes(), nodes()] == [2, 2] and asked == [10.0, 11.0, 11.0]
    waiting[0] = 0
    assert [nodes(), nodes()] == [0, 0] and asked[3:] == [11.0]


def test_a_rendezvous_that_does_not_answer_has_nobody_waiting() -> None:
    goes = threading.Event()
    nodes = NodesWaiting(lambda: goes.wait(60) and 1)
    nodes._bounded._limit = 0.05
    assert nodes() == 0
    goes.set()
    assert nodes._bounded._under_way is not None
    nodes._bounded._under_way.join(30)


def test_a_launcher_that_invites_is_not_held_up(
    store: Stalling, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(guest, "LOOK", 0.0)
    group: Any = SimpleNamespace(workers=[SimpleNamespace(world_size=2)], group_world_size=2, store=store,
                                 master_addr="a", master_port=7)  # fmt: skip
    host = Host(group, lambda: str(tmp_path))
    marker = host._marked() or host._marker
    assert marker is not None
    until(lambda: bool(marker.name), "the file is there")
    store.goes.clear()
    assert host.look([0], CODE) == []
    assert host.look([0], CODE) == [], "one call is enough"
    assert store.asked == 1
    host.close()


def test_a_guest_is_not_held_up(store: Stalling, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(guest, "LOOK", 0.0)
    handler = SimpleNamespace(
        num_nodes_waiting=lambda: 0, _state_holder=SimpleNamespace(state=SimpleNamespace(round=1))
    )
    (tmp_path / "shared").touch()
    one = Guest(Invitation(1, 1, 2, 1, "a", 7, CODE, str(tmp_path), "shared"), store, handler)
    until(lambda: one._look.sees, "it has looked")
    store.goes.clear()
    one.ready()
    assert (one.plan(), one.refused()) == (None, "")
    assert store.asked == 1
    store.goes.set()
    assert one._store._bounded._under_way is not None
    one._store._bounded._under_way.join(30)
    one.ready()
    assert store.inner.check(["lastgasp/guest/ready/1"])
