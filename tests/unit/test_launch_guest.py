"""How a launcher that comes back is invited, claims its place, and is taken in or sent to the rendezvous."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from lastgasp import exitcodes, sharing
from lastgasp.gasp.again import NEW
from lastgasp.launch import guest
from lastgasp.launch.guest import ENDED, Guest, Host, Plan, invited
from support.waiting import until

CODE = {"__main__": "1"}


class Round:
    """One round of a rendezvous, complete: two hosts with two ranks each, all but the first of which are lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, hosts: int = 2) -> None:
        monkeypatch.setattr(guest, "LOOK", 0.0)
        self.store, self.directory = HashStore(), directory
        workers = [SimpleNamespace(world_size=2 * hosts) for _ in range(2)]
        group: Any = SimpleNamespace(workers=workers, group_world_size=hosts, store=self.store, master_addr="a",
                                     master_port=7)  # fmt: skip
        self.host = Host(group, lambda: str(self.directory))
        self.state = SimpleNamespace(complete=True, closed=False, participants={"ha": 0}, round=3)
        self.waiting = 0
        self.closed: list[str] = []

    def invites(self, *seats: int, code: dict[str, str] = CODE) -> None:
        """The first host looks until its file is in the directory of the job."""
        assert self.host.look([*seats], code) == []
        until(lambda: self.host._marker is None or bool(self.host._marker.name), "the file is there")
        assert self.host.look([*seats], code) == []

    def launcher(self, ranks: int = 2) -> Any:
        """The spec of a launcher that has just been started."""
        handler = SimpleNamespace(
            num_nodes_waiting=lambda: self.waiting,
            _state_holder=SimpleNamespace(state=self.state),
            _this_node="hb",
            shutdown=lambda: self.closed.append("closed"),
            _get_store=lambda: self.store,
        )
        return SimpleNamespace(rdzv_handler=handler, local_world_size=ranks, entrypoint="python")

    def guest(self) -> Guest:
        """Who is invited."""
        self.invites(0, 1)
        found = invited(self.launcher())
        assert found is not None
        until(lambda: bool(found._look._found), "it has looked at the directory")
        return found


@pytest.fixture
def round_(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Round]:
    """As above."""
    one = Round(monkeypatch, tmp_path)
    yield one
    one.host.close()
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("why", ["starting", "closed", "in it", "other ranks", "none is missing", "no code"])
def test_any_other_launcher_joins_the_rendezvous(why: str, round_: Round) -> None:
    round_.invites(*([0, 1, 2] if why == "none is missing" else [0, 1]), code={} if why == "no code" else CODE)
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


def test_a_host_that_does_not_see_the_directory_stays_missing(
    round_: Round, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its ranks would have got their state from memory, and saved onto a disk of its own. It may come back again."""
    monkeypatch.setattr(sharing, "SEEN_WITHIN", 0.0)
    round_.invites(0, 1)
    invitation = guest._invitation(round_.launcher())
    assert invitation is not None and invitation.directory == str(tmp_path)
    own = tmp_path.parent / f"{tmp_path.name}-own"
    own.mkdir()
    key = "lastgasp/guest/invitation"
    said = round_.store.get(key)
    round_.store.set(key, said.decode().replace(str(tmp_path), str(own)))
    spec = round_.launcher()
    one = invited(spec)
    assert one is not None
    until(lambda: bool(one._look.blind), "it has looked")
    one.ready()
    assert round_.host.look([0, 1], CODE) == [], "it does not say that it is ready"
    with pytest.raises(SystemExit) as ends:
        one.refused()
    assert ends.value.code == exitcodes.REFUSED
    assert "is not the directory that the job's other hosts have" in capsys.readouterr().err
    assert spec.rdzv_handler.shutdown() and round_.closed == [], "the rendezvous stays open"
    with caplog.at_level(logging.WARNING, "lastgasp.launch"):
        round_.host.look([0, 1], CODE)
    [line] = caplog.messages
    assert "stays missing" in line and str(own) in line
    assert invited(round_.launcher()) is not None, "with its mount it is invited again"


def test_two_launchers_that_come_back_at_once_are_invited_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The second one would have joined the rendezvous, which restarts all ranks."""
    round_ = Round(monkeypatch, tmp_path, hosts=3)
    monkeypatch.setattr(guest, "LOOK", 0.01)
    one, other = round_.guest(), list[Guest | None]()
    round_.store.set("lastgasp/guest/claim/1", "another host 7")  # in the test they are one process
    waits = threading.Thread(target=lambda: other.append(invited(round_.launcher())))
    waits.start()
    one.ready()
    until(lambda: round_.host.look([0, 1], CODE) == [2, 3], "the first one is ready")
    assert waits.is_alive() and not other
    until(lambda: round_.host.look([0, 1, 2, 3], CODE) == [] and bool(other), "the second one is invited")
    waits.join(60)
    [found] = other
    assert found is not None and (found.invitation.group_rank, found.invitation.number) == (2, 2)
    round_.host.close()


def test_who_waits_for_its_turn_joins_the_rendezvous_once_that_goes_on_or_it_takes_too_long(
    round_: Round, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_.guest()
    round_.store.set("lastgasp/guest/claim/1", "another host 7")
    monkeypatch.setattr(guest, "TURN", -1.0)
    assert invited(round_.launcher()) is None
    monkeypatch.setattr(guest, "TURN", 60.0)
    round_.state.complete = False
    assert invited(round_.launcher()) is None


def test_a_guest_of_which_nothing_is_heard_makes_room_for_the_next(
    round_: Round, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guest, "BEAT", 0.0)
    one = round_.guest()
    round_.host.look([0, 1], CODE)
    assert one.refused() == ""
    monkeypatch.setattr(guest, "SILENT", 0.0)
    with caplog.at_level(logging.WARNING, "lastgasp.launch"):
        round_.host.look([0, 1], CODE)
    assert "has not been heard of" in caplog.text
    assert "has not been heard of" in one.refused()
    found = invited(round_.launcher())
    assert found is not None and found.invitation.number > 1
