"""The contract of ports.RecoveryBackend on real processes: the same for the embedded engine and for MindIO.

`pytest -m ascend` runs it on the real `mindio_ttp` where that is installed.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lastgasp import exitcodes
from support.engine_job import ToyJob
from support.recovery_backends import BACKENDS, Backend, Trace, used
from support.waiting import until

pytestmark = pytest.mark.fault


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each of them."""
    found = request.param
    assert isinstance(found, Backend)
    return found


@pytest.fixture
def trace(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trace]:
    """The backend is chosen, and breaks no contract."""
    with used(backend, tmp_path, monkeypatch) as found:
        yield found


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_costs_no_step(tmp_path: Path, backend: Backend, trace: Trace, victim: int) -> None:
    with ToyJob(tmp_path, world=3) as job:
        job.step(1)
        job.step(2)
        survivors = [rank for rank in range(3) if rank != victim]
        job.stuck(*survivors)
        job.ranks[victim].signal(signal.SIGKILL)
        save = job.ranks[survivors[0]].wait_for("save")
        assert save["step"] == 2
        assert save["aux"] == {str(rank): f"rank {rank} step 2" for rank in range(3)}
        assert [job.ranks[rank].code() for rank in survivors] == [exitcodes.SAVED] * 2
        incident = job.incident()
    assert job.saved() == ["step-2.toy"]
    assert job.leftovers() == []
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 2, 0)
    assert [(fault.rank, fault.kind) for fault in incident.faults] == [(victim, "killed")]
    assert incident.savers == [survivors[0]]
    assert incident.backend == ("mindio" if backend.mindio else "embedded")
    assert incident.led_by == ("MindIO" if backend.mindio else "controller")


def test_an_exception_is_the_others_to_save(tmp_path: Path, trace: Trace) -> None:
    with ToyJob(tmp_path, world=2) as job:
        job.step(1)
        job.stuck(1)
        job.ranks[0].tell("raise")
        assert job.ranks[1].wait_for("save")["step"] == 1
        assert [rank.code() for rank in job.ranks] == [exitcodes.SAVED] * 2
        incident = job.incident()
    assert job.saved() == ["step-1.toy"]
    assert [(fault.kind, fault.cause) for fault in incident.faults] == [("exception", "ValueError: boom")]


def test_survivors_whose_collectives_raise_stay_holders(tmp_path: Path, trace: Trace) -> None:
    with ToyJob(tmp_path, world=3) as job:
        job.step(4)
        job.ranks[1].signal(signal.SIGKILL)
        job.ranks[0].tell("peer")
        job.ranks[2].tell("peer")
        assert [job.ranks[rank].code() for rank in (0, 2)] == [exitcodes.SAVED] * 2
        incident = job.incident()
    assert job.saved() == ["step-4.toy"]
    assert [fault.rank for fault in incident.faults] == [1]


def test_each_shard_is_saved_by_a_holder_that_lives(tmp_path: Path, trace: Trace) -> None:
    with ToyJob(tmp_path, world=4, replicas=[[0, 2], [1, 3]]) as job:
        job.step(5)
        job.stuck(0, 2, 3)
        job.ranks[1].signal(signal.SIGKILL)
        published = None
        for rank in (0, 2, 3):
            assert job.ranks[rank].code() == exitcodes.SAVED
        for rank in (0, 3):
            assert job.ranks[rank].wait_for("save")["step"] == 5
        incident = job.incident()
        events = [event for rank in (0, 3) for event in job.ranks[rank].events]
        [published] = [event for event in events if event["event"] == "published"]
    assert published["parts"] == [0, 3]
    assert incident.savers == [0, 3]
    assert job.saved() == ["step-5.toy"]


def test_the_faulty_rank_saves_where_nobody_else_is_left(tmp_path: Path, trace: Trace) -> None:
    with ToyJob(tmp_path, world=2) as job:
        job.step(1)
        job.ranks[1].signal(signal.SIGKILL)
        job.ranks[0].tell("raise")
        assert job.ranks[0].wait_for("released")["ending"] == "saved"
        job.ranks[0].code()
    assert job.saved() == ["step-1.toy"]


