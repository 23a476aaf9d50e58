"""A Lightning job that goes on with fewer ranks where nobody can take a lost one's place, and takes them in again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support import again_faults
from support.elastic_runs import OFFER, STOPS, faulted, twice_fewer_and_all_again
from support.hosts import needs_hosts, network
from support.hosts_job import START, HostsJob
from support.launchers import SUPPORT, finish, incidents, run, until
from support.mindio_scaling import check_logs
from support.samples import check_samples, entered, used
from support.train_elastic import GATES

WORKER = SUPPORT / "train_elastic_lightning.py"
STEPS = 12
KNOWN = ("could not get new processes", "have new processes", "each once as they are due")
"""What notes say of it."""

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a job of four ranks without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for step in GATES:
        (folder / f"go-{step}").touch()
    done = finish(job(folder), folder, LASTGASP_WARM="off")
    assert done.ok, done.output[-8000:]
    return folder


def job(directory: Path, *more: str, ranks: int = 4, least: int = 2) -> list[str]:
    """Its command line."""
    command = run(WORKER, "--dir", directory, *more, ranks=ranks)
    at = command.index("run") + 1
    return [*command[:at], "--min-ranks", str(least), *command[at:]]


def check_same(directory: Path, undisturbed: Path, told: bool = True) -> None:
    """Weights to the bit, samples, and each step in the log once, with the same numbers.

    Args:
        told: each rank has noted what it has used in each step; else all ranks' digest of it must do.
    """
    if told:
        check_samples(directory, undisturbed)
    assert used(directory)[STEPS][2] == used(undisturbed)[STEPS][2]
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []
    check_logs(directory, undisturbed)


def test_fit_goes_on_with_fewer_ranks(tmp_path: Path, undisturbed: Path) -> None:
    """Four ranks, and three: the processes that are left stay, and nothing is lost."""
    directory = tmp_path / "d"
    directory.mkdir()
    faults = "kind=sigkill,rank=2,step=3,phase=backward"
    where = faulted(tmp_path, job(directory), directory, faults)
    assert len(read_log(tmp_path / "faults.log")) == 1, where
    [incident] = incidents(directory)
    assert (incident.rung, incident.ending, incident.steps_lost) == ("shrink", "in_place", 0), where
    assert [len({pid for pid, *_ in entered(directory, rank)}) for rank in (0, 1)] == [1, 1]
    assert [row[1:] for row in entered(directory, 0)] == [(0, 0, 4), (3, 0, 3)]
    assert [note for note in incident.notes if not any(text in note for text in KNOWN)] == []
    check_same(directory, undisturbed)


def test_a_second_fault_and_all_ranks_again(tmp_path: Path, undisturbed: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    where, found = twice_fewer_and_all_again(tmp_path, job(directory), directory, "backward")
    assert [note for one in found for note in one.notes if not any(text in note for text in KNOWN)] == [], where
    check_same(directory, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "fault", "more"),
    [
        pytest.param(4, "kind=exception,rank=1,step=4,phase=backward", [], id="an exception"),
        pytest.param(4, "kind=sigkill,rank=3,step=4,phase=forward", ["--workers", "1"], id="workers"),
        pytest.param(4, "kind=sigkill,rank=0,step=6,phase=validation", [], id="rank 0, in validation"),
        pytest.param(4, "kind=sigkill,rank=1,step=5,phase=update", [], id="in the update behind an epoch"),
        pytest.param(2, "kind=sigkill,rank=0,step=7,phase=backward", [], id="one of two is left"),
    ],
)
def test_moments(ranks: int, fault: str, more: list[str], tmp_path: Path, undisturbed: Path) -> None:
    """What a rank may be in; a job of two ranks has two micro-batches for each."""
    directory = tmp_path / "d"
    directory.mkdir()
    command, rung = job(directory, *more, ranks=ranks, least=1), "retry" if "exception" in fault else "shrink"
    where = faulted(tmp_path, command, directory, fault)
    assert len(read_log(tmp_path / "faults.log")) == 1, where
    [incident] = incidents(directory)
    assert (incident.rung, incident.ending, incident.steps_lost) == (rung, "in_place", 0), where
    check_same(directory, undisturbed, told="update" not in fault)  # whose end the killed rank does not come to


@pytest.mark.full
def test_in_any_order_the_result_may_differ_in_the_last_bits(tmp_path: Path, undisturbed: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    faults, command = "kind=sigkill,rank=2,step=3,phase=backward", job(directory, "--any-order")
    faulted(tmp_path, command, directory, faults)
    check_samples(directory, undisturbed)
    one, other = (torch.load(folder / "final.pt") for folder in (directory, undisturbed))
    for name in one.keys() - {"net.0.bias", "net.1.running_mean"}:  # a bias before batch norm has rounding as gradient
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "why"),
    [
        ("--plain", "does not train with an ElasticLoader"),
        # By functional collectives, which no strategy sees: three ranks would do it four times.
        ("--exchanges", "its micro-batches exchange something with other ranks"),
    ],
)
def test_what_cannot_go_on_with_fewer_ranks_restarts(more: str, why: str, tmp_path: Path) -> None:
    """And the incident says why."""
    directory = tmp_path / "d"
    directory.mkdir()
    where = faulted(tmp_path, job(directory, more), directory, "kind=sigkill,rank=2,step=3,phase=backward")
    [incident] = incidents(directory)
    assert (incident.rung, incident.ending, incident.steps_lost) == ("", "saved", 0), where
    assert why in incident.not_in_place


@pytest.mark.full
@pytest.mark.parametrize("second", ["state kept,3,self", "handover,2,self", "state taken,2,0"])
def test_another_rank_dies_on_its_way_to_the_fewer(second: str, tmp_path: Path, undisturbed: Path) -> None:
    """By its number before or after: the step is saved by another one, and all four ranks start again with it."""
    directory = tmp_path / "d"
    directory.mkdir()
    faults = "kind=sigkill,rank=1,step=3,phase=backward"
    where = faulted(tmp_path, job(directory), directory, faults, **{again_faults.VARIABLE: second})
    assert (directory / "second").exists()
    first, last = incidents(directory)
    assert (first.rung, first.steps_lost, last.ending, last.steps_lost) == ("shrink", 0, "saved", 0), where
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


@needs_hosts
@pytest.mark.full
def test_a_host_is_lost_and_the_other_goes_on_without_it(tmp_path: Path, undisturbed: Path) -> None:
    """Its power is off. A rank that is killed later is replaced, by a process whose Trainer asks for all devices.

    When the host is back and its launcher is started again, its ranks are taken in.
    """
    directory, log = tmp_path / "d", tmp_path / "faults.log"
    directory.mkdir()
    variables = {"LASTGASP_WARM": "auto", "LASTGASP_LOG": "debug", "LASTGASP_MIN_RANKS": "2"}
    faults = "kind=sigkill,rank=1,step=8,phase=backward,incarnation=1"
    with network(tmp_path, "ha", "hb") as hosts:
        variables |= {"LASTGASP_FAULT": faults, "LASTGASP_FAULT_LOG": str(log)}
        job = HostsJob(hosts, [WORKER, "--dir", directory, "--nodes", 2], "ha", 2, **variables)
        job.start()
        until(lambda: ready(job, 1), "both launchers are ready", START)
        hosts["hb"].power_off()
        for step in GATES[:2]:
            (directory / f"go-{step}").touch()
        until(lambda: ready(job, 2), "the first launcher can replace its ranks", START)
        (directory / f"go-{GATES[2]}").touch()
        until(lambda: [row[1:] for row in entered(directory, 1)][-1:] == [(8, 1, 2)], "the rank is replaced", START)
        (directory / "grow").touch()
        hosts["hb"].power_on()
        job.start("hb")
        until(lambda: job.launchers["ha"].output.count(STOPS) >= 2, "the host can be taken in", START)
        (directory / f"go-{GATES[3]}").touch()
        assert job.codes(START + 200) == {"ha": 0, "hb": 0}, job.output
    assert len(read_log(log)) == 1, job.output
    found = incidents(directory)
    told = [(one.rung, one.ending, one.steps_lost) for one in found]
    assert told == [(rung, "in_place", 0) for rung in ("shrink", "replace", "grow")], job.output
    assert len({pid for pid, *_ in entered(directory, 0)}) == 1
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


def ready(job: HostsJob, incarnation: int) -> bool:
    """The first launcher can replace ranks in that incarnation."""
    return OFFER.format(incarnation) + "\n" in job.launchers["ha"].output
