"""What a training does by another leader's orders, without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lastgasp.errors import ControlError, NotSaveable
from lastgasp.gasp.going_on import Fewer, Resize
from lastgasp.gasp.rank_status import gone_on
from lastgasp.ports import Repaired
from lastgasp.pytorch.loop import joining, led
from lastgasp.pytorch.loop.led import Led, Peer, meet
from lastgasp.pytorch.loop.memory import FromMemory
from lastgasp.pytorch.loop.renumber import numbered


class Here:
    """Stands for an `AgainHere` and its run, of rank 1 of 2 on step 8."""

    def __init__(self, own: bytes = b"own") -> None:
        self.bound: list[Any] = []
        self.why = ""
        status = SimpleNamespace(durable=3, no_fewer="")
        session = SimpleNamespace(auxiliary=lambda step, seconds: {0: b"other"}, status=status)
        self.life = life = SimpleNamespace(session=session, alike=True)
        life.bind = lambda training: self.bound.append(training.source)
        life.place = SimpleNamespace(rank=1)
        self.dumped: list[int] = []
        self.run: Any = SimpleNamespace(
            place=SimpleNamespace(rank=1), life=life, source=SimpleNamespace(capture=lambda step: own), dump=self.dump
        )

    def dump(self, step: int, aux: Any) -> dict[str, Any]:
        """The state, with the random states that it is given."""
        if step != 8:
            raise NotSaveable(f"this rank is at step 8, not on {step}")
        return {"step": step, "aux": dict(aux)}

    def cannot_now(self) -> str:
        """What the test wants."""
        return self.why

    def before_dump(self, step: int) -> None:
        """Noted."""
        self.dumped.append(step)

    def values(self) -> bytes:
        """What stands beside the state."""
        return b"values"

    def present(self) -> None:
        """Nothing was there."""

    def source_of(self, memory: Any, place: Any) -> Any:
        """What saves it."""
        return SimpleNamespace(rank=1, present=None, memory=memory)

    def without_others(self, *refusals: str) -> Led:
        """A training of which the ranks have said so whether it may go on with fewer."""
        self.life.session.gather = lambda tag, own: [own, *(one.encode() for one in refusals)]
        one = made(self)
        one.agree_on_fewer(Fewer(may=True))
        return one


def made(here: Here) -> Led:
    """Of a job on one host."""
    again_here: Any = here
    return Led(again_here, ())


def test_from_the_rollback_on_a_fault_is_answered_with_the_copy() -> None:
    here = Here()
    one = made(here)
    assert one.clean(False) == 0
    one.rollback(8)
    [source] = here.bound
    assert isinstance(source, FromMemory)
    assert one._memory is not None and one._memory.durable == 3
    assert one._memory.checkpoint["aux"] == {0: b"other", 1: b"own"}
    assert here.dumped == [8] and one._memory.values == b""


def test_who_gives_its_state_gives_what_stands_beside_it() -> None:
    one = made(Here())
    one.repair(8, {"src": [1], "dst": [0]}, True)
    one.rollback(8)
    assert one._memory is not None and one._memory.values == b"values"


@pytest.mark.parametrize(("own", "step"), [(b"", 8), (b"own", 9)])
def test_what_this_rank_does_not_have_ends_the_repair(own: bytes, step: int) -> None:
    here = Here(own)
    with pytest.raises(NotSaveable):
        made(here).rollback(step)
    assert here.bound == []


def test_a_rank_that_takes_its_state_saves_nothing_until_it_has_it() -> None:
    here = Here()
    one = made(here)
    one.repair(8, {"src": [0], "dst": [1]}, True)
    one.rollback(8)
    with pytest.raises(NotSaveable, match="not begun"):
        here.bound[0].save(8, {}, "")


def test_ranks_that_differ_take_nothing_from_each_other() -> None:
    here = Here()
    here.life.alike = False
    with pytest.raises(NotSaveable, match="different states"):
        made(here).repair(8, {"src": [0], "dst": [1]}, True)


def test_a_second_fault_before_a_new_step_is_not_repaired() -> None:
    here = Here()
    one = made(here)
    one.rollback(8)
    assert one.clean(False) == 1
    here.why = "no room"
    assert made(here).clean(False) == 1


def agreeing(here: Here, why: str = "") -> list[Any]:
    """What the ranks say to the controller, which answers so."""
    said: list[Any] = []

    def agree(fewer: Any, seconds: float) -> str:
        said.append(fewer)
        return why

    here.life.session.agree = agree
    return said


def test_who_goes_on_without_others_keeps_the_step_and_agrees_with_the_controller() -> None:
    here = Here()
    said, one = agreeing(here), here.without_others("")
    one.resize(2, 8, (0, 1, 3), False)
    assert said == [Resize(incarnation=2, step=8, members=(0, 1, 3))]
    assert one._memory is not None and (one._memory.step, one._memory.values) == (8, b"") and len(here.bound) == 1
    assert one.clean(False) == 1  # no second repair before a new step


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("loader", "ElasticLoader"), ("room", "no room"), ("differ", "different states"), ("step", "not on 9"),
        ("controller", "others go on from step 9"),
    ],
)  # fmt: skip
def test_who_cannot_go_on_without_others_refuses(trouble: str, why: str) -> None:
    here = Here()
    agreeing(here, why if trouble == "controller" else "")
    one = here.without_others(led.NOT_FEWER if trouble == "loader" else "")
    here.why, here.life.alike = "no room" if trouble == "room" else "", trouble != "differ"
    with pytest.raises(NotSaveable, match=why):
        one.resize(2, 9 if trouble == "step" else 8, (0, 1, 3), False)


def test_all_ranks_know_why_one_of_them_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(led, "host_identity", lambda: "here")
    other = msgspec.json.encode(Peer("there", 7, ("10.0.0.2 4000",), "recovery=restart", "no agent"))
    session: Any = SimpleNamespace(gather=lambda tag, own: [own, other])
    peers, why, no_recover = meet(session, "", "")
    assert (why, no_recover) == ("rank 1: recovery=restart", "no agent")
    assert [peer.host for peer in peers] == ["here", "there"]


def test_ranks_that_cannot_be_asked_are_not_led() -> None:
    def gather(tag: str, own: bytes) -> list[bytes]:
        raise ControlError("rank 1 is gone")

    session: Any = SimpleNamespace(gather=gather)
    why = "the ranks could not be asked: rank 1 is gone"
    assert meet(session, "", "") == ((), why, why)
    here = Here()
    here.life.session.gather = gather
    one = made(here)
    one.agree_on_fewer(Fewer(may=True))
    assert one.no_fewer == why


def test_nobody_is_left_out_before_all_have_said_that_they_can_do_its_part() -> None:
    here = Here()
    agreeing(here)
    with pytest.raises(NotSaveable, match="ElasticLoader"):
        made(here).resize(2, 8, (0, 1, 3), False)
    assert here.without_others("", "no").no_fewer == "no"


def test_parts_that_cannot_be_shared_evenly_are_left_to_a_dump() -> None:
    here = Here()
    said, one = agreeing(here), made(here)
    here.life.session.gather = lambda tag, own: [own, b""]
    one.agree_on_fewer(Fewer(may=True, parts=8))
    with pytest.raises(NotSaveable, match="8 micro-batches cannot be shared evenly by 3 ranks"):
        one.resize(2, 8, (0, 1, 3), False)
    assert said == [] and here.bound == []
    one.resize(2, 8, (0, 1), False)
    assert len(said) == 1


def test_without_a_place_to_meet_no_new_process_is_waited_for() -> None:
    with pytest.raises(NotSaveable, match="before its process group"):
        made(Here()).rebuild([0])


class Place:
    """What would be a `Meeting`."""

    def __init__(self) -> None:
        self.said: list[tuple[int, ...] | str] = []

    def rebuild(self, lost: tuple[int, ...], grows: bool = False) -> None:
        self.said.append(lost)
        self.said += ["grows"] if grows else []

    def look(self) -> None:
        self.said.append("look")


def test_who_goes_on_agrees_where_all_meet_and_only_before_a_new_step(monkeypatch: pytest.MonkeyPatch) -> None:
    place, one = Place(), made(Here())
    monkeypatch.setattr(joining, "meeting", lambda: place)
    one.rebuild([0])
    one.rollback(8)
    assert place.said == [(0,), "look"]
    with pytest.raises(NotSaveable, match="no step was completed"):
        one.rebuild([0])
    with pytest.raises(NotSaveable, match="no step was completed"):
        one.rollback(8)


def test_who_takes_in_others_agrees_where_all_meet_before_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    here, place = Here(), Place()
    said, one = agreeing(here), here.without_others("")
    with pytest.raises(NotSaveable, match="before its process group"):
        one.takes_in((1,))
    monkeypatch.setattr(joining, "meeting", lambda: place)
    one.takes_in((1,))
    one.resize(2, 8, (0, -1, 1), True)
    assert one._memory is not None and one._memory.values == b"values"
    assert place.said == [(1,), "grows", "look"]
    assert said == [Resize(incarnation=2, step=8, members=(0, -1, 1))]
    with pytest.raises(NotSaveable, match="no step was completed"):
        one.takes_in((1,))


def test_the_numbers_of_who_takes_in_others_are_the_leaders() -> None:
    """Rank 2 of the complete job, which was number 1 meanwhile, gives to rank 1."""
    again = gone_on(Repaired(2, 8, 2, (1,), (1,), (0, -1, 1))).again
    assert again is not None
    one, environment = numbered(again, 1), numbered(again, 1).environment
    assert (one.rank, one.source, one.takers, one.rung) == (2, 2, (1,), "grow")
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("2", "3")
    fewer = gone_on(Repaired(1, 8, members=(0, 2))).again
    assert fewer is not None and (numbered(fewer, 2).rank, numbered(fewer, 2).rung) == (1, "shrink")