def test_another_holder_saves_where_one_cannot(tmp_path: Path, trace: Trace) -> None:
    with ToyJob(tmp_path, world=3, failing=[0]) as job:
        job.step(2)
        job.stuck(0, 1)
        job.ranks[2].signal(signal.SIGKILL)
        assert job.ranks[0].wait_for("save")["step"] == 2
        assert job.ranks[1].wait_for("save")["step"] == 2
        assert [job.ranks[rank].code() for rank in (0, 1)] == [exitcodes.SAVED] * 2
        incident = job.incident()
    assert incident.savers == [1]
    assert job.saved() == ["step-2.toy"]


def test_ranks_that_all_raise_are_saved_all_the_same(tmp_path: Path, trace: Trace) -> None:
    """Each tells the controller before anything is saved."""
    asked = tmp_path / "asked"
    with ToyJob(tmp_path, world=2, save_until=str(asked)) as job:
        job.step(6)
        for rank in job.ranks:
            rank.tell("raise")
        until(lambda: {fault.rank for fault in job.attempt.machine.faults} == {0, 1}, "both faults are known")
        asked.touch()
        assert [rank.code() for rank in job.ranks] == [exitcodes.SAVED] * 2
        assert {fault.rank for fault in job.incident().faults} == {0, 1}
    assert job.saved() == ["step-6.toy"]


@pytest.mark.parametrize("told", [(1,), (0, 1)], ids=["one", "all"])
def test_told_to_stop_by_sigterm(tmp_path: Path, trace: Trace, told: tuple[int, ...]) -> None:
    with ToyJob(tmp_path, world=2) as job:
        job.step(3)
        job.stuck(0, 1)
        for rank in told:
            job.ranks[rank].signal(signal.SIGTERM)
        assert [rank.code() for rank in job.ranks] == [exitcodes.SAVED] * 2
        assert {fault.kind for fault in job.incident().faults} == {"sigterm"}
    assert job.saved() == ["step-3.toy"]


def test_an_exit_that_nobody_was_told_of_is_a_fault(tmp_path: Path, trace: Trace) -> None:
    with ToyJob(tmp_path, world=2) as job:
        job.step(2)
        job.stuck(0)
        job.ranks[1].tell("vanish")
        assert job.ranks[0].wait_for("save")["step"] == 2
        assert job.ranks[0].code() == exitcodes.SAVED
        job.ranks[1].code()
    assert job.saved() == ["step-2.toy"]


def test_a_hung_rank_is_killed_and_the_others_save(tmp_path: Path, trace: Trace) -> None:
    with ToyJob(tmp_path, world=3) as job:
        job.step(1)
        job.ranks[1].signal(signal.SIGSTOP)
        job.stuck(0, 2)
        job.hangs(1)
        assert job.ranks[1].code() == -signal.SIGKILL
        assert [job.ranks[rank].code() for rank in (0, 2)] == [exitcodes.SAVED] * 2
    assert job.saved() == ["step-1.toy"]


def test_the_gate_holds_updates_back_while_a_recovery_is_on(tmp_path: Path, trace: Trace) -> None:
    release = tmp_path / "go"
    with ToyJob(tmp_path, world=2, save_until=str(release)) as job:
        job.step(1)
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].wait_for("save")["step"] == 1
        job.ranks[0].tell("update")  # must park: the state is being written
        release.touch()
        assert job.ranks[0].code() == exitcodes.SAVED
        assert "updating" not in [event["event"] for event in job.ranks[0].events]
    assert job.saved() == ["step-1.toy"]


def test_a_job_that_ends_well_leaves_nothing(tmp_path: Path, trace: Trace) -> None:
    with ToyJob(tmp_path, world=2) as job:
        job.step(1)
        for rank in job.ranks:
            rank.tell("done")
        assert [rank.code() for rank in job.ranks] == [0, 0]
    assert job.saved() == []
    assert not (tmp_path / "incidents").exists()
