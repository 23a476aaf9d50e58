"""LoopMarks of the MindSpore plugin: which step begins when, and where the fetches of the data lie."""

from __future__ import annotations

from typing import Any

import pytest

from lastgasp_mindformers.marks import LoopMarks


class Recorded:
    """Stands in for a Session: it writes down what is marked."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def step(self, number: int) -> None:
        self.log.append(f"step {number}")

    def mark(self, name: str) -> Recorded:
        return self

    def __enter__(self) -> None:
        self.log.append("data")

    def __exit__(self, *_: object) -> None:
        self.log.append("there")


def test_each_step_ends_where_the_next_begins_with_the_fetch_of_its_data() -> None:
    session: Any = Recorded()
    marks = LoopMarks(session)
    marks.begin([])
    for number in (5, 6):
        marks.step_begin(number)
        marks.step_end()
    assert session.log == ["data", "there", "step 5", "step 6", "data", "there", "step 7", "data"]


def test_a_gap_begins_the_step_again() -> None:
    session: Any = Recorded()
    marks = LoopMarks(session)
    marks.step_begin(1)
    marks.step_end()
    marks.step_begin(9)
    assert session.log == ["step 1", "step 2", "data", "there", "step 9"]


@pytest.mark.parametrize("preloaded", ["", "/lib/libmspti.so"])
def test_mindformers_own_marks_are_not_doubled(monkeypatch: pytest.MonkeyPatch, preloaded: str) -> None:
    class MFLossMonitor:
        """As MindFormers' in name."""

    monkeypatch.setenv("LD_PRELOAD", preloaded)
    session: Any = Recorded()
    marks = LoopMarks(session)
    marks.begin([MFLossMonitor()])
    marks.step_begin(1)
    marks.step_end()
    assert bool(session.log) == (not preloaded)
