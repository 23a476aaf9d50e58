"""Jobs over several hosts: what happens to a host or to the network, and what the other hosts make of it.

In each case every host that lives ends by itself, with the code that tells; no step is lost where a holder lives;
a job that goes on ends with the numbers of an undisturbed one.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lastgasp import exitcodes
from support.hosts import Host, needs_hosts, network
from support.hosts_job import START, WORKER, HostsJob, Told, expected, ranks_of, saved_soon
from support.waiting import until

LIMIT = 300.0
"""Seconds for a job to end once the fault has happened, on a loaded machine; a lost host is seen after 13."""
TORCHS_BARRIER = 300.0
"""Seconds that torch's own launchers wait for one that has died, once their ranks have ended."""
STEPS, PACE, GATE = 120, 0.02, 10
"""Of a job; seconds that each step takes at least; the step behind which no rank goes before the fault has happened."""

pytestmark = [needs_hosts, pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@contextmanager
def job_on(
    folder: Path, *names: str, endpoint: str = "", ranks: int = 1, steps: int = STEPS, **options: str
) -> Iterator[tuple[dict[str, Host], HostsJob, Told]]:
    """A job with `ranks` on each of these hosts, begun; by default the rendezvous is on the first one.

    It waits behind step `GATE` until `told.go()`.
    """
    told = Told(folder / "d")
    with network(folder, *names) as hosts:
        rendezvous = ("--rdzv-conf", options.pop("conf", "join_timeout=120"))
        script = [WORKER, told.directory, steps, PACE]
        job = HostsJob(hosts, script, endpoint or names[0], ranks, rendezvous, HOSTS_GATE=str(GATE), **options)
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
    """The step that had been completed before the fault, or a later one, is saved, and no step twice with other states.

    Survivors without a controller each save what they have; the first one of a step stands, and the others add to it.
    """
    assert max(told.saved(), default=0) >= before
    assert told.conflicts() == []
    assert all(incident.steps_lost == 0 for incident in told.incidents())


# -- the launcher, or the whole host -----------------------------------------------------------------


@pytest.mark.full
def test_the_first_hosts_launcher_is_killed(tmp_path: Path) -> None:
    """Its store and its controller go with it. The other host's ranks are ordered to save, and are not killed."""
    with job_on(tmp_path, "ha", "hb") as (hosts, job, told):
        told.reached(GATE)
        job.launchers["ha"].kill()
        told.go()
        assert job.codes(LIMIT, "hb") == {"hb": exitcodes.SAVED}
        until(lambda: not ranks_of(hosts["ha"]), "the rank without a launcher has saved and left, too", LIMIT)
        output = job.launchers["hb"].output
    assert_safe(told, GATE)
    assert "the job's rendezvous cannot be reached" in output and "is safe in" in output
    assert "helper processes that dead ranks had left" not in output
    assert {incident.ending for incident in told.incidents()} == {"saved"}


def test_the_first_host_loses_its_power(tmp_path: Path) -> None:
    """No FIN comes. Its peer waits in a collective, its launcher in the store: both learn of it from the kernel."""
    with job_on(tmp_path, "ha", "hb") as (hosts, job, told):
        told.reached(GATE)
        lost = time.time_ns()
        hosts["ha"].power_off()
        told.go()
        assert job.codes(LIMIT, "hb") == {"hb": exitcodes.SAVED}
    assert_safe(told, GATE)
    [incident] = told.incidents()
    assert saved_soon(incident, lost)
    assert (incident.ending, incident.led_by) == ("saved", "rank 1")


def test_a_host_loses_its_power_and_comes_back(tmp_path: Path) -> None:
    """It is the one with node rank 0, for which torch takes the smallest name; the rendezvous is on another one."""
    with job_on(tmp_path, "zoe", "adam") as (hosts, job, told):
        told.reached(GATE)
        lost = time.time_ns()
        hosts["adam"].power_off()
        told.go()
        until(
            lambda: "waiting for adam to come back; step" in job.launchers["zoe"].output,
            "zoe says whom it waits for",
            LIMIT,
        )
        safe = max(told.saved())
        assert safe >= GATE
        assert saved_soon(told.incidents()[0], lost)
        hosts["adam"].power_on()
        job.start("adam")
        assert job.codes(LIMIT) == {"zoe": 0, "adam": 0}
    assert told.ends().keys() == {0, 1}
    assert (told.directory / "at-0-1").exists(), "the second attempt has a number of its own"
    assert told.conflicts() == []


# -- the whole matrix --------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("victim", ["ha", "hb"])
def test_a_rank_is_killed(tmp_path: Path, victim: str) -> None:
    """Both hosts restart, and all generators are restored: each launcher keeps the boxes of its own ranks."""
    with job_on(tmp_path, "ha", "hb") as (hosts, job, told):
        told.reached(GATE)
        [rank] = ranks_of(hosts[victim])
        os.kill(rank, signal.SIGKILL)
        told.go()
        assert job.codes(LIMIT) == {"ha": 0, "hb": 0}
    [incident] = told.incidents()
    assert (incident.ending, incident.steps_lost, incident.notes) == ("saved", 0, [])
    assert_whole(told, 2)


@pytest.mark.full
def test_a_rank_hangs_where_no_rendezvous_tells_of_the_restart(tmp_path: Path) -> None:
    """With c10d its launcher would hear that the other host waits; with static it has to end the rank by itself."""
    told = Told(tmp_path / "d")
    with network(tmp_path, "ha", "hb") as hosts:
        job = HostsJob(hosts, [WORKER, told.directory, STEPS, PACE], "ha", 1, ("--rdzv-backend", "static"),
                       HOSTS_GATE=str(GATE), LASTGASP_HANG_TIMEOUT="5")  # fmt: skip
        for number, name in enumerate(hosts):
            job.start(name, PET_NODE_RANK=str(number))
        told.reached(GATE)
        [rank] = ranks_of(hosts["hb"])
        os.kill(rank, signal.SIGSTOP)
        told.go()
        assert job.codes(LIMIT) == {"ha": 0, "hb": 0}, job.output
        assert "killing rank 1, which does not hear that the recovery is over" in job.launchers["hb"].output
    [incident] = told.incidents()
    assert (incident.ending, incident.steps_lost) == ("saved", 0)
    assert_whole(told, 2)


@pytest.mark.full
def test_a_host_never_returns(tmp_path: Path) -> None:
    with job_on(tmp_path, "ha", "hb", conf="join_timeout=20") as (hosts, job, told):
        told.reached(GATE)
        hosts["hb"].power_off()
        told.go()
        assert job.codes(LIMIT, "ha") == {"ha": exitcodes.SAVED}
        output = job.launchers["ha"].output
    assert_safe(told, GATE)
    assert "waiting for hb to come back; step" in output
    assert "not all hosts of the job (ha, hb) have come back in time; step" in output


@pytest.mark.full
@pytest.mark.parametrize("seconds", [1, 8, 12, 30])
@pytest.mark.parametrize("victim", ["ha", "hb"])
def test_the_link_is_cut_for_a_while(tmp_path: Path, victim: str, seconds: int) -> None:
    with job_on(tmp_path, "ha", "hb") as (hosts, job, told):
        told.reached(GATE)
        hosts[victim].cut()
        told.go()
        time.sleep(seconds)
        hosts[victim].mend()
        codes = job.codes(LIMIT)
    assert set(codes.values()) <= {0, exitcodes.SAVED}, codes
    if set(codes.values()) == {0}:
        assert told.ends().keys() == {0, 1}
    else:
        assert_safe(told, GATE)
    assert told.conflicts() == []
    assert all(incident.steps_lost == 0 for incident in told.incidents())
    if seconds <= 8:
        assert codes == {"ha": 0, "hb": 0}
        assert_whole(told, 2)
        assert told.incidents() == []


@pytest.mark.full
@pytest.mark.parametrize("names", [("ha", "hb"), ("zoe", "adam")])
def test_a_slow_network_that_loses_packets(tmp_path: Path, names: tuple[str, str]) -> None:
    """A job that has ended well ends with 0 on every host, whoever leaves first."""
    told = Told(tmp_path / "d")
    with network(tmp_path, *names) as hosts:
        hosts[names[1]].slow(0.2, 0.05)
        job = HostsJob(hosts, [WORKER, told.directory, 20, PACE], names[0])
        job.start()
        assert job.codes(START + LIMIT) == dict.fromkeys(names, 0), job.output
        assert hosts[names[1]].wire.lost > 0
    assert_whole(told, 2, 20)


@pytest.mark.full
def test_the_clock_of_a_host_is_two_hours_ahead(tmp_path: Path) -> None:
    told = Told(tmp_path / "d")
    with network(tmp_path, "ha", "hb") as hosts:
        hosts["hb"].clock = 7200.0
        job = HostsJob(hosts, [WORKER, told.directory, STEPS, PACE], "ha", HOSTS_GATE=str(GATE))
        job.start()
        told.reached(GATE)
        [rank] = ranks_of(hosts["ha"])
        os.kill(rank, signal.SIGKILL)
        told.go()
        assert job.codes(LIMIT) == {"ha": 0, "hb": 0}, job.output
    assert_whole(told, 2)


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_three_hosts_lose_one(tmp_path: Path, lost: int) -> None:
    names = ("h0", "h1", "h2")
    with job_on(tmp_path, *names, conf="join_timeout=30") as (hosts, job, told):
        told.reached(GATE, ranks=3)
        hosts[names[lost]].power_off()
        told.go()
        left = [name for name in names if name != names[lost]]
        assert job.codes(LIMIT, *left) == dict.fromkeys(left, exitcodes.SAVED)
    assert_safe(told, GATE)


@pytest.mark.full
def test_the_launcher_of_one_of_three_hosts_is_killed(tmp_path: Path) -> None:
    """Its rank trains on with the others. In the end those launchers that live wait for each other, and not for it."""
    with job_on(tmp_path, "h0", "h1", "h2") as (_, job, told):
        told.reached(GATE, ranks=3)
        job.launchers["h1"].kill()
        told.go()
        assert job.codes(TORCHS_BARRIER / 2, "h0", "h2") == {"h0": 0, "h2": 0}
        assert "1 of 3 launchers have died before the end" in job.launchers["h0"].output
    assert told.incidents() == []
    assert_whole(told, 3)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["rank", "power-ha", "power-hb"])
