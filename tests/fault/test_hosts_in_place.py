"""Over several hosts no fault is answered in place yet: the job restarts, and the incident says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support.hosts import needs_hosts, network
from support.hosts_job import START, HostsJob
from support.launchers import SUPPORT, finish, incidents, torchrun

LIMIT = 200.0
WORKER = SUPPORT / "train_again.py"

pytestmark = [needs_hosts, pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.full
def test_a_killed_rank_is_answered_by_a_restart_of_all_hosts(tmp_path: Path) -> None:
    calm, directory, log = tmp_path / "calm", tmp_path / "d", tmp_path / "faults.log"
    for place in (calm, directory):
        place.mkdir()
        (place / "go").touch()
    reference = torchrun(WORKER, "--dir", calm, "--final", calm / "final.pt")
    assert finish(reference, tmp_path, LASTGASP_WARM="off").ok
    script = [WORKER, "--dir", directory, "--final", directory / "final.pt"]
    faults = {"LASTGASP_FAULT": "kind=sigkill,rank=1,step=8,phase=backward", "LASTGASP_FAULT_LOG": str(log)}
    with network(tmp_path, "ha", "hb") as hosts:
        job = HostsJob(hosts, script, "ha", 1, ("--rdzv-conf", "join_timeout=20"), **faults)
        job.start()
        assert set(job.codes(START + LIMIT).values()) == {0}, job.output
    assert len(read_log(log)) == 1
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 8, 0), job.output
    assert incident.not_in_place == "the job's launcher cannot do it (no launcher of lastgasp, or several nodes)"
    assert differences(calm / "final.pt", directory / "final.pt") == []
