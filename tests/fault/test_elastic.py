"""A job that goes on with fewer ranks where nobody can take a lost one's place: each sample once, the same numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from lastgasp import exitcodes
from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support import again_faults
from support.elastic_runs import OFFER, STOPS, faulted, go
from support.hosts import needs_hosts, network
from support.hosts_job import START, HostsJob
from support.launchers import SUPPORT, finish, incidents, run, running, until
from support.samples import check_samples, used
from support.train_elastic import GATES, SAMPLES

WORKER = SUPPORT / "train_elastic.py"

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a job of four ranks without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for step in GATES:
        (folder / f"go-{step}").touch()
    assert finish(job(folder), folder, LASTGASP_WARM="off").ok
    return folder


def job(directory: Path, *more: str, ranks: int = 4, script: Path = WORKER) -> list[str]:
    """Its command line."""
    command = run(script, "--dir", directory, "--final", directory / "final.pt", *more, ranks=ranks)
    at = command.index("run") + 1
    return [*command[:at], "--min-ranks", "2", *command[at:]]


def test_the_job_goes_on_with_fewer_ranks_and_takes_them_in_again(tmp_path: Path, undisturbed: Path) -> None:
    """Four ranks, three, two, and four: the processes that live through it stay, and nothing is lost."""
    directory, log = tmp_path / "d", tmp_path / "faults.log"
    directory.mkdir()
    faults = "kind=sigkill,rank=2,step=3,phase=backward;kind=sigkill,rank=0,step=6,phase=backward,incarnation=1"
    variables = {"LASTGASP_WARM": "off", "LASTGASP_LOG": "debug", "LASTGASP_FAULT_LOG": str(log)}
    with running(tmp_path, job(directory), LASTGASP_FAULT=faults, **variables) as [started]:
        for incarnation, step in enumerate(GATES[:2]):
            go(directory, step, started, incarnation)
        until(lambda: entered(directory, 1)[-1:] == [(6, 2)], "two ranks are left")
        (directory / "grow").touch()
        until(lambda: started.output.count(STOPS) >= 2, "the others can be taken in")
        for step in GATES[2:]:
            (directory / f"go-{step}").touch()
        assert started.code() == 0, started.output[-8000:]
    assert len(read_log(log)) == 2, started.output[-8000:]
    first, second, third = incidents(directory)
    assert [(one.rung, one.ending, one.steps_lost) for one in (first, second, third)] == [
        ("shrink", "in_place", 0), ("shrink", "in_place", 0), ("grow", "in_place", 0),
    ], started.output[-8000:]  # fmt: skip
    assert (third.world_size, third.faults, third.incarnation) == (2, [], 2)
    assert "2 of 4 ranks were missing, and have new processes: training goes on with all of them" in third.notes
    assert any("digest" in note for note in third.notes)
    rows = {rank: pids(directory, rank) for rank in range(4)}
    assert rows[1][0] == rows[1][-1] and rows[3][0] == rows[3][-1], rows
    assert rows[0][0] != rows[0][-1] and rows[2][0] != rows[2][-1], rows
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


@pytest.mark.full
@pytest.mark.parametrize("since", [0, 5])
def test_a_loop_that_exchanges_something_in_its_micro_batches_restarts(since: int, tmp_path: Path) -> None:
    """Three ranks would do it four times. Where it is seen only then, nothing of it comes to an update."""
    directory, expected = tmp_path / "d", tmp_path / "undisturbed"
    directory.mkdir()
    expected.mkdir()
    more = ["--exchanges", "--since", str(since)]
    for step in GATES:
        (expected / f"go-{step}").touch()
    assert finish(job(expected, *more), expected, LASTGASP_WARM="off").ok
    where = faulted(tmp_path, job(directory, *more), directory, "kind=sigkill,rank=2,step=3,phase=backward")
    found = incidents(directory)
    told = [("shrink", "in_place", 0)] * bool(since) + [("", "saved", 0)]
    assert [(one.rung, one.ending, one.steps_lost) for one in found] == told, where
    why = "ranks exchanged something within a micro-batch" if since else "its micro-batches exchange something"
    assert why in (str(found[1].faults) if since else found[0].not_in_place)
    check_samples(directory, expected)
    assert differences(expected / "final.pt", directory / "final.pt") == []


@pytest.mark.full
def test_ranks_that_are_busy_when_all_should_stop_are_asked_again_later(tmp_path: Path, undisturbed: Path) -> None:
    """In a callback, a validation, a long wait for data. Their processes were ended for that, and the job restarted."""
    directory = tmp_path / "d"
    directory.mkdir()
    variables = {"LASTGASP_WARM": "off", "LASTGASP_LOG": "debug"}
    variables |= {"LASTGASP_FAULT": "kind=sigkill,rank=3,step=3,phase=backward"}
    with running(tmp_path, job(directory), **variables) as [one]:
        go(directory, GATES[0], one, 0)
        until(lambda: GATES[1] in steps(directory) and entered(directory, 0)[-1:] == [(3, 3)], "three are at a gate")
        (directory / "grow").touch()
        until(lambda: one.output.count(STOPS) >= 6, "all are asked for the second time", 200)
        for step in GATES[1:]:
            (directory / f"go-{step}").touch()
        assert one.code() == 0, one.output[-8000:]
    told = [(found.rung, found.ending, found.step_saved, found.steps_lost) for found in incidents(directory)]
    assert told == [("shrink", "in_place", 3, 0), ("grow", "in_place", GATES[1], 0)], one.output[-8000:]
    assert [len({*pids(directory, rank)}) for rank in range(4)] == [1, 1, 1, 2]
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


@pytest.mark.full
@pytest.mark.parametrize("second", ["handover,3,self", "handover,3,0", "state taken,3,1"])
def test_a_rank_dies_while_another_one_is_taken_in(second: str, tmp_path: Path, undisturbed: Path) -> None:
    """The new one, who gives it the state, or somebody else: the step is saved, and all four start again with it."""
    directory, log = tmp_path / "d", tmp_path / "faults.log"
    directory.mkdir()
    (directory / "grow").touch()
    variables = {"LASTGASP_WARM": "off", "LASTGASP_LOG": "debug", "LASTGASP_FAULT_LOG": str(log)}
    variables |= {"LASTGASP_FAULT": "kind=sigkill,rank=3,step=3,phase=backward", again_faults.VARIABLE: second}
    with running(tmp_path, job(directory), **variables) as [one]:
        go(directory, GATES[0], one, 0)
        until(lambda: one.output.count(STOPS) >= 3, "another one can be taken in")
        for step in GATES[1:]:
            (directory / f"go-{step}").touch()
        assert one.code() == 0, one.output[-8000:]
    assert (directory / "second").exists()
    told = [(found.rung, found.ending, found.step_saved, found.steps_lost) for found in incidents(directory)]
    grown = told[1][2]  # at the first end of a step at which it was there
    expected = [("shrink", "in_place", 3, 0), ("grow", "in_place", grown, 0), ("", "saved", grown, 0)]
    assert told == expected and grown in range(4, GATES[1] + 1), one.output[-8000:]
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


@pytest.mark.full
@pytest.mark.parametrize("what", ["other code", "die"])
def test_who_cannot_be_taken_in_does_no_harm(what: str, tmp_path: Path, undisturbed: Path) -> None:
    """The script was edited, or the new process ends: the others do not notice, and train to the end."""
    directory, log, script = tmp_path / "d", tmp_path / "faults.log", tmp_path / "train_elastic.py"
    directory.mkdir()
    script.write_bytes(WORKER.read_bytes())
    variables = {"LASTGASP_WARM": "off", "LASTGASP_LOG": "debug", "LASTGASP_FAULT_LOG": str(log)}
    faults = "kind=sigkill,rank=3,step=3,phase=backward"
    with running(tmp_path, job(directory, script=script), LASTGASP_FAULT=faults, **variables) as [one]:
        go(directory, GATES[0], one, 0)
        until(lambda: "started " in (directory / "rank-3").read_text(), "a new process has begun")
        if what == "other code":
            script.write_bytes(WORKER.read_bytes() + b"# edited\n")
        (tmp_path / "grow").write_text(what)
        (tmp_path / "grow").rename(directory / "grow")
        until(lambda: "rank 3 stays missing" in one.output, "it is given up")
        for step in GATES[1:]:
            (directory / f"go-{step}").touch()
        assert one.code() == 0, one.output[-8000:]
    why = "exited with code 5" if what == "die" else "it runs other code than the ranks that are there (the script)"
    assert why in one.output
    [first] = incidents(directory)
    assert (first.rung, first.steps_lost) == ("shrink", 0)
    assert [len(set(pids(directory, rank))) for rank in range(3)] == [1, 1, 1]
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


@pytest.mark.full
def test_the_job_goes_on_with_fewer_ranks_down_to_the_fewest(tmp_path: Path, undisturbed: Path) -> None:
    """Four ranks, three, two; then all four again from the step that the last one has saved. No step is lost."""
    directory, log = tmp_path / "d", tmp_path / "faults.log"
    directory.mkdir()
    faults = (
        "kind=sigkill,rank=2,step=3,phase=backward;"
        "kind=sigkill,rank=0,step=6,phase=backward,incarnation=1;"
        "kind=sigkill,rank=1,step=8,phase=backward,incarnation=2"
    )
    variables = {"LASTGASP_WARM": "off", "LASTGASP_LOG": "debug", "LASTGASP_FAULT_LOG": str(log)}
    with running(tmp_path, job(directory), LASTGASP_FAULT=faults, **variables) as [started]:
        for incarnation, step in enumerate(GATES[:3]):
            go(directory, step, started, incarnation)
        (directory / f"go-{GATES[3]}").touch()
        assert started.code() == 0, started.output[-8000:]
    assert len(read_log(log)) == 3, started.output[-8000:]
    first, second, third = incidents(directory)
    assert [(one.rung, one.ending, one.steps_lost) for one in (first, second, third)] == [
        ("shrink", "in_place", 0), ("shrink", "in_place", 0), ("", "saved", 0),
    ], started.output[-8000:]  # fmt: skip
    assert (first.world_size, second.world_size, third.world_size) == (4, 3, 2)
    [why] = [note for note in first.notes if note.startswith("rank 2 could not get new processes")]
    assert why.endswith("training goes on with 3 of 4 ranks")
    assert any("digest" in note for note in first.notes)
    assert "2 are the fewest, 1 are left" in third.not_in_place
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


@pytest.mark.full
@pytest.mark.parametrize(
    "second",
    ["state kept,3,self", "joining,2,self", "handover,2,self", "released,0,3", "handover,0,2", "state taken,2,0"],
)
def test_another_rank_dies_on_its_way_to_the_fewer(second: str, tmp_path: Path, undisturbed: Path) -> None:
    """By its number before or after: the step is saved by another one, and all four ranks start again with it."""
    directory, log = tmp_path / "d", tmp_path / "faults.log"
    directory.mkdir()
    variables = {"LASTGASP_WARM": "off", "LASTGASP_LOG": "debug", "LASTGASP_FAULT_LOG": str(log)}
    variables |= {"LASTGASP_FAULT": "kind=sigkill,rank=1,step=3,phase=backward", again_faults.VARIABLE: second}
    with running(tmp_path, job(directory), **variables) as [one]:
        go(directory, GATES[0], one, 0)
        for step in GATES[1:]:
            (directory / f"go-{step}").touch()
        assert one.code() == 0, one.output[-8000:]
    assert (directory / "second").exists()
    first, last = incidents(directory)
    assert (first.rung, first.steps_lost, last.ending, last.steps_lost) == ("shrink", 0, "saved", 0), one.output[-8000:]
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


@pytest.mark.full
def test_steps_get_smaller_where_that_is_asked_for(tmp_path: Path) -> None:
    """Three steps of 16 samples, and then of 12; gradients are summed as it comes."""
    directory, log = tmp_path / "d", tmp_path / "faults.log"
    directory.mkdir()
    variables = {"LASTGASP_WARM": "off", "LASTGASP_LOG": "debug", "LASTGASP_FAULT_LOG": str(log)}
    command = job(directory, "--batch", "scaled", "--any-order")
    with running(tmp_path, command, LASTGASP_FAULT="kind=sigkill,rank=1,step=3,phase=backward", **variables) as [one]:
        go(directory, GATES[0], one, 0)
        for step in GATES[1:]:
            (directory / f"go-{step}").touch()
        assert one.code() == 0, one.output[-8000:]
    [incident] = incidents(directory)
    assert (incident.rung, incident.ending, incident.steps_lost) == ("shrink", "in_place", 0), one.output[-8000:]
    steps = used(directory)
    sizes = [sum(steps[step][1].values()) for step in range(1, 13)]
    assert sizes == [16, 16, 16, 12, 12, 6, *[12] * 6]
    assert sum((steps[step][1] for step in range(1, 7)), Counter[int]()) == Counter(range(SAMPLES))
    assert max(sum((steps[step][1] for step in range(7, 13)), Counter[int]()).values()) == 1


@needs_hosts
@pytest.mark.full
@pytest.mark.parametrize("back", ["in place", "torchrun", "die", "die later"])
def test_a_host_is_lost_and_the_other_goes_on_without_it(back: str, tmp_path: Path, undisturbed: Path) -> None:
    """Its power is off: nobody hears the end of a connection. A rank that is killed later is replaced as ever.

    When the host is back and its launcher is started again, its ranks are taken in; where one of them ends before that,
    or when it is about to begin, the job restarts on both. No step is lost. torchrun's own launcher does the same.
    """
    directory, log = tmp_path / "d", tmp_path / "faults.log"
    directory.mkdir()
    script = [WORKER, "--dir", directory, "--final", directory / "final.pt"]
    variables = {"LASTGASP_WARM": "auto", "LASTGASP_LOG": "debug"}
    variables |= {again_faults.VARIABLE: "handover,3,self"} if back == "die later" else {}
    variables |= {} if back == "torchrun" else {"LASTGASP_MIN_RANKS": "2"}
    nodes = "1:2" if back == "torchrun" else ""
    faults = "kind=sigkill,rank=1,step=8,phase=backward,incarnation=1"
    with network(tmp_path, "ha", "hb") as hosts:
        variables |= {"LASTGASP_FAULT": faults, "LASTGASP_FAULT_LOG": str(log)}
        job = HostsJob(hosts, script, "ha", 2, nnodes=nodes, **variables)
        job.start()
        until(lambda: ready(job, 1), "both launchers are ready", START)
        hosts["hb"].power_off()
        for step in GATES[:2]:
            (directory / f"go-{step}").touch()
        until(lambda: ready(job, 2), "the first launcher can replace its ranks", START)
        (directory / f"go-{GATES[2]}").touch()
        until(lambda: entered(directory, 1)[-1:] == [(8, 2)], "the killed rank is replaced", START)
        (directory / "grow").write_text(back)
        hosts["hb"].power_on()
        job.start("hb")
        if back != "die":
            until(lambda: job.launchers["ha"].output.count(STOPS) >= 2, "the host can be taken in", START)
            (directory / f"go-{GATES[3]}").touch()
        until(lambda: entered(directory, 3)[-1:] == [(10, 4)], "the job has all of its ranks again", START)
        (directory / f"go-{GATES[3]}").touch()
        assert job.codes(START + 200) == {"ha": 0, "hb": 0}, job.output
    assert len(read_log(log)) == 1, job.output
    first, second, third, *more = incidents(directory)
    assert (first.rung, first.ending, first.steps_lost) == ("shrink", "in_place", 0), job.output
    assert any("launchers of other hosts cannot be reached" in note for note in first.notes)
    assert (second.rung, second.ending, second.steps_lost) == ("replace", "in_place", 0), job.output
    told = [(one.rung, one.ending, one.step_saved, one.steps_lost) for one in (third, *more)]
    assert told == [*[("grow", "in_place", 10, 0)] * (back != "die"), *[("", "saved", 10, 0)] * back.startswith("die")]
    stays = pids(directory, 1)[-2] == pids(directory, 1)[-1]
    assert (len({*pids(directory, 0)}), stays) == ((2, False) if back.startswith("die") else (1, True))
    if back == "die":
        assert "this host is not taken in without a restart: its process has ended (exited with code 5)" in job.output
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


@needs_hosts
@pytest.mark.full
def test_a_host_that_comes_back_without_the_shared_directory_stays_missing(tmp_path: Path, undisturbed: Path) -> None:
    """It was taken in, and saved onto its own disk what the others could never resume from. They train on without."""
    directory = tmp_path / "d"
    directory.mkdir()
    script = [WORKER, "--dir", directory, "--final", directory / "final.pt"]
    with network(tmp_path, "ha", "hb") as hosts:
        job = HostsJob(hosts, script, "ha", 2, LASTGASP_WARM="auto", LASTGASP_LOG="debug", LASTGASP_MIN_RANKS="2")
        job.start()
        until(lambda: ready(job, 1), "both launchers are ready", START)
        hosts["hb"].power_off()
        (directory / f"go-{GATES[0]}").touch()
        until(lambda: entered(directory, 1)[-1:] == [(3, 2)], "two ranks are left", START)
        until(lambda: ready(job, 2), "they can be stopped", START)
        hosts["hb"].power_on()
        own = f"mount -t tmpfs none {directory} && touch {directory}/grow"
        assert hosts["hb"].start(["sh", "-c", own]).code(30) == 0
        job.start("hb")
        assert job.codes(START, "hb") == {"hb": exitcodes.REFUSED}, job.output
        for step in GATES[1:]:
            (directory / f"go-{step}").touch()
        assert job.codes(START, "ha") == {"ha": 0}, job.output
    for launcher in job.launchers.values():
        assert f"hb stays missing: {directory} is not the directory" in launcher.output, job.output
    [first] = incidents(directory)
    assert (first.rung, first.steps_lost) == ("shrink", 0)
    assert [len({*pids(directory, rank)}) for rank in range(2)] == [1, 1]
    assert not [one for one in directory.iterdir() if "shared" in one.name]
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


@needs_hosts
@pytest.mark.full
@pytest.mark.parametrize("first", ["ha", "hb"])
def test_a_host_joins_a_job_that_has_begun_without_it(first: str, tmp_path: Path, undisturbed: Path) -> None:
    """torchrun stops the ranks for it, and starts all: the controller is the one of the first host by its name."""
    directory = tmp_path / "d"
    directory.mkdir()
    script = [WORKER, "--dir", directory, "--final", directory / "final.pt"]
    options = ("--rdzv-conf", "join_timeout=60,last_call_timeout=2")
    with network(tmp_path, "ha", "hb") as hosts:
        job = HostsJob(hosts, script, first, 2, options, nnodes="1:2", LASTGASP_WARM="off")
        job.start(first)
        until(lambda: entered(directory, 1) == [(0, 2)] and GATES[0] in steps(directory), "it has begun", START)
        job.start(*hosts.keys() - {first})
        until(lambda: entered(directory, 3) == [(GATES[0], 4)], "it has all of its ranks", START)
        for step in GATES:
            (directory / f"go-{step}").touch()
        assert job.codes(START) == {"ha": 0, "hb": 0}, job.output
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", GATES[0], 0), job.output
    ends = {name: "done at step 12; 0 faults survived" in one.output for name, one in job.launchers.items()}
    assert ends == {"ha": True, "hb": False}, job.output
    check_samples(directory, undisturbed)
    assert differences(undisturbed / "final.pt", directory / "final.pt") == []


def steps(directory: Path) -> set[int]:
    """Those that ranks have completed."""
    return set(used(directory)) if list(directory.glob("rank-*")) else set()


def entered(directory: Path, rank: int) -> list[tuple[int, int]]:
    """With which step this rank has entered its training, and with how many ranks."""
    try:
        lines = (directory / f"rank-{rank}").read_text().splitlines()
    except FileNotFoundError:
        return []
    rows = [line.split() for line in lines if line.startswith("entered ")]
    return [(int(step), int(world)) for _, _, step, _, world in rows]


def pids(directory: Path, rank: int) -> list[int]:
    """The processes that have entered the training as this rank, in their order."""
    lines = (directory / f"rank-{rank}").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("entered ")]


def ready(job: HostsJob, incarnation: int) -> bool:
    """The first launcher can replace ranks in that incarnation."""
    return OFFER.format(incarnation) + "\n" in job.launchers["ha"].output
