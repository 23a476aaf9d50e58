"""Two hosts: a fault is answered in place on either of them; what a launcher has to do and cannot is a restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support import again_faults
from support.hosts import needs_hosts, network
from support.hosts_job import START, HostsJob
from support.launchers import SUPPORT, incidents, torchrun, undisturbed_jobs
from support.waiting import until

LIMIT = 200.0
WORKER = SUPPORT / "train_again.py"
OFFER = "a fault can be answered in place, as incarnation 1\n"

pytestmark = [needs_hosts, pytest.mark.fault, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final weights of a job without a fault on one host, by its number of ranks."""
    return undisturbed_jobs(
        tmp_path_factory,
        lambda folder, ranks: torchrun(WORKER, "--dir", folder, "--final", folder / "final.pt", ranks=ranks),
    )


@contextmanager
def training(folder: Path, each: int, faults: str, *more: str, **variables: str) -> Iterator[tuple[HostsJob, Path]]:
    """A job over two hosts with so many ranks on `each`, at its gate, once a fault can be answered in place."""
    directory = folder / "d"
    directory.mkdir()
    script = [WORKER, "--dir", directory, "--final", directory / "final.pt", *more]
    variables |= {"LASTGASP_FAULT": faults, "LASTGASP_FAULT_LOG": str(folder / "faults.log")}
    variables |= {"LASTGASP_WARM": "auto", "LASTGASP_LOG": "debug"}
    with network(folder, "ha", "hb") as hosts:
        job = HostsJob(hosts, script, "ha", each, ("--rdzv-conf", "join_timeout=20"), **variables)
        job.start()
        until(lambda: OFFER in job.launchers["ha"].output, "both launchers are ready", START)
        yield job, directory


def pids(directory: Path, rank: int) -> list[str]:
    """The processes that have entered the training as this rank."""
    rows = (line.split() for line in (directory / f"rank-{rank}").read_text().splitlines())
    return [row[1] for row in rows if row[0] == "entered"]


@pytest.mark.parametrize(
    ("each", "fault", "replaced", "variables"),
    [
        pytest.param(2, "kind=sigkill,rank=2,step=8,phase=backward", 2, {}, id="killed"),
        pytest.param(2, "kind=sigkill,rank=0,step=8,phase=backward", 0, {}, id="rank 0 killed"),
        pytest.param(1, "kind=sigkill,rank=1,step=8,phase=backward", 1, {}, id="the only one of its host"),
        pytest.param(1, "kind=sigkill,rank=0,step=8,phase=backward", 0, {}, id="the only one of the first host"),
        pytest.param(2, "kind=exception,rank=3,step=8,phase=backward", None, {}, id="raised"),
        pytest.param(2, "kind=sigstop,rank=3,step=8,phase=forward", 3, {"LASTGASP_HANG_TIMEOUT": "8"}, id="hung"),
    ],
)  # fmt: skip
def test_a_fault_is_answered_in_place(
    each: int, fault: str, replaced: int | None, variables: dict[str, str], tmp_path: Path, undisturbed: Any
) -> None:
    with training(tmp_path, each, fault, **variables) as (job, directory):
        (directory / "go").touch()
        assert set(job.codes(START + LIMIT).values()) == {0}, job.output
    assert len(read_log(tmp_path / "faults.log")) == 1
    [incident] = incidents(directory)
    rung = "retry" if replaced is None else "replace"
    assert (incident.ending, incident.rung, incident.steps_lost) == ("in_place", rung, 0), job.output
    assert incident.notes == [], job.output
    for rank in range(2 * each):
        first, second = pids(directory, rank)
        assert (first == second) == (rank != replaced), job.output
    assert differences(undisturbed(2 * each), directory / "final.pt") == []


@pytest.mark.parametrize("stuck", [1, 3])
def test_a_survivor_that_does_not_leave_its_training_is_replaced(stuck: int, tmp_path: Path, undisturbed: Any) -> None:
    """By the launcher of its host."""
    fault, more = "kind=exception,rank=0,step=8,phase=data", ("--stuck", str(stuck))
    with training(tmp_path, 2, fault, *more, LASTGASP_FINISH_TIMEOUT="1") as (job, directory):
        (directory / "go").touch()
        assert set(job.codes(START + LIMIT).values()) == {0}, job.output
    found = [(one.rung, one.steps_lost, one.notes) for one in incidents(directory)]
    assert found == [("retry", 0, []), ("replace", 0, [])], job.output
    for rank in range(4):
        first, second = pids(directory, rank)
        assert (first == second) == (rank != stuck), job.output
    assert differences(undisturbed(4), directory / "final.pt") == []


@pytest.mark.parametrize(
    ("killed", "second"), [(0, "state kept,2,self"), (2, "state kept,1,self"), (3, "group made,3,self")]
)
def test_a_second_kill_before_a_new_step_is_answered_as_well(
    killed: int, second: str, tmp_path: Path, undisturbed: Any
) -> None:
    """A survivor that has yet to join, of a host that replaces nobody or of the first one; or the new process.

    Its launcher says so: nobody waits for it until the deadline of the recovery.
    """
    fault, victim = f"kind=sigkill,rank={killed},step=8,phase=backward", int(second.split(",")[1])
    with training(tmp_path, 2, fault, **{again_faults.VARIABLE: second}) as (job, directory):
        (directory / "go").touch()
        assert set(job.codes(START + LIMIT).values()) == {0}, job.output
    assert (directory / "second").exists(), job.output
    found = incidents(directory)
    assert [(one.ending, one.rung, one.steps_lost) for one in found] == [("in_place", "replace", 0)] * 2, job.output
    causes = [{(one.kind, one.rank) for one in each.faults} for each in found]
    assert causes == [{("killed", killed)}, {("killed", victim)}], (causes, job.output)
    for rank in range(4):
        assert (len(set(pids(directory, rank))) == 1) == (rank not in (killed, victim)), job.output
    assert differences(undisturbed(4), directory / "final.pt") == []


@pytest.mark.parametrize("lost", ["launcher", "power"])
def test_a_host_that_cannot_make_a_process_is_waited_for_as_ever(lost: str, tmp_path: Path) -> None:
    """The step is saved, and the job goes on from it once it is started again on both hosts.

    What the dead ranks had drawn has gone with their launcher, or with their host, and the incident says so.
    """
    fault = "kind=sigkill,rank=3,step=8,phase=backward" if lost == "launcher" else ""
    with training(tmp_path, 2, fault) as (job, directory):
        if lost == "launcher":
            job.launchers["hb"].kill()
            until(lambda: "launchers of other hosts cannot be reached" in job.launchers["ha"].output, "it is missed")
        else:
            job.hosts["hb"].power_off()
        (directory / "go").touch()
        assert job.codes(START + LIMIT, "ha")["ha"] != 0, job.output
        [incident] = incidents(directory)
        assert (incident.ending, incident.rung, incident.steps_lost) == ("saved", "", 0), job.output
        assert "of other hosts" in incident.not_in_place, incident
        assert any("random state of rank 3 " in note for note in incident.notes), incident
        if lost == "power":
            job.hosts["hb"].power_on()
        script = [WORKER, "--dir", directory, "--final", directory / "final.pt"]
        second = HostsJob(job.hosts, script, "ha", 2)
        second.start()
        assert set(second.codes(START + LIMIT).values()) == {0}, second.output
    assert (directory / "final.pt").exists()
