"""A rank dies on another host than the controller's: its launcher kept its random state, or the loss is noted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from lastgasp import exitcodes
from lastgasp.errors import AuthenticationError
from lastgasp.gasp.keeper import BufferKeeper, _KeeperLink
from lastgasp.gasp.serve import ControllerThread, new_token
from support.engine_job import ToyJob
from support.hosts import needs_hosts, network
from support.hosts_job import START, WORKER, HostsJob, Told, expected, ranks_of
from support.waiting import PATIENCE, until

pytestmark = pytest.mark.fault


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller, which is in this process, waits for what launchers kept as long as it takes."""
    monkeypatch.setattr("lastgasp.gasp.keepers.ANSWER", PATIENCE)


@contextmanager
def elsewhere(folder: Path) -> Iterator[ToyJob]:
    """Two ranks whose controller takes this machine for another host than its own."""
    job = ToyJob(folder, world=2)
    assert job.thread is not None
    job.thread._controller._identity = "another boot:1"
    with job:
        yield job


def keeps(keeper: BufferKeeper, rank: int) -> None:
    """Wait until the launcher was told of this rank, and has opened its buffer."""
    until(lambda: rank in keeper._buffers, f"the buffer of rank {rank} is open")


def test_what_its_launcher_kept_is_saved(tmp_path: Path) -> None:
    with elsewhere(tmp_path) as job:
        assert job.endpoint is not None
        with closing(BufferKeeper(job.endpoint.address, job.endpoint.token)) as keeper:
            job.step(1)
            job.step(2)
            keeps(keeper, 1)
            job.stuck(0)
            job.ranks[1].signal(signal.SIGKILL)
            assert job.ranks[0].wait_for("save")["aux"] == {"0": "rank 0 step 2", "1": "rank 1 step 2"}
            assert job.ranks[0].code() == exitcodes.SAVED
        assert job.incident().notes == []


def test_without_one_the_loss_is_in_the_record(tmp_path: Path) -> None:
    with elsewhere(tmp_path) as job:
        job.step(1)
        job.stuck(0)
        job.ranks[1].signal(signal.SIGKILL)
        assert job.ranks[0].wait_for("save")["aux"] == {"0": "rank 0 step 1"}
        assert job.ranks[0].code() == exitcodes.SAVED
        [note] = job.incident().notes
    assert "the random state of rank 1 at step 1 died" in note


def test_a_keeper_proves_the_token_and_comes_back() -> None:
    thread = ControllerThread(new_token())
    end = thread.endpoint
    try:
        with pytest.raises(AuthenticationError):
            _KeeperLink(end.address, "0" * 64)
        with closing(BufferKeeper(end.address, end.token)) as keeper:
            until(lambda: bool(thread._controller.keepers._writers), "the controller knows the keeper")
            keeper.close()
    finally:
        thread.stop()


def test_a_lost_connection_does_not_cost_what_a_dead_rank_left(tmp_path: Path) -> None:
    """The controller says once more what to keep, and the rank has died meanwhile."""
    with elsewhere(tmp_path) as job:
        assert job.endpoint is not None and job.thread is not None
        keepers = job.thread._controller.keepers
        with closing(BufferKeeper(job.endpoint.address, job.endpoint.token)) as keeper:
            job.step(1)
            keeps(keeper, 1)
            _, order = keepers._buffers[1]
            job.stuck(0)
            job.ranks[1].signal(signal.SIGKILL)
            assert job.ranks[0].wait_for("save")["aux"] == {"0": "rank 0 step 1", "1": "rank 1 step 1"}
            job.ranks[1].code()
            keeper._keep(order)
            assert keeper._kept(1).steps[0] == 1
            assert job.ranks[0].code() == exitcodes.SAVED


@needs_hosts
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rank_killed_on_the_second_host_costs_no_bit(tmp_path: Path) -> None:
    directory, steps = tmp_path / "d", 30
    with network(tmp_path, "a", "b") as hosts:
        job = HostsJob(hosts, [WORKER, directory, steps, 0], "a", LASTGASP_BIND=hosts["a"].address, HOSTS_GATE="5")
        told = Told(directory)
        job.start()
        told.reached(5)
        [victim] = ranks_of(hosts["b"])
        os.kill(victim, signal.SIGKILL)
        told.go()
        assert job.codes(START) == {"a": 0, "b": 0}, job.output
    [incident] = told.incidents()
    assert (incident.ending, incident.steps_lost, incident.notes) == ("saved", 0, []), job.output
    assert told.ends() == expected(steps, 2)