def test_two_hosts_of_two_ranks(tmp_path: Path, fault: str) -> None:
    """Where the controller goes with its host, two ranks save one step on their own, and none is replaced."""
    with job_on(tmp_path, "ha", "hb", ranks=2, conf="join_timeout=20") as (hosts, job, told):
        told.reached(GATE, ranks=4)
        if fault == "rank":
            os.kill(ranks_of(hosts["ha"])[0], signal.SIGKILL)
            told.go()
            assert job.codes(LIMIT) == {"ha": 0, "hb": 0}
            assert_whole(told, 4)
        else:
            lost, left = ("ha", "hb") if fault.endswith("ha") else ("hb", "ha")
            hosts[lost].power_off()
            told.go()
            assert job.codes(LIMIT, left) == {left: exitcodes.SAVED}
    assert_safe(told, GATE)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["ha", "hb"])
def test_told_to_stop_while_the_other_host_is_gone(tmp_path: Path, victim: str) -> None:
    """SIGTERM reaches the ranks although the launcher waits for a host that does not answer."""
    other = {"ha": "hb", "hb": "ha"}[victim]
    with job_on(tmp_path, "ha", "hb") as (hosts, job, told):
        told.reached(GATE)
        hosts[victim].power_off()
        told.go()
        job.launchers[other].kill(signal.SIGTERM)
        assert job.codes(LIMIT, other) == {other: exitcodes.SAVED}
    assert_safe(told, GATE)
