"""Which random operations a resume repeats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lastgasp_mindformers.draws import repeated


class Dropout(SimpleNamespace):
    """A primitive of MindSpore's, by what is asked of it."""


def net(*primitives: Any) -> Any:
    cells = [SimpleNamespace(_primitives={"op": one}) for one in primitives]
    return SimpleNamespace(cells_and_names=lambda: [("", SimpleNamespace()), *(("cell", cell) for cell in cells)])


def test_those_with_a_seed_of_their_own_are_named() -> None:
    told = repeated(net(Dropout(keep_prob=0.7, Seed0=3, Seed1=4), Dropout(seed0=0, seed1=5), SimpleNamespace()))
    assert told.startswith("random operations of the network (Dropout; 2 in all) begin their sequences anew")


def test_those_that_draw_nothing_or_anything_are_not() -> None:
    off, unseeded = Dropout(keep_prob=1.0, Seed0=3, Seed1=4), Dropout(keep_prob=0.7, Seed0=0, Seed1=0)
    assert repeated(net(off, unseeded, SimpleNamespace(), None)) == ""
