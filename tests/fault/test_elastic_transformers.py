"""A job of Hugging Face's Trainer that goes on with fewer ranks, and takes the missing ones in again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

import torch

from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from lastgasp.testing.faults import read_log
from support import again_faults
from support.elastic_runs import OFFER, QUIET, STOPS, faulted, twice_fewer_and_all_again
from support.hosts import needs_hosts, network
from support.hosts_job import START, HostsJob
from support.launchers import SUPPORT, finish, incidents, run, until
from support.samples import entered, used
from support.train_elastic import GATES

WORKER = SUPPORT / "train_elastic_transformers.py"
STEPS = 12
KNOWN = ("could not get new processes", "have new processes")
"""What notes say of it."""
SUMS = ("logged", "loss")
LAYOUT = DirectoryLayout("checkpoint-[0-9]*")

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


def job(directory: Path, *more: str, ranks: int = 4, least: int = 2) -> list[str]:
    """Its command line."""
    command = run(WORKER, "--dir", directory, *more, ranks=ranks)
    at = command.index("run") + 1
    return [sys.executable, *command[1:at], "--min-ranks", str(least), *command[at:]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of a job without a fault and without lastgasp, by its ranks and arguments."""
    found: dict[tuple[Any, ...], Path] = {}

    def make(ranks: int, *more: str) -> Path:
        if (ranks, *more) not in found:
            found[ranks, *more] = folder = tmp_path_factory.mktemp("undisturbed")
            done = finish(job(folder, *more, "--without", ranks=ranks), folder, LASTGASP_WARM="off")
            assert done.ok, done.output[-8000:]
        return found[ranks, *more]

    return make


def check_result(directory: Path, expected: Path, without: tuple[str, ...] = (), near: float = 1) -> None:
    """Logs and weights are those of the undisturbed job, but for the order of sums.

    Args:
        near: how far numbers may differ, as a multiple of what float32 takes.
    """
    one, other = (torch.load(folder / "final.pt") for folder in (directory, expected))
    assert one.keys() == other.keys()
    for name in one.keys() - {*without}:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3 * near, atol=1e-4 * near, msg=name)


def check(directory: Path, expected: Path, where: str, told: bool = True, random: bool = True, near: float = 1) -> None:
    """The same; and the samples of each step, and random numbers to the bit.

    Args:
        told: each rank has noted what it has used in each step; random: the ranks' own random numbers are compared.
    """
    assert not told or used(directory) == used(expected), where
    check_result(directory, expected, near=near)
    for file in sorted(expected.glob(f"checkpoint-{STEPS}/rng_state_*.pth")) if random else ():
        own, due = (torch.load(folder / file.parent.name / file.name, weights_only=False)
                    for folder in (directory, expected))  # fmt: skip
        assert own["python"] == due["python"] and torch.equal(own["cpu"], due["cpu"]), file
    assert all(verify(one.path, LAYOUT).ok for one in candidates([directory], LAYOUT)), where


def test_train_goes_on_with_fewer_ranks_and_takes_them_in_again(tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    where, found = twice_fewer_and_all_again(tmp_path, job(directory), directory, "forward")
    assert [note for one in found for note in one.notes if not any(text in note for text in KNOWN)] == [], where
    check(directory, undisturbed(4), where)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "fault", "more"),
    [
        pytest.param(4, "kind=sigkill,rank=3,step=4,phase=forward", ["--shape", "accumulating"], id="accumulation"),
        pytest.param(4, "kind=sigkill,rank=0,step=5,phase=update", ["--shape", "bf16"], id="rank 0, in the update"),
        pytest.param(4, "kind=sigkill,rank=1,step=6,phase=validation", ["--workers", "1"], id="in an evaluation"),
        pytest.param(2, "kind=sigkill,rank=1,step=7,phase=backward", [], id="one of two is left"),
    ],
)
def test_moments(ranks: int, fault: str, more: list[str], tmp_path: Path, undisturbed: Any) -> None:
    """What a rank may be in, and other trainings."""
    directory = tmp_path / "d"
    directory.mkdir()
    command = job(directory, *more, ranks=ranks, least=1)
    where = faulted(tmp_path, command, directory, fault)
    assert len(read_log(tmp_path / "faults.log")) == 1, where
    [incident] = incidents(directory)
    assert (incident.rung, incident.ending, incident.steps_lost) == ("shrink", "in_place", 0), where
    told, drawn = "update" not in fault, "--workers" not in more  # the killed rank tells nothing of that step
    check(directory, undisturbed(ranks, *more), where, told, drawn, 50 if "bf16" in more else 1)


@pytest.mark.full
def test_checkpoints_of_fewer_ranks_are_those_of_all(tmp_path: Path, undisturbed: Any) -> None:
    """What Trainer saves while one is missing, four ranks without lastgasp go on from (with data that it repeats)."""
    directory, faults = tmp_path / "d", "kind=sigkill,rank=1,step=3,phase=backward"
    directory.mkdir()
    command = job(directory, "--fixed")
    faulted(tmp_path, command, directory, faults)
    assert [one.rung for one in incidents(directory)] == ["shrink"]
    again = tmp_path / "again"
    again.mkdir()
    words = ["--fixed", "--without", "--resume", str(directory / "checkpoint-8")]
    done = finish(job(again, *words), again, LASTGASP_WARM="off")
    assert done.ok, done.output[-8000:]
    expected = undisturbed(4, "--fixed")
    for step in range(9, STEPS + 1):
        assert used(again)[step] == used(expected)[step]
    check_result(again, expected, SUMS)  # Trainer alone begins its sums anew


