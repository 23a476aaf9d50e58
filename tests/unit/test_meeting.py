"""What survivors of several hosts save together once the controller is gone with the first one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lastgasp import _clock
from lastgasp.errors import DeadlineExceeded, NotSaveable
from lastgasp.gasp import meeting
from lastgasp.gasp.decision import Decision, GiveUp, NothingToSave, SavePlan
from lastgasp.gasp.meeting import Meeting, Published, Seat, Written, decide_together, remove_meetings
from lastgasp.topology import Place

ALONE = ((0,), (1,), (2,))
A = Seat(rank=0, host="a", step=10, durable=0, arenas={0: (10, 9, 8, 4)}, copies={2: (8, 4)})
B = Seat(rank=1, host="b", step=10, durable=0, arenas={1: (10, 9, 8, 4)}, copies={0: (8, 4)})
C = Seat(rank=2, host="c", step=10, durable=0, arenas={2: (10, 9, 8, 4)}, copies={1: (8, 4)})
"""Three hosts in a ring, whose partners have every fourth step."""


def seats(*those: Seat) -> dict[int, Seat]:
    """By rank."""
    return {seat.rank: seat for seat in those}


def changed(seat: Seat, **values: Any) -> Seat:
    """Another one."""
    return msgspec.structs.replace(seat, **values)


@pytest.mark.parametrize(("gone", "scribe"), [(0, 1), (1, 2), (2, 0)])
def test_the_partner_writes_the_lost_shard_and_the_others_go_back_to_its_step(gone: int, scribe: int) -> None:
    left = seats(*(seat for seat in (A, B, C) if seat.rank != gone))
    plan = decide_together(left, ALONE, 3)
    assert isinstance(plan, SavePlan)
    wanted = tuple(scribe if rank == gone else rank for rank in range(3))
    assert (plan.step, plan.lost, plan.savers) == (8, 2, wanted)
    assert (plan.arenas, plan.buddies) == ((0, 1, 2), frozenset({gone}))


def test_all_alive_save_what_they_hold() -> None:
    plan = decide_together(seats(A, B, C), ALONE, 3)
    assert isinstance(plan, SavePlan) and (plan.step, plan.savers, plan.arenas) == (10, (0, 1, 2), ())


def test_a_dead_ranks_arena_is_written_by_one_of_its_host() -> None:
    dead = changed(B, rank=3, host="a", arenas={0: (10, 8), 3: (10, 8)}, copies={})
    plan = decide_together(seats(dead, C), ((0,), (3,), (2,)), 4)
    assert isinstance(plan, SavePlan) and (plan.step, plan.savers, plan.arenas) == (10, (3, 3, 2), (0, -1, -1))


def test_where_a_shard_is_nowhere_the_steps_are_lost_and_never_said_to_be_on_disk() -> None:
    given_up = decide_together(seats(B), ALONE, 3)
    assert isinstance(given_up, GiveUp) and given_up.lost == 10
    given_up = decide_together(seats(changed(B, durable=6)), ALONE, 3)
    assert isinstance(given_up, GiveUp) and given_up.lost == 4
    assert isinstance(decide_together(seats(*(changed(one, durable=10) for one in (A, B, C))), ALONE, 3), NothingToSave)


def of(folder: Path, rank: int, since_s: int = 1000) -> Meeting:
    """That rank's."""
    return Meeting(folder, Place(rank=rank, world_size=3, replicas=ALONE, job="j"), since_s)


def nothing() -> None:
    """Nothing is saved elsewhere."""


def agreed(folder: Path, *those: Seat, seconds: float = 20.0) -> list[Decision]:
    """What each finds that comes to the meeting."""
    found: list[Decision] = []

    def come(seat: Seat) -> None:
        own = of(folder, seat.rank)
        own.join(seat)
        found.append(own.agree(seconds, nothing))

    threads = [threading.Thread(target=come, args=(seat,)) for seat in those]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_all_find_the_one_plan_and_each_hears_of_the_end(tmp_path: Path) -> None:
    one, other = agreed(tmp_path, B, C)
    assert isinstance(one, SavePlan) and one == other and one.savers == (1, 1, 2)
    soon = _clock.monotonic() + 20
    of(tmp_path, 2).wrote(Written(part=b"c", nbytes=2))
    of(tmp_path, 1).wrote(Written(part=b"b", nbytes=1))
    written = of(tmp_path, 1).parts(one.savers, soon)
    assert {rank: (each.part, each.nbytes) for rank, each in written.items()} == {1: (b"b", 1), 2: (b"c", 2)}
    of(tmp_path, 1).publish(Published(step=8, path="there", nbytes=3))
    assert of(tmp_path, 2).published(soon).path == "there"
    remove_meetings(tmp_path, "another job")
    assert len(list(tmp_path.iterdir())) == 1
    remove_meetings(tmp_path, "j")
    assert list(tmp_path.iterdir()) == []


def test_every_wait_has_an_end(tmp_path: Path) -> None:
    [alone] = agreed(tmp_path, B, seconds=0.1)
    assert isinstance(alone, GiveUp)
    with pytest.raises(DeadlineExceeded, match="published"):
        of(tmp_path, 1).published(_clock.monotonic())
    with pytest.raises(DeadlineExceeded, match="part-2"):
        of(tmp_path, 1).parts((2,), _clock.monotonic())
    of(tmp_path, 2).wrote(Written(why="no space left"))
    with pytest.raises(NotSaveable, match="rank 2: no space left"):
        of(tmp_path, 1).parts((2,), _clock.monotonic())


def test_what_is_found_elsewhere_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SETTLED", 0.0)

    def found() -> None:
        raise LookupError("saved by the controller's side")

    own = of(tmp_path, 1)
    own.join(B)
    with pytest.raises(LookupError):
        own.agree(20.0, found)


def test_a_plan_that_is_not_written_to_its_end_and_one_of_another_run_are_none(tmp_path: Path) -> None:
    agreed(tmp_path, A, B, C)
    [plan] = tmp_path.glob("*/plan")
    plan.write_bytes(plan.read_bytes()[:-1])
    own = of(tmp_path, 1, since_s=2000)
    own.join(B)
    assert isinstance(own.agree(0.0, nothing), GiveUp)
    for path in tmp_path.glob("*/rank-*"):
        path.unlink()
    again = of(tmp_path, 1)
    again.join(B)
    assert isinstance(again.agree(0.0, nothing), GiveUp)
