"""Real Megatron jobs that go on with fewer ranks, and with all again: the same samples in each step."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lastgasp.testing.faults import read_log
from support.hosts import needs_hosts, network
from support.hosts_job import START, HostsJob
from support.launchers import Running, incidents, running, until
from support.megatron import place
from support.megatron.job import DIST_OPT, SCRIPT, GptJob
from support.megatron.resized import EVALUATES, Done, check, done, job_in
from support.waiting import until as waited

GATES = (2, 5, 8)
OFFER = "a fault can be answered in place, as incarnation {}"
STOPS = "is to stop at the end of its step: missing ranks can be taken in"
"""What a rank says that waits at a gate meanwhile: it has to go on to that end by itself."""

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


def command(job: GptJob, least: int) -> list[str]:
    """With the number of ranks below which it restarts."""
    found = job.command()
    at = found.index("run") + 1
    return [*found[:at], "--min-ranks", str(least), *found[at:]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A job of four ranks without a fault."""
    job = job_in(tmp_path_factory.mktemp("undisturbed"))
    with running(job.folder, job.command(), **job.environment(), SAMPLES="1", LASTGASP="0") as [started]:
        assert started.code() == 0, started.output[-6000:]
    return done(job, started.output)


class Disturbed:
    """A job with faults, in which no process is forked for a dead rank."""

    def __init__(self, job: GptJob, started: Running) -> None:
        self.job, self.started = job, started

    def go(self, gate: int, incarnation: int) -> None:
        """Let the ranks pass a gate once the launcher can answer a fault in this incarnation."""
        until(lambda: OFFER.format(incarnation + 1) in self.started.output, f"incarnation {incarnation} is protected")
        self.open(gate)

    def open(self, gate: int) -> None:
        """Let the ranks pass it."""
        (self.job.folder / ("go" if gate == GATES[0] else f"go-{gate}")).touch()


def variables(job: GptJob, faults: str) -> dict[str, str]:
    """Of its environment."""
    gates = ",".join(map(str, GATES[1:]))
    return job.environment() | {
        "SAMPLES": "1", "LASTGASP_WARM": "off", "LASTGASP_LOG": "debug", "HOLD": str(job.folder / "go"), "HOLDS": gates,
        "LASTGASP_FAULT": faults, "LASTGASP_FAULT_LOG": str(job.folder / "faults.log"),
    }  # fmt: skip


def test_a_job_goes_on_with_fewer_ranks_and_takes_them_in_again(tmp_path: Path, undisturbed: Done) -> None:
    """Four ranks, three, two, and four."""
    job = job_in(tmp_path)
    faults = "kind=sigkill,rank=1,step=3,phase=backward;kind=sigkill,rank=2,step=6,phase=forward,incarnation=1"
    with running(tmp_path, command(job, 2), **variables(job, faults)) as [started]:
        disturbed = Disturbed(job, started)
        disturbed.go(GATES[0], 0)
        disturbed.go(GATES[1], 1)
        until(lambda: OFFER.format(3) in started.output, "two ranks are left")
        (tmp_path / "grow").touch()
        until(lambda: started.output.count(STOPS) >= 2, "the others can be taken in")
        disturbed.open(GATES[2])
        assert started.code() == 0, started.output[-8000:]
    assert len(read_log(tmp_path / "faults.log")) == 2
    told = [(one.rung, one.ending, one.steps_lost, one.world_size) for one in incidents(job.checkpoints)]
    assert told == [
        ("shrink", "in_place", 0, 4), ("shrink", "in_place", 0, 3), ("grow", "in_place", 0, 2),
    ], started.output[-8000:]  # fmt: skip
    check(done(job, started.output), undisturbed, job, started.output)


