"""Sharded training over two hosts, of which one is lost: its shards are in memory of the other one.

What goes on from there is bit-equal to an undisturbed run, since every rank goes back to the copied step.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from lastgasp import arena, exitcodes
from lastgasp.checkpoint import verify
from lastgasp.gasp.attempt import FROM_BUDDIES
from lastgasp.pytorch.sharded import LAYOUT
from support.hosts import Host, needs_hosts, network
from support.hosts_job import START, TORCH, HostsJob, Told, ranks_of
from support.waiting import until

LIMIT = 200.0
"""Seconds for a job to end once the fault has happened, on a loaded machine; a lost host is seen after 13."""
STEPS, PACE, GATE, APART = 24, 0.02, 10, 4
LAST = GATE // APART * APART
"""The newest step at the gate that goes to the partner."""
pytestmark = [needs_hosts, pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(1500)]


@dataclass
class Training:
    """A job over two hosts, whose ranks wait behind step `GATE`; `LAST` has come to both partners."""

    hosts: dict[str, Host]
    job: HostsJob
    told: Told
    ranks: int


def copies(launcher: int) -> list[tuple[int, ...]]:
    """The steps in each of the copies that a launcher keeps for another host's ranks."""
    found = []
    for name in os.listdir(f"/proc/{launcher}/fd"):
        path = f"/proc/{launcher}/fd/{name}"
        try:
            if arena.NAME not in os.readlink(path):
                continue
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        known = arena.whose(fd)
        if known is not None and known[2]:
            found.append(arena.steps(fd, known[1]))
        os.close(fd)
    return sorted(set(found))


def arrived(launcher: int) -> bool:
    """All that can be sent at the gate has come."""
    return copies(launcher) == [(LAST, LAST - APART)]


@contextmanager
def training(folder: Path, ranks: int = 1, buddy: str = f"every {APART}") -> Iterator[Training]:
    """Start it, and wait until it stands at the gate and the copies have arrived."""
    told = Told(folder / "d", "gasp-*.dcp")
    told.directory.mkdir()
    script: list[object] = [TORCH, "sharded", told.directory, STEPS, PACE]
    variables = {"HOSTS_GATE": str(GATE), "LASTGASP_ARENA": "every 1", "LASTGASP_BUDDY": buddy}
    with network(folder, "ha", "hb") as hosts:
        job = HostsJob(hosts, script, "ha", ranks, ("--rdzv-conf", "join_timeout=200"), **variables)
        job.start()
        try:
            told.reached(GATE, ranks=2 * ranks)
            if buddy != "off":
                for launcher in job.launchers.values():
                    until(partial(arrived, launcher.pid), "the copies are there", START)
            yield Training(hosts, job, told, ranks)
        except BaseException:
            print(job.output, told.saved(), *told.incidents(), sep="\n")
            raise


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[int, str]]:
    """What each rank of an undisturbed job holds in the end, by the number of ranks."""
    found: dict[int, dict[int, str]] = {}

    def run(ranks: int) -> dict[int, str]:
        if ranks not in found:
            folder = tmp_path_factory.mktemp("alone")
            told = Told(folder / "d")
            with network(folder, "alone") as hosts:
                job = HostsJob(hosts, [TORCH, "sharded", told.directory, STEPS, 0], "alone", ranks=ranks)
                job.start()
                assert job.codes(START + LIMIT) == {"alone": 0}, job.output
            found[ranks] = told.ends()
        return found[ranks]

    return run


def lose(one: Training, name: str, how: str) -> None:
    """A host, with its launcher and its ranks."""
    victim = one.hosts[name]
    if how == "power":
        victim.power_off()
    else:
        ranks = ranks_of(victim, TORCH)
        for pid in ranks:  # none lives to answer that another one is gone
            os.kill(pid, signal.SIGSTOP)
        for pid in (one.job.launchers[name].pid, *ranks):  # nsenter would stop together with a stopped launcher
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("how", "ranks"), [("killed", 1), pytest.param("power", 2, marks=pytest.mark.full)])
def test_a_lost_hosts_shards_are_saved_from_its_partner(
    tmp_path: Path, how: str, ranks: int, undisturbed: Callable[[int], dict[int, str]]
) -> None:
    with training(tmp_path, ranks) as one:
        lose(one, "hb", how)
        (one.told.directory / "go").touch()
        until(lambda: bool(one.told.saved()), "the survivors have saved", LIMIT)
        until(lambda: f"; step {LAST} is safe in" in one.job.launchers["ha"].output, "ha waits for hb", LIMIT)
        [incident] = one.told.incidents()
        assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", LAST, GATE - LAST)
        lost = ", ".join(map(str, range(ranks, 2 * ranks)))
        assert FROM_BUDDIES.format(ranks=lost, step=LAST, lost=GATE - LAST) in incident.notes
        assert set(incident.savers) <= set(range(ranks)) and one.told.saved() == [LAST]
        assert verify(next(one.told.directory.glob("gasp-*.dcp")), LAYOUT).ok
        if how == "power":
            one.hosts["hb"].power_on()
        one.job.start("hb")
        assert one.job.codes(START + LIMIT) == {"ha": 0, "hb": 0}, one.job.output
        assert one.told.ends() == undisturbed(2 * ranks)


@pytest.mark.full
@pytest.mark.parametrize(("how", "ranks"), [("killed", 1), ("power", 2)])
def test_the_first_host_is_lost_and_with_it_the_controller(
    tmp_path: Path, how: str, ranks: int, undisturbed: Callable[[int], dict[int, str]]
) -> None:
    """Its ranks' shards, and those of their own host, are what the survivors find at their launcher."""
    with training(tmp_path, ranks) as one:
        lose(one, "ha", how)
        (one.told.directory / "go").touch()
        assert one.job.codes(LIMIT, "hb") == {"hb": exitcodes.SAVED}
        assert one.told.saved() == [LAST]
        assert verify(next(one.told.directory.glob("gasp-*.dcp")), LAYOUT).ok
        found = one.told.incidents()
        assert {(each.ending, each.step_saved, each.steps_lost) for each in found} == {("saved", LAST, GATE - LAST)}
        lost = ", ".join(map(str, range(ranks)))
        assert FROM_BUDDIES.format(ranks=lost, step=LAST, lost=GATE - LAST) in [n for each in found for n in each.notes]
        if not one.hosts["ha"].on:
            one.hosts["ha"].power_on()
        one.job.start()
        assert one.job.codes(START + LIMIT) == {"ha": 0, "hb": 0}, one.job.output
        assert one.told.ends() == undisturbed(2 * ranks)
