"""Real training over two hosts (gloo; a hand-written loop, or Lightning's): links cut, power lost, processes killed.

In each case every host that lives ends by itself, no completed step is lost, no checkpoint that was committed is ever
replaced by another one of its step; and the job ends with the numbers of an undisturbed one, or says why not.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from lastgasp import exitcodes
from lastgasp.checkpoint import SingleFile, verify
from support.hosts import Host, needs_hosts, network
from support.hosts_job import START, TORCH, Commits, HostsJob, Told, ranks_of, saved_soon
from support.waiting import until

LIMIT = 200.0
"""Seconds for a job to end once the fault has happened, on a loaded machine; a lost host is seen after 13."""
STEPS, PACE, GATE = 80, 0.02, 10
SUFFIX = {"loop": ".pt", "lightning": ".ckpt"}
KINDS = tuple(SUFFIX)
Reference = Callable[[str], dict[int, str]]

pytestmark = [needs_hosts, pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(1500)]


@dataclass
class Training:
    """A job over two hosts that has begun to train."""

    kind: str
    hosts: dict[str, Host]
    script: list[object]
    job: HostsJob
    told: Told
    commits: Commits

    def go_on(self) -> None:
        """Let the ranks pass their gate."""
        self.told.go()

    def again(self) -> str:
        """Start it once more, on all hosts, as a person would; it must end well. Returns what it has said."""
        for host in self.hosts.values():
            if not host.on:
                host.power_on()
        self.job = HostsJob(self.hosts, self.script, "ha", 1, ("--rdzv-conf", f"join_timeout={START:g}"))
        self.job.start()
        assert self.job.codes(START + LIMIT) == dict.fromkeys(self.hosts, 0), self.job.output
        return self.job.output

    def notes(self) -> str:
        """All that incidents say besides."""
        return "\n".join(note for incident in self.told.incidents() for note in incident.notes)

    def additions(self) -> list[Path]:
        """What was put beside checkpoints that others had committed."""
        return sorted(self.told.directory.glob(".*.more-*"))

    def assert_safe(self, before: int) -> None:
        """The step that had been completed, or a later one, is saved, once, and completely."""
        assert max(self.told.saved(), default=0) >= before
        assert all(incident.steps_lost == 0 for incident in self.told.incidents()), self.told.incidents()
        assert self.commits.replaced() == []
        for path in self.told.directory.glob("gasp-*" + SUFFIX[self.kind]):
            assert verify(path, SingleFile(SUFFIX[self.kind])).ok


@contextmanager
def training(folder: Path, kind: str, conf: str = "join_timeout=20", **variables: str) -> Iterator[Training]:
    """The job, once both ranks have completed step `GATE`, behind which they wait until `go_on`."""
    told = Told(folder / "d", "gasp-*" + SUFFIX[kind])
    told.directory.mkdir()
    script: list[object] = [TORCH, kind, told.directory, STEPS, PACE]
    with network(folder, "ha", "hb") as hosts, Commits(told.directory) as commits:
        job = HostsJob(hosts, script, "ha", 1, ("--rdzv-conf", conf), HOSTS_GATE=str(GATE), **variables)
        job.start()
        one = Training(kind, hosts, script, job, told, commits)
        try:
            told.reached(GATE)
            yield one
        except BaseException:
            print(job.output, told.saved(), commits.steps, *told.incidents(), sep="\n")
            raise


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What each rank of an undisturbed job holds in the end."""
    found: dict[str, dict[int, str]] = {}

    def run(kind: str) -> dict[int, str]:
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            told = Told(folder / "d")
            with network(folder, "alone") as hosts:
                job = HostsJob(hosts, [TORCH, kind, told.directory, STEPS, 0], "alone", ranks=2)
                job.start()
                assert job.codes(START + LIMIT) == {"alone": 0}, job.output
            found[kind] = told.ends()
        return found[kind]

    return run