@pytest.mark.full
@pytest.mark.parametrize("dies", ["0 in 1", "2 in 1", "0 in 2", "1 in 2"])
def test_a_death_on_the_way_restarts_with_all_ranks(dies: str, tmp_path: Path, undisturbed: Done) -> None:
    """Of one that goes on with fewer, of one that takes others in, and of a new process (rank 1)."""
    job, grows = job_in(tmp_path), dies.endswith("2")
    faults = "kind=sigkill,rank=1,step=3,phase=backward"
    (tmp_path / "grow").touch()
    with running(tmp_path, command(job, 2), **variables(job, faults) | {"DIES_AGAIN": dies}) as [started]:
        disturbed = Disturbed(job, started)
        disturbed.go(GATES[0], 0)
        if grows:
            until(lambda: started.output.count(STOPS) >= 3, "the other one can be taken in")
        for gate in GATES[1:]:
            disturbed.open(gate)
        assert started.code() == 0, started.output[-8000:]
    told = incidents(job.checkpoints)
    rungs = ["shrink", "grow"] if grows else ["shrink"]
    assert [one.rung for one in told][: len(rungs)] == rungs, started.output[-8000:]
    assert len(told) > len(rungs) and not any(one.steps_lost for one in told), started.output[-8000:]
    check(done(job, started.output), undisturbed, job, started.output)


@pytest.mark.full
@needs_hosts
def test_a_lost_host_is_gone_on_without_and_taken_in_again(tmp_path: Path, undisturbed: Done) -> None:
    """Its power is off: nobody hears the end of a connection."""
    job = job_in(tmp_path)
    names = [name for name in job.environment() if name not in os.environ or name in ("PYTHONPATH", "OMP_NUM_THREADS")]
    own = variables(job, "")
    given = {name: own[name] for name in (*names, *(own.keys() - job.environment().keys())) if own[name]}
    given |= {"LASTGASP_MIN_RANKS": "2", "LASTGASP_WARM": "auto"}
    script = job.command()[job.command().index(str(SCRIPT)) :]
    options = ("--rdzv-conf", "join_timeout=20", "--framework", "megatron")
    (tmp_path / "grow").touch()
    with network(tmp_path, "ha", "hb") as hosts:
        over = HostsJob(hosts, script, "ha", 2, options, sys.executable, **given)
        over.start()
        first = over.launchers["ha"]
        waited(lambda: OFFER.format(1) + "\n" in first.output, "both launchers are ready", START)
        hosts["hb"].power_off()
        (tmp_path / "go").touch()
        waited(lambda: OFFER.format(2) in first.output, "two ranks are left", START)
        hosts["hb"].power_on()
        over.start("hb")
        waited(lambda: first.output.count(STOPS) >= 2, "the host can be taken in", START)
        for gate in GATES[1:]:
            (tmp_path / f"go-{gate}").touch()
        assert over.codes(START) == {"ha": 0, "hb": 0}, over.output
        output = "\n".join(one.output for one in over.launchers.values())
    told = [(one.rung, one.ending, one.steps_lost, one.world_size) for one in incidents(job.checkpoints)]
    assert told == [("shrink", "in_place", 0, 4), ("grow", "in_place", 0, 2)], over.output
    found = done(job, output)
    assert found.samples == undisturbed.samples
    check(Done(found.samples, undisturbed.rows, found.state), undisturbed, job, output)


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "least", "why"),
    [
        (EVALUATES, 4, "4 are the fewest, 3 are left"),
        (f"{EVALUATES} --global-batch-size 8", 2, "8 micro-batches cannot be shared evenly by 3 ranks"),
        (f"{EVALUATES} {DIST_OPT}", 2, "--use-distributed-optimizer: each rank has a part of the optimizer's state"),
        (f"{EVALUATES} --dataloader-type cyclic", 2, "--dataloader-type cyclic: which samples"),
    ],
    ids=["too-few", "uneven", "distributed-optimizer", "cyclic"],
)
def test_what_cannot_go_on_with_fewer_restarts(flags: str, least: int, why: str, tmp_path: Path) -> None:
    job = job_in(tmp_path, flags)
    with running(tmp_path, command(job, least), **variables(job, "kind=sigkill,rank=1,step=3,phase=backward")) as [one]:
        Disturbed(job, one).go(GATES[0], 0)
        for gate in GATES[1:]:
            Disturbed(job, one).open(gate)
        assert one.code() == 0, one.output[-8000:]
    [incident] = incidents(job.checkpoints)
    assert (incident.rung, incident.ending, incident.steps_lost) == ("", "saved", 0)
    assert why in incident.not_in_place
