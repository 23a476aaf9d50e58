"""Jobs over several hosts: what happens to a host or to the network, and what the other hosts make of it.

In each case every host that lives ends by itself, with the code that tells; no step is lost where a holder lives;
there are never two different checkpoints of one step; a job that goes on ends with the numbers of an undisturbed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lastgasp import exitcodes
from support.hosts import Host, needs_hosts, network
from support.hosts_job import WORKER, HostsJob, Told, expected, ranks_of
from support.waiting import until

LIMIT = 150.0
"""Seconds for a job to end once the fault has happened, on a loaded machine; a lost host is seen after 13."""
STEPS, PACE = 120, 0.02
"""Of a job, and seconds that each step takes at least."""

pytestmark = [needs_hosts, pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def job_on(
    folder: Path, *names: str, endpoint: str = "", ranks: int = 1, steps: int = STEPS, **options: str
) -> Iterator[tuple[dict[str, Host], HostsJob, Told]]:
    """A job with `ranks` on each of these hosts, begun; the rendezvous is on the first one unless told otherwise."""
    told = Told(folder / "d")
    with network(folder, *names) as hosts:
        rendezvous = ("--rdzv-conf", options.pop("conf", "join_timeout=120"))
        script = [WORKER, told.directory, steps, PACE]
        job = HostsJob(hosts, script, endpoint or names[0], ranks, rendezvous, **options)
        job.start()
        try:
            yield hosts, job, told
        except BaseException:
            print(job.output, told.saved(), told.conflicts(), told.incidents(), sep="\n")
            raise


def assert_whole(told: Told, world: int, steps: int = STEPS) -> None:
    """The job went on to its end, with the numbers of an undisturbed one."""
    assert told.ends() == expected(steps, world)
    assert told.conflicts() == []


def assert_safe(told: Told, before: int) -> None:
    """The step that had been completed before the fault, or a later one, is saved."""
    assert max(told.saved(), default=0) >= before
    assert told.conflicts() == []
    assert all(incident.steps_lost == 0 for incident in told.incidents())


# -- the launcher, or the whole host -----------------------------------------------------------------


def test_the_first_hosts_launcher_is_killed(tmp_path: Path) -> None:
    """Its store and its controller go with it. The other host's ranks are told to save; nobody kills them."""
    with job_on(tmp_path, "ha", "hb") as (hosts, job, told):
        told.reached(10)
        job.launchers["ha"].kill()
        assert job.codes(LIMIT, "hb") == {"hb": exitcodes.SAVED}
        until(lambda: not ranks_of(hosts["ha"]), "the rank without a launcher has saved and left, too", LIMIT)
        output = job.launchers["hb"].output
    assert_safe(told, 10)
    assert "the job's rendezvous is gone" in output and "is safe in" in output
    assert "helper processes that dead ranks had left" not in output
    assert {incident.ending for incident in told.incidents()} == {"saved"}


def test_the_first_host_loses_its_power(tmp_path: Path) -> None:
    """No FIN comes. Its peer waits in a collective, its launcher in the store: both learn of it from the kernel."""
    with job_on(tmp_path, "ha", "hb") as (hosts, job, told):
        told.reached(10)
        hosts["ha"].power_off()
        assert job.codes(LIMIT, "hb") == {"hb": exitcodes.SAVED}
    assert_safe(told, 10)
    [incident] = told.incidents()
    assert (incident.ending, incident.led_by) == ("saved", "rank 1")