@pytest.mark.full
def test_what_cannot_go_on_with_fewer_ranks_restarts(tmp_path: Path) -> None:
    """An iterable data set. The incident says why."""
    directory, faults = tmp_path / "d", "kind=sigkill,rank=2,step=3,phase=backward"
    directory.mkdir()
    command = job(directory, "--stream")
    where = faulted(tmp_path, command, directory, faults)
    [incident] = incidents(directory)
    assert (incident.rung, incident.ending, incident.steps_lost) == ("", "saved", 0), where
    assert "IterableDataset" in incident.not_in_place


@pytest.mark.full
@pytest.mark.parametrize("how", ["imported", "functional"])
def test_micro_batches_that_exchange_something_are_left_to_the_restart(
    how: str, tmp_path: Path, undisturbed: Any
) -> None:
    """By whatever name: three ranks would do it four times. The incident says why."""
    directory, faults = tmp_path / "d", "kind=sigkill,rank=2,step=3,phase=backward"
    directory.mkdir()
    more = ["--exchanges", how, "--alike"]
    where = faulted(tmp_path, job(directory, *more), directory, faults)
    [incident] = incidents(directory)
    assert (incident.rung, incident.ending, incident.steps_lost) == ("", "saved", 0), where
    assert "the job cannot go on with fewer ranks: its micro-batches exchange something" in incident.not_in_place
    check(directory, undisturbed(4, *more), where)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_micro_batches_that_exchange_something_later_end_it(ranks: int, tmp_path: Path, undisturbed: Any) -> None:
    """One rank that is left, and three which do it unequally often: nothing of it comes to an update."""
    directory, faults = tmp_path / "d", "kind=sigkill,rank=1,step=3,phase=backward"
    directory.mkdir()
    more = ["--exchanges", "functional", "--since", "5", "--alike"]
    where = faulted(tmp_path, job(directory, *more, ranks=ranks, least=1), directory, faults)
    found = incidents(directory)
    told = [(one.rung, one.ending, one.steps_lost) for one in found]
    assert told == [("shrink", "in_place", 0), ("", "saved", 0)], where
    assert "something was exchanged with other ranks within training_step" in str(found[1].faults), where
    check(directory, undisturbed(ranks, *more), where)


@pytest.mark.full
@pytest.mark.parametrize("second", ["let go,3,self", "entered,1,self"])
def test_another_rank_dies_on_its_way_to_the_fewer(second: str, tmp_path: Path, undisturbed: Any) -> None:
    """By its number before or after: the step is on disk, and all four ranks start again with it."""
    directory = tmp_path / "d"
    directory.mkdir()
    faults = "kind=sigkill,rank=1,step=3,phase=backward"
    where = faulted(tmp_path, job(directory), directory, faults, **{again_faults.VARIABLE: second})
    assert (directory / "second").exists()
    found = incidents(directory)
    assert found[0].rung == "shrink" and not any(incident.steps_lost for incident in found), where
    check(directory, undisturbed(4), where)


@needs_hosts
@pytest.mark.full
@pytest.mark.parametrize("nnodes", ["", "1:2"])
def test_a_host_is_lost_and_the_other_goes_on_without_it(nnodes: str, tmp_path: Path, undisturbed: Any) -> None:
    """Its power is off. When the host is back and its launcher is started again, its ranks are taken in.

    The same with torchrun's own launcher, and with processes forked from a warm one.
    """
    directory = tmp_path / "d"
    directory.mkdir()
    variables = QUIET | ({"LASTGASP_WARM": "auto"} if nnodes else {"LASTGASP_MIN_RANKS": "2"})
    script = [WORKER, "--dir", directory, "--alike"]
    with network(tmp_path, "ha", "hb") as hosts:
        job = HostsJob(hosts, script, "ha", 2, python=sys.executable, nnodes=nnodes, **variables)
        job.start()
        first = job.launchers["ha"]
        until(lambda: OFFER.format(1) in first.output, "both launchers are ready", START)
        files = [directory / f"rank-{rank}" for rank in range(4)]
        until(lambda: all(file.read_text().count("used") == GATES[0] for file in files), "all are at the gate", START)
        hosts["hb"].power_off()
        for step in GATES[:2]:
            (directory / f"go-{step}").touch()
        until(lambda: OFFER.format(2) in first.output, "two ranks are left", START)
        (directory / "grow").touch()
        hosts["hb"].power_on()
        job.start("hb")
        until(lambda: first.output.count(STOPS) >= 2, "the host can be taken in", START)
        for step in GATES[2:]:
            (directory / f"go-{step}").touch()
        assert job.codes(START + 200) == {"ha": 0, "hb": 0}, job.output
        where = str(job.output)
    told = [(one.rung, one.ending, one.steps_lost) for one in incidents(directory)]
    assert told == [("shrink", "in_place", 0), ("grow", "in_place", 0)], where
    assert len({pid for pid, *_ in entered(directory, 0)}) == 1
    assert used(directory) == used(undisturbed(4, "--alike")), where
    check_result(directory, undisturbed(4, "--alike"), SUMS)  # that of the step before is lost with the host
