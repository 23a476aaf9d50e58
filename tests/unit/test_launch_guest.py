"""How a launcher that comes back is invited, claims its place, and is taken in or sent to the rendezvous."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from lastgasp.gasp.again import NEW
from lastgasp.launch import guest
from lastgasp.launch.guest import ENDED, Guest, Host, Plan, invited

CODE = {"__main__": "1"}


class Round:
    """One round of a rendezvous, complete: two hosts with two ranks each, the second of which is lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(guest, "LOOK", 0.0)
        self.store = HashStore()
        workers = [SimpleNamespace(world_size=4) for _ in range(2)]
        group: Any = SimpleNamespace(workers=workers, group_world_size=2, store=self.store, master_addr="a",
                                     master_port=7)  # fmt: skip
        self.host = Host(group)
        self.state = SimpleNamespace(complete=True, closed=False, participants={"ha": 0}, round=3)
        self.waiting = 0

    def launcher(self, ranks: int = 2) -> Any:
        """The spec of a launcher that has just been started."""
        handler = SimpleNamespace(
            num_nodes_waiting=lambda: self.waiting,
            _state_holder=SimpleNamespace(state=self.state),
            _this_node="hb",
            _get_store=lambda: self.store,
        )
        return SimpleNamespace(rdzv_handler=handler, local_world_size=ranks, entrypoint="python")

    def guest(self) -> Guest:
        """Who is invited."""
        assert self.host.look([0, 1], CODE) == []
        found = invited(self.launcher())
        assert found is not None
        return found


@pytest.fixture
def round_(monkeypatch: pytest.MonkeyPatch) -> Round:
    """As above."""
    return Round(monkeypatch)


def test_a_launcher_takes_the_place_of_the_lost_one(round_: Round) -> None:
    one = round_.guest()
    group: Any = SimpleNamespace()
    one.take_place(group, round_.launcher())
    assert [(worker.local_rank, worker.global_rank, worker.world_size) for worker in group.workers] == [
        (0, 2, 4), (1, 3, 4),
    ]  # fmt: skip
    assert (group.group_rank, group.group_world_size, group.master_addr, group.master_port) == (1, 2, "a", 7)
    assert (one.plan(), one.refused(), one.code) == (None, "", CODE)
    one.ready()
    assert round_.host.look([0, 1], CODE) == [2, 3]
    round_.host.plans((0, 1, NEW, NEW), [0, 1, 2, 3])
    assert one.plan() == Plan((0, 1, NEW, NEW), (0, 1, 2, 3))
    assert round_.host.look([0, 1, 2, 3], CODE) == [], "they are there"
    assert invited(round_.launcher()) is None, "the invitation is withdrawn"


def test_a_guest_that_is_not_taken_in_is_told(round_: Round) -> None:
    one = round_.guest()
    one.ready()
    assert round_.host.look([0, 1], CODE) == [2, 3]
    round_.host.refuse("no room")
    assert one.refused() == "no room"
    assert round_.host.look([0, 1], CODE) == []
    assert invited(round_.launcher()) is None


@pytest.mark.parametrize("ready", [True, False])
def test_a_guest_is_told_that_the_job_has_ended(ready: bool, round_: Round) -> None:
    """Its ranks may still be starting: nobody waits for them."""
    one = round_.guest()
    if ready:
        one.ready()
        assert round_.host.look([0, 1], CODE) == [2, 3]
    assert not one.ended
    round_.host.end()
    round_.host.end()
    assert (one.refused(), one.ended) == (ENDED, True)
    assert invited(round_.launcher()) is None, "the invitation is withdrawn"
    assert round_.host.look([0, 1], CODE) == [], "and there is no other one"


def test_a_guest_notices_that_the_job_has_restarted(round_: Round) -> None:
    one = round_.guest()
    assert one.refused() == ""
    round_.state.round = 4
    assert one.refused() == "the job has restarted meanwhile"


@pytest.mark.parametrize("why", ["claimed", "starting", "closed", "in it", "other ranks", "none is missing", "no code"])
def test_any_other_launcher_joins_the_rendezvous(why: str, round_: Round) -> None:
    round_.host.look([0, 1, 2] if why == "none is missing" else [0, 1], {} if why == "no code" else CODE)
    if why == "claimed":
        assert invited(round_.launcher()) is not None
        round_.store.set("lastgasp/guest/claim/1", "another host 7")
    round_.state.complete = why != "starting"
    round_.state.closed = why == "closed"
    if why == "in it":
        round_.state.participants["hb"] = 1
    assert invited(round_.launcher(ranks=1 if why == "other ranks" else 2)) is None


def test_what_cannot_be_read_is_no_invitation(round_: Round) -> None:
    round_.store.set("lastgasp/guest/invitation", "{")
    assert invited(round_.launcher()) is None
    handler: Any = SimpleNamespace(num_nodes_waiting=lambda: 0)
    spec: Any = SimpleNamespace(rdzv_handler=handler, local_world_size=2, entrypoint="python")
    assert invited(spec) is None, "a rendezvous of another kind"
