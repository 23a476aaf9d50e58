"""Shards that only one rank holds outlive that rank: real processes, real signals, no framework."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from lastgasp import exitcodes
from lastgasp.gasp.attempt import FROM_ARENAS
from lastgasp.gasp.keeper import BufferKeeper
from support.engine_job import ToyJob
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.fault
ALONE = [[0], [1], [2]]


def job_of_shards(directory: Path, **options: Any) -> ToyJob:
    """Three ranks, each of which holds a shard of its own."""
    return ToyJob(directory, world=3, arenas=True, **{"replicas": ALONE, **options})


def shards(directory: Path, step: int) -> dict[str, str]:
    found: dict[str, str] = json.loads((directory / f"step-{step}.toy").read_text())
    return found


def live(rank: int, step: int) -> str:
    return f"live shard of rank {rank} at step {step}"


def kept(rank: int, step: int) -> str:
    return f"shard of rank {rank} at step {step}"


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.full)])
def test_a_killed_ranks_shard_is_written_from_its_arena(tmp_path: Path, victim: int) -> None:
    with job_of_shards(tmp_path) as job:
        job.step(1)
        job.step(2)
        survivors = [rank for rank in range(3) if rank != victim]
        job.stuck(*survivors)
        job.ranks[victim].signal(signal.SIGKILL)
        assert [job.ranks[rank].code() for rank in survivors] == [exitcodes.SAVED] * 2
        incident = job.incident()
    assert shards(tmp_path, 2) == {str(r): kept(r, 2) if r == victim else live(r, 2) for r in range(3)}
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 2, 0)
    assert incident.notes == [FROM_ARENAS.format(victim)] and incident.savers == survivors


def test_killed_in_mid_copy_the_step_before_is_saved_by_all_from_their_arenas(tmp_path: Path) -> None:
    with job_of_shards(tmp_path) as job:
        job.step(1)
        job.step(2)
        for rank in job.ranks[:2]:
            rank.tell("step 3")
            rank.wait_for("stepped")
        job.ranks[2].tell("half 3")
        job.ranks[2].wait_for("copying")
        job.stuck(0, 1)
        job.ranks[2].signal(signal.SIGKILL)
        assert [rank.code() for rank in job.ranks[:2]] == [exitcodes.SAVED] * 2
        incident = job.incident()
    assert shards(tmp_path, 2) == {str(rank): kept(rank, 2) for rank in range(3)}
    assert (incident.step_saved, incident.steps_lost) == (2, 0)  # nobody could have trained on step 3


def test_a_damaged_arena_is_never_saved(tmp_path: Path) -> None:
    with job_of_shards(tmp_path) as job:
        for step in (1, 2, 3):
            job.step(step)
        job.ranks[1].tell("spoil")
        job.ranks[1].wait_for("spoiled")
        job.stuck(0, 2)
        job.ranks[1].signal(signal.SIGKILL)
        assert [job.ranks[rank].code() for rank in (0, 2)] == [exitcodes.SAVED] * 2
        incident = job.incident()
        assert not job.leftovers()
    assert job.saved() == ["step-2.toy"]
    assert shards(tmp_path, 2) == {str(rank): kept(rank, 2) for rank in range(3)}
    assert (incident.step_saved, incident.steps_lost) == (2, 1)


def test_a_saver_of_another_ones_arena_dies_and_the_next_one_writes_it(tmp_path: Path) -> None:
    gate = tmp_path / "go"
    with job_of_shards(tmp_path, save_until=str(gate)) as job:
        job.step(1)
        job.stuck(0, 1)
        job.ranks[2].signal(signal.SIGKILL)
        scribe = 0 if job.ranks[0].wait_for("shards")["arenas"] == [2] else 1
        job.ranks[scribe].signal(signal.SIGKILL)
        last = job.ranks[1 - scribe]
        last.wait_for("shards")
        assert last.wait_for("shards")["arenas"] == sorted({0, 1, 2} - {1 - scribe})
        gate.touch()
        assert last.code() == exitcodes.SAVED
    assert shards(tmp_path, 1) == {"2": kept(2, 1), str(scribe): kept(scribe, 1), str(1 - scribe): live(1 - scribe, 1)}


@pytest.mark.full
def test_a_live_replica_comes_before_an_arena(tmp_path: Path) -> None:
    with job_of_shards(tmp_path, replicas=[[0, 2], [1]]) as job:
        job.step(1)
        job.stuck(0, 1)
        job.ranks[2].signal(signal.SIGKILL)
        assert [rank.code() for rank in job.ranks[:2]] == [exitcodes.SAVED] * 2
        assert FROM_ARENAS.format(2) not in job.incident().notes
    assert shards(tmp_path, 1) == {"0": live(0, 1), "1": live(1, 1)}


@pytest.mark.full
def test_all_told_to_stop_save_what_they_hold(tmp_path: Path) -> None:
    with job_of_shards(tmp_path) as job:
        job.step(1)
        job.stuck(0, 1, 2)
        job.ranks[1].signal(signal.SIGTERM)
        assert [rank.code() for rank in job.ranks] == [exitcodes.SAVED] * 3
    assert shards(tmp_path, 1) == {str(rank): live(rank, 1) for rank in range(3)}


# -- nobody is left -----------------------------------------------------------------------------------


def kill_all(job: ToyJob) -> None:
    """None of them lives to answer that another one is gone."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for rank in job.ranks:
            rank.signal(number)
    for rank in job.ranks:
        rank.code()
    until(lambda: job.attempt.machine.state == "over", "the controller knows that nobody is left")


