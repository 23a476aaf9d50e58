"""Which steps are copied into the arenas, and that a rank without one keeps nobody waiting."""

from __future__ import annotations

import pytest

from lastgasp import _clock, arena
from lastgasp.arena import Arena, steps
from lastgasp.arena_filling import MEASURED, WARM_UP, ArenaMode, BuddyMode, Filling, every_of, lost_with_a_host
from lastgasp.errors import ControlError
from lastgasp.topology import ReplicaGroups

LAST = WARM_UP + MEASURED


class Ranks:
    """Stands for the other ranks: what this one says comes back, with what a slow one says of its copies."""

    def __init__(self, slow: str = "0.025", other: str = "") -> None:
        self.other = other  # what it says of its host, its memory and its buddy
        self.slow, self.asked, self.notes = slow.encode(), list[str](), list[str]()

    def gather(self, tag: str, payload: bytes) -> list[bytes]:
        """As `ports.Gather`."""
        self.asked.append(tag)
        return [payload, self.slow] if "every" in tag else [payload, self.other.encode() or payload]

    def filling(self, arena: Arena, mode: ArenaMode, buddy: BuddyMode = 0) -> Filling:
        """That of rank 0."""
        return Filling(arena, mode, self.gather, self.notes.append, 0, buddy=buddy)


@pytest.mark.parametrize("mode", ["auto", 1])
@pytest.mark.parametrize("fails", [False, True])
def test_every_rank_is_asked_the_same(mode: ArenaMode, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_clock, "monotonic", lambda: 7.0)  # this rank's copies take no time
    own, ranks = Arena(), Ranks()
    filling = ranks.filling(own, mode)
    if fails:
        monkeypatch.setattr(own, "reserve", lambda size: (_ for _ in ()).throw(OSError("no such memory")))
    for step in range(1, LAST + 3):
        filling.fill(step, lambda: [b"state"])
    assert ranks.asked == ["loop/arena/1", *([f"loop/arena/every/{LAST}"] if mode == "auto" else [])]
    assert filling.every == (0 if fails else 3 if mode == "auto" else 1)
    assert [note.partition(":")[0] for note in ranks.notes] == (
        ["the arena of rank 0 cannot be filled (no such memory)"] if fails else []
    )
    assert steps(own.fd, own.identity) == (() if fails else (12, 10) if mode == "auto" else (12, 11))
    own.close()


def test_a_rank_that_has_no_payload_keeps_nobody_waiting() -> None:
    own, ranks = Arena(), Ranks()
    filling = ranks.filling(own, 1)

    def nothing() -> list[bytes]:
        raise ValueError("it is unsound")

    for step in (1, 2):
        filling.fill(step, nothing)
    assert ranks.asked == ["loop/arena/1"] and filling.every == 0
    assert ["it is unsound" in note for note in ranks.notes] == [True]
    own.close()


def test_too_little_memory_is_told_with_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "available", lambda: 100_000)
    own, ranks = Arena(), Ranks()
    filling = ranks.filling(own, 1)
    filling.fill(1, lambda: [bytes(1_000_000)])
    assert (filling.every, own.capacity) == (0, 0)
    assert len(ranks.notes) == 1 and "this host's 2 ranks need 4 MB, and 0 MB of memory are available" in ranks.notes[0]
    own.close()


def test_what_a_training_began_with_is_kept_where_a_rank_dies_at_the_first_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The survivors have completed the step, the dead one has not: the one before is in all arenas, and saved."""
    own, ranks = Arena(), Ranks()
    own.reserve(1000)
    own.copy(8, [b"begun with"])

    def gather(tag: str, payload: bytes) -> list[bytes]:
        raise ControlError("rank 1 is gone")

    monkeypatch.setattr(ranks, "gather", gather)
    filling = ranks.filling(own, 1)
    filling.fill(9, lambda: [b"state"])
    assert filling.every == 0 and "could not compare their memory (rank 1 is gone)" in ranks.notes[0]
    assert steps(own.fd, own.identity) == (8,)
    own.close()


def test_n_keeps_copies_within_the_budget() -> None:
    assert [every_of(part) for part in (0.0, 0.01, 0.011, 0.02, 0.5)] == [1, 1, 2, 2, 50]


@pytest.mark.parametrize(
    ("other", "buddy", "held", "sent"),
    [
        ('["other host", 0, null, "4"]', 4, (14, 12, 10, 8), (12, 8)),
        ('["other host", 0, null, "auto"]', "auto", (14, 12, 10, 8), (14, 12, 10, 8)),
        ("", 4, (14, 12), ()),  # all ranks are on one host
        ('["other host", 0, null, "auto"]', 4, (14, 12), ()),  # they do not agree
    ],
)
def test_which_steps_go_to_a_partner_host(
    other: str, buddy: BuddyMode, held: tuple[int, ...], sent: tuple[int, ...]
) -> None:
    own, ranks = Arena(), Ranks(other=other)
    filling = ranks.filling(own, 2, buddy)
    assert own.buddy
    for step in range(1, 16):
        filling.fill(step, lambda: [b"state"])
    assert steps(own.fd, own.identity) == held
    assert steps(own.fd, own.identity, buddy=True) == sent
    assert bool(ranks.notes) == ("auto" in other and buddy == 4)
    assert filling.apart == (4 if sent and buddy == 4 else 2 if sent else 0)
    own.close()


@pytest.mark.parametrize(
    ("others", "replicas", "buddy", "lost"),
    [
        ('["b", true]', ((0,), (1,)), "auto", True),
        ('["b", true]', ((0, 1),), "auto", False),  # the other host holds it as well
        ('["b", false]', ((0,), (1,)), 0, False),
        ('["b", false]', ((0,), (1,)), 4, True),  # they do not agree: all are told when arenas are filled
        ("", ((0,), (1,)), "auto", False),  # one host
    ],
)
def test_what_would_be_lost_with_a_host(others: str, replicas: ReplicaGroups, buddy: BuddyMode, lost: bool) -> None:
    assert lost_with_a_host(replicas, Ranks(other=others).gather, buddy) == lost


@pytest.mark.parametrize("each_step", [True, False])
def test_the_steps_own_work_on_a_device_is_no_part_of_its_copy(
    each_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host queues a step in 4 ms, the device makes it in 100, and a copy takes 2 more."""
    now = [0.0, 0.0]  # of the host, and when the device will be done
    monkeypatch.setattr(_clock, "monotonic", lambda: now[0])
    own, ranks = Arena(), Ranks(slow="0")

    def settle() -> None:
        now[0] = max(now)

    def payload() -> list[bytes]:
        settle()
        now[0] += 0.002
        return [b"state"]

    filling = ranks.filling(own, "auto")
    for step in range(1, LAST + 1):
        now[0] += 0.004
        now[1] = max(now) + 0.1
        if each_step:  # as by loss.item()
            settle()
        filling.fill(step, payload, settle)
    assert filling.every == 2
    own.close()
