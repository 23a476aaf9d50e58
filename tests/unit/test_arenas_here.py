"""What a rank finds at its launcher once the controller is gone: arenas of its host, and copies of another host's."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from lastgasp.arena import Arena, verified
from lastgasp.gasp import arenas_here
from lastgasp.gasp.arena_decision import decide_with_arenas
from lastgasp.gasp.arenas_here import ArenasHere
from lastgasp.gasp.decision import GiveUp, RankView, SavePlan

SOURCE: Any = SimpleNamespace(rank=1)


def filled(one: Arena, *steps: int) -> Arena:
    """It holds these."""
    one.reserve(5000)
    for step in steps:
        one.copy(step, [b"state %d" % step])
    return one


def test_it_decides_with_what_it_finds_and_again_without_what_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getppid", os.getpid)
    own, copy, nobodys = filled(Arena(rank=1), 7, 8), filled(Arena(b"i" * 16, rank=0), 7, 8), filled(Arena(), 9)
    monkeypatch.setattr(arenas_here, "arena_of", lambda source: own)
    here = ArenasHere.look(SOURCE)
    held = here.held()
    assert held.steps == {1: (8, 7)} and held.buddies == {0: ("here", (8, 7))}
    views = (
        RankView(rank=0, step=-1, holds=False, alive=False, why="unknown"),
        RankView(rank=1, step=9, holds=True, writes=True),
    )
    plan = decide_with_arenas(views, ((0,), (1,)), 0, held)
    assert isinstance(plan, SavePlan)
    assert (plan.step, plan.savers, plan.arenas, plan.buddies, plan.lost) == (8, (1, 1), (0, 1), frozenset({0}), 1)
    references = here.references((*plan.arenas, -1))
    assert [one.rank for one in references] == [0, 1]
    with verified(references[0].fd, references[0].identity, 8) as payload:
        assert bytes(payload) == b"state 8"
    plan = decide_with_arenas(views, ((0,), (1,)), 0, here.without(0, 8))
    assert isinstance(plan, SavePlan) and plan.step == 7
    assert isinstance(decide_with_arenas(views, ((0,), (1,)), 0, here.without(0, 7)), GiveUp)
    for one in (own, copy, nobodys):
        one.close()


def test_without_a_launcher_there_is_its_own_and_without_an_arena_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas_here, "arena_of", lambda source: None)
    assert ArenasHere.look(SOURCE).held().steps == {}
    own = filled(Arena(rank=1), 7, 8)
    monkeypatch.setattr(arenas_here, "arena_of", lambda source: own)
    monkeypatch.setattr(os, "getppid", lambda: 1 << 30)  # no such process
    here = ArenasHere.look(SOURCE)
    assert here.held().steps == {1: (8, 7)}
    [reference] = here.references((1,))
    assert (reference.pid, reference.fd) == (os.getpid(), own.fd)
    own.close()