def next_attempt(job: ToyJob, attempt: int = 1) -> list[dict[str, Any]]:
    """Start all ranks again; what each has found in its arena."""
    for rank in job.ranks:
        rank.end()
    job.ranks = [job.start(rank, attempt=attempt) for rank in range(job.world)]
    for each in job.ranks:
        each.wait_for("ready")
    until(lambda: len(job.attempt.begun) == job.world, "the controller has heard that each rank has begun")
    job.attempt.machine.finish_timeout = PATIENCE
    return [event for rank in job.ranks for event in rank.events if event["event"] == "left"]


def test_the_ranks_after_those_that_all_were_killed_go_on_with_their_arenas(tmp_path: Path) -> None:
    with job_of_shards(tmp_path) as job:
        for step in (1, 2, 3):
            job.step(step)
        job.ranks[2].tell("half 4")
        job.ranks[2].wait_for("copying")
        job.ranks[0].tell("step 4")
        job.ranks[0].wait_for("stepped")
        kill_all(job)
        assert job.incident().ending == "gave_up"
        found = next_attempt(job)
        assert [(one["step"], one["durable"], one["text"]) for one in found] == [(3, 0, kept(r, 3)) for r in range(3)]
        incident = job.incident()
        assert (incident.ending, incident.step_saved, incident.steps_lost) == ("in_arenas", 3, 0)
        job.stuck(0, 1)  # before their first step: what they hold is what is in the arenas
        job.ranks[2].signal(signal.SIGKILL)
        assert [rank.code() for rank in job.ranks[:2]] == [exitcodes.SAVED] * 2
        assert shards(tmp_path, 3) == {"0": live(0, 3), "1": live(1, 3), "2": kept(2, 3)}
        assert [one["step"] for one in next_attempt(job, 2)] == [3] * 3
        job.step(4)
        kill_all(job)
        assert [one["text"] for one in next_attempt(job, 3)] == [kept(rank, 4) for rank in range(3)]


@pytest.mark.parametrize("why", ["damaged", pytest.param("newer", marks=pytest.mark.full)])
def test_what_was_left_is_not_gone_on_with(tmp_path: Path, why: str) -> None:
    with job_of_shards(tmp_path) as job:
        for step in (1, 2):
            job.step(step)
        if why == "damaged":
            job.ranks[1].tell("spoil")
            job.ranks[1].wait_for("spoiled")
        else:
            job.attempt.machine.members[0].durable = 3
        kill_all(job)
        assert next_attempt(job) == []
        job.step(1)
        incident = job.incident()
    assert incident.ending == ("gave_up" if why == "damaged" else "nothing_to_save")
    assert [note for note in incident.notes if "does not match its digest" in note] if why == "damaged" else True


# -- another host than the controller's ---------------------------------------------------------------


@contextmanager
def elsewhere(folder: Path) -> Iterator[ToyJob]:
    """The ranks and their launcher, whom the controller takes to be on another host."""
    job = job_of_shards(folder)
    assert job.thread is not None and job.endpoint is not None
    controller = job.thread._controller
    controller._identity = controller.arenas._host = "another boot:1"
    with closing(BufferKeeper(job.endpoint.address, job.endpoint.token)) as keeper, job:
        until(lambda: len(keeper._arenas) == job.world, "the launcher keeps the arenas")
        yield job


@pytest.mark.parametrize("how", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.full)])
def test_on_another_host_a_survivor_of_that_host_writes_it(
    tmp_path: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lastgasp.gasp.keepers.ANSWER", PATIENCE)
    with elsewhere(tmp_path) as job:
        job.step(1)
        job.step(2)
        job.stuck(0, 1)
        tracks = job.attempt.machine.progress._tracks
        until(lambda: {tracks[rank].phase for rank in (0, 1)} == {"backward"}, "the controller knows who waits")
        job.ranks[2].signal(how)
        if how == signal.SIGSTOP:
            job.attempt.machine.progress.limit = 1.0
        assert [rank.code() for rank in job.ranks[:2]] == [exitcodes.SAVED] * 2
        assert shards(tmp_path, 2) == {"0": live(0, 2), "1": live(1, 2), "2": kept(2, 2)}
        job.ranks[2].signal(signal.SIGKILL)
        found = next_attempt(job)
        assert [(one["step"], one["durable"]) for one in found] == [(2, 2)] * 3
