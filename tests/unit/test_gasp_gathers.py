"""Gathers end as soon as one of the ranks can no longer arrive."""

from __future__ import annotations

import pytest

from lastgasp.events import Fault, FaultKind
from lastgasp.gasp import messages as m
from lastgasp.gasp.attempt import Attempt
from lastgasp.gasp.gathers import GATHER_TIMEOUT
from support.switch_job import hello


def attempt() -> Attempt:
    """Two ranks that have joined and begun."""
    made = Attempt.of(hello(0, 2))
    for rank in range(2):
        made.machine.joined(rank, 0.0)
        made.machine.said(rank, m.Begin(step=0, durable=0, buffer_fd=-1), 0.0)
    return made


def reported(kind: FaultKind) -> m.Report:
    """What rank 1 says when something happened to it."""
    return m.Report(fault=Fault(rank=1, kind=kind, cause="disk full", step=4, seen_ns=1))


def asked(of: Attempt) -> list[str]:
    """Rank 0 comes to the gather; what it is sent at the next look."""
    assert of.gather(0, m.GatherPart(tag="x", payload=b"")) is None
    since = of.gathers["x"].since
    return [answer.missing for _, answer in of.failed_gathers(since)]


def test_nobody_waits_for_a_rank_that_died_before() -> None:
    job = attempt()
    job.machine.gone(1, "process died", "killed", 1, 0.0)
    assert asked(job) == ["rank 1 is gone: process died"]
    assert not job.gathers


def test_a_rank_that_defers_is_waited_for() -> None:
    """It said goodbye because the framework leads the recoveries, and still gathers (`defer_to_framework`)."""
    job = attempt()
    job.machine.said(1, m.Goodbye(), 0.0)
    assert asked(job) == []


@pytest.mark.parametrize(("kind", "told"), [("exception", ["rank 1 has stopped: disk full"]), ("sigterm", [])])
def test_a_rank_that_raised_is_not_waited_for_one_told_to_stop_is(kind: FaultKind, told: list[str]) -> None:
    job = attempt()
    job.machine.said(1, reported(kind), 0.0)
    assert asked(job) == told


def test_a_rank_that_is_late_is_waited_for() -> None:
    job = attempt()
    assert asked(job) == []
    since = job.gathers["x"].since = 8000.3
    assert (since + GATHER_TIMEOUT) - since < GATHER_TIMEOUT  # by a rounding, as where 8192 s lie between
    assert [answer.missing for _, answer in job.failed_gathers(since + GATHER_TIMEOUT)] == [
        "ranks [1] did not arrive within 300 s"
    ]


def test_a_save_may_take_longer() -> None:
    job = attempt()
    assert job.gather(0, m.GatherPart(tag="x", payload=b"", seconds=2 * GATHER_TIMEOUT)) is None
    since = job.gathers["x"].since
    assert job.failed_gathers(since + GATHER_TIMEOUT) == []
    assert [answer.missing for _, answer in job.failed_gathers(since + 2 * GATHER_TIMEOUT)] == [
        "ranks [1] did not arrive within 600 s"
    ]


def test_the_part_of_a_rank_that_waits_briefly_is_gone_when_it_gives_up() -> None:
    """Under torch's `Join` it trains on, and another rank comes to the same number of steps at another moment."""
    job = attempt()
    part = m.GatherPart(tag="x", payload=b"", seconds=GATHER_TIMEOUT / 10)
    assert job.gather(1, part) is None
    since = job.gathers["x"].since
    assert job.failed_gathers(since + 29) == []
    assert [(rank, answer.missing) for rank, answer in job.failed_gathers(since + 30)] == [
        (1, "ranks [0] did not arrive within 30 s")
    ]
    assert job.gather(0, part) is None