@pytest.mark.parametrize(
    ("kind", "resumed"),
    [("loop", False), *(pytest.param(kind, True, marks=pytest.mark.full) for kind in KINDS)],
)
def test_the_first_hosts_launcher_is_killed(tmp_path: Path, kind: str, resumed: bool, undisturbed: Reference) -> None:
    """Both ranks save the same step, without a controller. The second one adds what the first commit lacks."""
    with training(tmp_path, kind) as one:
        one.job.launchers["ha"].kill()
        assert one.job.codes(LIMIT, "hb") == {"hb": exitcodes.SAVED}
        one.go_on()
        until(lambda: not ranks_of(one.hosts["ha"], TORCH), "the rank without a launcher has left, too", LIMIT)
        one.assert_safe(GATE)
        assert one.commits.steps == [GATE]
        assert len(one.additions()) == 1
        assert "the random state of rank 0 was added to it" in one.notes()
        output = one.job.launchers["hb"].output
        assert "the job's rendezvous cannot be reached" in output and f"step {GATE} is safe in" in output
        if resumed:
            one.again()
            assert one.told.ends() == undisturbed(kind)


# -- the whole matrix --------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("second", [0, 1])
def test_both_sides_of_a_cut_save_one_step(tmp_path: Path, kind: str, second: int, undisturbed: Reference) -> None:
    """Whichever is first: its commit counts, the other side adds its random state, and the job continues bit-equal."""
    with training(tmp_path, kind, HOSTS_SAVE_SECOND=str(second)) as one:
        one.hosts["hb"].cut()
        one.go_on()
        until(lambda: len(one.told.incidents()) == 2, "both sides have saved", LIMIT)
        one.hosts["hb"].mend()
        codes = one.job.codes(LIMIT)
        assert set(codes.values()) == {exitcodes.SAVED}
        one.assert_safe(GATE)
        assert one.commits.steps == [GATE]
        assert {incident.led_by for incident in one.told.incidents()} == {"controller", "rank 1"}
        assert len(one.additions()) == 1
        assert f"the random state of rank {second} was added to it" in one.notes()
        one.again()
        assert one.told.ends() == undisturbed(kind)


@pytest.mark.product
@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("victim", "seconds"), [("ha", 1), ("hb", 8), ("ha", 8), ("hb", 12), ("ha", 12), ("hb", 30), ("ha", 30)]
)
def test_the_link_is_cut(tmp_path: Path, kind: str, victim: str, seconds: int, undisturbed: Reference) -> None:
    with training(tmp_path, kind) as one:
        one.hosts[victim].cut()
        one.go_on()
        time.sleep(seconds)
        one.hosts[victim].mend()
        codes = one.job.codes(LIMIT)
        assert set(codes.values()) <= {0, exitcodes.SAVED}, codes
        one.assert_safe(GATE if one.told.incidents() else 0)
        if seconds <= 8:
            assert (codes, one.told.incidents()) == ({"ha": 0, "hb": 0}, [])
        said = one.job.output if set(codes.values()) == {0} else one.again()
        assert one.told.ends().keys() == {0, 1}
        if one.told.ends() != undisturbed(kind):
            # Packets were on their way when the sides gave each other up: one of them completed a step more.
            before, after = one.commits.steps
            assert after == before + 1
            assert re.search("no random state of rank [01] was saved", said), said


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", ["ha", "hb"])
def test_a_rank_is_killed(tmp_path: Path, kind: str, victim: str, undisturbed: Reference) -> None:
    with training(tmp_path, kind, "join_timeout=60") as one:
        [rank] = ranks_of(one.hosts[victim], TORCH)
        os.kill(rank, signal.SIGKILL)
        one.go_on()
        assert one.job.codes(LIMIT) == {"ha": 0, "hb": 0}
        one.assert_safe(GATE)
        [incident] = one.told.incidents()
        assert (incident.ending, incident.led_by, incident.notes) == ("saved", "controller", [])
        assert one.told.ends() == undisturbed(kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["loop"])
