"""The hang watchdog: how long it waits, whom it blames, and when it keeps quiet."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lastgasp.backends.embedded import EmbeddedBackend
from lastgasp.config import GaspConfig
from lastgasp.gasp.messages import Phase, Status
from lastgasp.gasp.progress import (
    FACTOR,
    FLOOR,
    LEARNT_AFTER,
    OUTSIDE_FLOOR,
    SILENT,
    SUSPENDED,
    UNLEARNT,
    Progress,
)
from lastgasp.session import Session
from lastgasp.topology import Place, data_parallel
from support.engine_worker import ToySource

NOBODY: frozenset[int] = frozenset()


class Watched:
    """Ranks with heartbeats twice a second, and a watcher that looks as often, on a clock of their own."""

    def __init__(self, world: int, limit: float = 0.0, phase: Phase = "backward") -> None:
        self.progress, self.now = Progress(limit=limit), 0.0
        self.tick = dict.fromkeys(range(world), 0)
        self.phase: dict[int, Phase] = dict.fromkeys(range(world), phase)
        self.step = dict.fromkeys(range(world), 0)
        self.stopped = NOBODY
        self.silent = NOBODY
        for rank in range(world):
            self.progress.joined(rank, 0.0)

    def beat(self, moving: bool) -> frozenset[int]:
        """Half a second goes by."""
        self.now += 0.5
        for rank in self.tick:
            self.tick[rank] += moving
            if rank not in self.stopped | self.silent:
                self.hear(rank)
        return self.progress.hung(self.now, self.stopped)

    def hear(self, rank: int) -> None:
        """A heartbeat of one rank."""
        status = Status(step=self.step[rank], durable=0, tick=self.tick[rank], phase=self.phase[rank])
        self.progress.heard(rank, status, self.now)

    def train(self, beats: int = LEARNT_AFTER + 2) -> None:
        """Make progress with every heartbeat; nobody may be blamed for it."""
        for _ in range(beats):
            assert self.beat(moving=True) == NOBODY

    def stall(self, seconds: float) -> frozenset[int]:
        """No progress until somebody is blamed, or that long."""
        end = self.now + seconds
        while self.now < end:
            if hung := self.beat(moving=False):
                return hung
        return NOBODY


def test_a_limit_that_was_given_is_kept() -> None:
    job = Watched(2, limit=5.0)
    job.train()
    assert job.stall(4.5) == NOBODY
    assert job.stall(1.0) == {0, 1}


def test_auto_waits_for_its_floor_at_least() -> None:
    job = Watched(2)
    job.train()
    assert job.progress.allowed(0) == FLOOR == 60.0
    assert job.stall(FLOOR - 0.5) == NOBODY
    assert job.stall(1.0) == {0, 1}


def test_auto_waits_long_before_it_has_learnt() -> None:
    job = Watched(1)
    job.train(LEARNT_AFTER - 5)
    assert job.progress.allowed(0) == UNLEARNT
    assert job.stall(UNLEARNT - 1) == NOBODY


def test_auto_learns_slow_steps() -> None:
    job = Watched(1)
    for _ in range(LEARNT_AFTER + 1):
        assert job.stall(19.5) == NOBODY
        job.beat(moving=True)
    assert job.progress.allowed(0) == FACTOR * 20.0
    assert job.stall(FACTOR * 20.0 - 0.5) == NOBODY
    assert job.stall(1.0) == {0}


@pytest.mark.parametrize("phase", ["data", "validation", "save", "between"])
def test_auto_waits_longer_outside_of_a_step(phase: Phase) -> None:
    job = Watched(1, phase=phase)
    job.train()
    assert job.progress.allowed(0) == OUTSIDE_FLOOR


def test_one_rank_that_moves_keeps_all_quiet() -> None:
    job = Watched(2, limit=2.0)
    job.train()
    for _ in range(40):
        job.tick[1] += 1
        assert job.beat(moving=False) == NOBODY


@pytest.mark.parametrize(
    ("phases", "stopped", "silent", "culprits"),
    [
        (("backward", "forward"), (), (), {1}),
        (("backward", "backward"), (), (), {0, 1}),
        (("forward", "forward"), (), (), {0, 1}),
        (("backward", "forward"), (0,), (), {0}),
        (("backward", "backward"), (), (0,), {0}),
        (("backward", "backward", "save"), (), (), {2}),
        (("backward", "data", "forward"), (2,), (1,), {2}),
        (("start", "backward"), (), (), {0, 1}),
        (("start", "backward", "forward"), (), (), {2}),
        (("start", "backward", "backward"), (0,), (), {0}),
    ],
)
def test_culprits(
    phases: tuple[Phase, ...], stopped: tuple[int, ...], silent: tuple[int, ...], culprits: set[int]
) -> None:
    job = Watched(len(phases), limit=SILENT + 5)
    job.phase = dict(enumerate(phases))
    job.train()
    job.stopped, job.silent = frozenset(stopped), frozenset(silent)
    assert job.stall(60.0) == culprits
    assert all("no progress for" in job.progress.describe(rank, job.now) for rank in culprits)
    silent_now = "no heartbeat for" in job.progress.describe(min(culprits), job.now)
    assert silent_now == bool((frozenset(stopped) | frozenset(silent)) & culprits)


def test_nobody_is_watched_before_training_begins() -> None:
    job = Watched(2, limit=1.0, phase="start")
    assert job.stall(100.0) == NOBODY


@given(st.floats(SUSPENDED, 1e6), st.integers(0, 3))
def test_a_watcher_that_was_stopped_never_blames_the_job(away: float, heard_first: int) -> None:
    """Ctrl-Z of the launcher, a debugger: what it missed is not the ranks being silent."""
    job = Watched(2, limit=3.0)
    job.train()
    job.now += away
    for _ in range(heard_first):  # heartbeats that piled up are read before or after the first look
        job.hear(0)
    assert job.beat(moving=False) == NOBODY
    assert job.stall(2.0) == NOBODY
    assert job.stall(2.0) == {0, 1}


@given(st.floats(60, 1e6))
def test_a_stopped_watcher_does_not_learn_its_own_absence(away: float) -> None:
    job = Watched(1)
    job.train()
    job.now += away
    job.tick[0] += 1
    job.hear(0)
    job.train(3)
    assert job.progress.allowed(0) == FLOOR


def test_ranks_that_left_or_never_came_are_nobodys_business() -> None:
    job = Watched(2, limit=2.0)
    job.train()
    job.progress.left(0)
    job.progress.left(0)
    job.progress.heard(7, Status(step=0, durable=0, tick=0, phase="data"), job.now)
    assert job.stall(10.0) == {1}
    job.progress.left(1)
    assert job.stall(10.0) == NOBODY


def test_the_start_of_the_backend_is_no_part_of_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindIO's takes seconds to minutes; a fixed hang timeout, which a user takes for steps, must not fire in it."""
    phases: list[str] = []
    monkeypatch.setattr(EmbeddedBackend, "training_started", lambda backend: phases.append(backend._status.phase))
    place = Place(rank=0, world_size=1, replicas=data_parallel(1))
    session = Session(GaspConfig.resolve(tmp_path, hang_timeout=1.0), place, ToySource(0, tmp_path, {}), None)
    session.training_started(0, 0)
    phases.append(session.status.phase)
    session.close()
    assert phases == ["start", "data"]