def test_the_other_hosts_launcher_is_killed(tmp_path: Path, undisturbed: Reference, kind: str) -> None:
    """Nobody stops what is healthy: its rank trains on to the end, and then nobody waits 300 s for a dead launcher."""
    with training(tmp_path, kind) as one:
        one.job.launchers["hb"].kill()
        one.go_on()
        assert one.job.codes(LIMIT, "ha") == {"ha": 0}
        until(lambda: not ranks_of(one.hosts["hb"], TORCH), "the rank without a launcher has ended", LIMIT)
        assert "1 of 2 launchers have died before the end" in one.job.launchers["ha"].output
        assert one.told.incidents() == []
        assert one.told.ends() == undisturbed(kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("victim", ["ha", "hb"])
def test_a_host_loses_its_power_for_ever(tmp_path: Path, kind: str, victim: str, undisturbed: Reference) -> None:
    """The random state of its rank is lost with it: the resume says so, and whatever else there was is restored."""
    other = {"ha": "hb", "hb": "ha"}[victim]
    with training(tmp_path, kind) as one:
        lost_at = time.time_ns()
        one.hosts[victim].power_off()
        one.go_on()
        assert one.job.codes(LIMIT, other) == {other: exitcodes.SAVED}
        one.assert_safe(GATE)
        [incident] = one.told.incidents()
        assert saved_soon(incident, lost_at)
        output = one.again()
        lost = {"ha": 0, "hb": 1}[victim]
        assert f"no random state of rank {lost} was saved" in output
        assert one.told.ends().keys() == undisturbed(kind).keys()


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_the_other_host_loses_its_power_and_comes_back(tmp_path: Path, kind: str) -> None:
    with training(tmp_path, kind, "join_timeout=200") as one:
        one.hosts["hb"].power_off()
        one.go_on()
        until(lambda: "waiting for hb to come back; step" in one.job.launchers["ha"].output, "ha waits", LIMIT)
        one.assert_safe(GATE)
        one.hosts["hb"].power_on()
        one.job.start("hb")
        assert one.job.codes(START + LIMIT) == {"ha": 0, "hb": 0}
        assert one.told.ends().keys() == {0, 1}
        assert "no random state of rank 1 was saved" in one.notes()


@pytest.mark.full
def test_the_hung_rank_of_another_host_is_not_waited_for(tmp_path: Path, undisturbed: Reference) -> None:
    """All is saved without it, and its launcher knows: it need not wait as long as for a rank that saves."""
    alone = {"LASTGASP_HANG_TIMEOUT": "8", "LASTGASP_RECOVERY": "restart", "LASTGASP_SAVE_TIMEOUT": str(10 * LIMIT)}
    with training(tmp_path, "loop", "join_timeout=200", **alone) as one:
        [hung] = ranks_of(one.hosts["hb"], TORCH)
        os.kill(hung, signal.SIGSTOP)
        one.go_on()
        assert one.job.codes(2 * LIMIT) == {"ha": 0, "hb": 0}, one.job.output
        one.assert_safe(GATE)
        assert one.told.ends() == undisturbed("loop")


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_hosts_with_disks_of_their_own_are_refused(tmp_path: Path, kind: str) -> None:
    """Before the first step, on both of them, with the remedy."""
    directory = tmp_path / "d"
    with network(tmp_path, "ha", "hb", own=[directory]) as hosts:
        job = HostsJob(hosts, [TORCH, kind, directory, STEPS, PACE], "ha")
        job.start()
        assert job.codes(START + LIMIT) == dict.fromkeys(hosts, exitcodes.REFUSED), job.output
        for launcher in job.launchers.values():
            assert "a directory that all hosts share: rank 1 did not see" in launcher.output
        assert not any(
            path.name.startswith("gasp-") for host in hosts.values() for path in host.own(directory).iterdir()
        )


@pytest.mark.full
@pytest.mark.parametrize("victim", ["ha", "hb"])
def test_a_rank_that_refuses_to_start_is_waited_for_by_nobody(tmp_path: Path, victim: str) -> None:
    """Before it has joined: its settings are wrong. The other hosts' ranks wait for it, which takes 300 s at most."""
    with network(tmp_path, "ha", "hb", "hc") as hosts:
        job = HostsJob(hosts, [TORCH, "loop", tmp_path / "d", STEPS, PACE], "ha")
        others = [name for name in hosts if name != victim]
        job.start(*others)
        job.start(victim, LASTGASP_SAVE_TIMEOUT="soon")
        assert job.codes(START, victim) == {victim: exitcodes.REFUSED}, job.output
        assert job.codes(LIMIT, *others) == dict.fromkeys(others, exitcodes.REFUSED), job.output
        for other in others:
            assert "stopped: a rank of another host refused to start" in job.launchers[other].output
            assert "restarting" not in job.launchers[other].output
