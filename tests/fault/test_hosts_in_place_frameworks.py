"""Two hosts and a framework: a fault on either of them is answered in place, no healthy process ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support import again_faults, lean
from support.hosts import needs_hosts, network
from support.hosts_job import START, HostsJob
from support.launchers import SUPPORT, incidents, torchrun, undisturbed_jobs
from support.megatron import place
from support.megatron.job import SCRIPT, TWO_INSTANCES, GptJob
from support.waiting import until

LIMIT = 200.0
OFFER = "a fault can be answered in place, as incarnation 1\n"
LIGHTNING, TRANSFORMERS = SUPPORT / "train_again_lightning.py", SUPPORT / "train_again_transformers.py"
SHARDED = {"sharded loop": SUPPORT / "train_again_sharded.py", "shards": SUPPORT / "train_again_lightning_sharded.py"}
KILLED_LAST = "kind=sigkill,rank={},step=6,phase=backward"
KILLED_FIRST = "kind=sigkill,rank=0,step=6,phase=backward"
KILLED_IN_UPDATE = "kind=sigkill,rank=1,step=6,phase=update"
HUNG = "kind=sigstop,rank=1,step=6,phase=forward"
RAISED = "kind=exception,rank=1,step=6,phase=forward"
_OURS = ("PYTHONPATH", "OMP_NUM_THREADS")

pytestmark = [needs_hosts, pytest.mark.fault, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]


@contextmanager
def waiting(
    folder: Path, script: Sequence[object], each: int, *options: str, python: str = "", **variables: str
) -> Iterator[HostsJob]:
    """A job over two hosts with so many ranks on `each`, once a fault can be answered in place."""
    variables |= {"LASTGASP_WARM": "auto", "LASTGASP_LOG": "debug", "LASTGASP_RECOVERY": "auto"}
    variables["HF_HUB_OFFLINE"] = "1"  # what a script sets itself keeps its ranks from being forked
    with network(folder, "ha", "hb") as hosts:
        more = ("--rdzv-conf", "join_timeout=20", *options)
        job = HostsJob(hosts, script, "ha", each, more, python, **variables)
        job.start()
        until(lambda: OFFER in job.launchers["ha"].output, "both launchers are ready", START)
        yield job


@contextmanager
def training(
    folder: Path, script: Sequence[object], each: int, faults: str, *options: str, **more: str
) -> Iterator[HostsJob]:
    """The same with a fault; it ends well."""
    log = folder / "faults.log"
    with waiting(folder, script, each, *options, LASTGASP_FAULT=faults, LASTGASP_FAULT_LOG=str(log), **more) as job:
        yield job
        assert set(job.codes(START + LIMIT).values()) == {0}, job.output
    assert len(read_log(log)) == 1, job.output


def check(job: HostsJob, directory: Path, processes: dict[int, list[str]], replaced: int | None) -> None:
    """One recovery in place, which lost no step and no other process; `processes` of each rank, oldest first."""
    [incident] = incidents(directory)
    rung = "retry" if replaced is None else "replace"
    assert (incident.ending, incident.rung, incident.steps_lost) == ("in_place", rung, 0), (incident, job.output)
    assert {rank: len(set(pids)) for rank, pids in processes.items()} == {
        rank: 1 + (rank == replaced) for rank in processes
    }, job.output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final weights of a job without a fault on one host, by script, number of ranks and options."""
    return undisturbed_jobs(
        tmp_path_factory,
        lambda folder, script, ranks, *more: [
            _python(script), *torchrun(script, "--dir", folder, *more, ranks=ranks)[1:]
        ],
    )


def _python(script: Path) -> str:
    return sys.executable if script == TRANSFORMERS else lean.python()


@pytest.mark.parametrize(
    ("script", "each", "fault", "replaced"),
    [
        pytest.param(LIGHTNING, 2, KILLED_LAST.format(3), 3, id="lightning-killed"),
        pytest.param(LIGHTNING, 1, KILLED_FIRST, 0, id="lightning-the only one of the first host"),
        pytest.param(LIGHTNING, 1, RAISED, None, id="lightning-raised"),
        pytest.param(TRANSFORMERS, 2, KILLED_LAST.format(3), 3, id="transformers-killed"),
        pytest.param(TRANSFORMERS, 1, KILLED_FIRST, 0, id="transformers-the only one of the first host"),
        pytest.param(TRANSFORMERS, 1, RAISED, None, id="transformers-raised"),
        *(pytest.param(script, each, fault, replaced, id=f"{name}-{case}")
          for name, script in SHARDED.items() for case, each, fault, replaced in (
            ("killed", 2, KILLED_LAST.format(3), 3),
            ("the only one of the first host", 1, KILLED_FIRST, 0),
            ("in its update", 1, KILLED_IN_UPDATE, 1),
            ("raised", 1, RAISED, None),
            ("hung", 1, HUNG, 1))),
    ],
)  # fmt: skip
def test_a_fault_is_answered_in_place(
    script: Path, each: int, fault: str, replaced: int | None, tmp_path: Path, undisturbed: Any
) -> None:
    if script == TRANSFORMERS:
        pytest.importorskip("transformers", reason="pip install '.[transformers]'")
    directory = tmp_path / "d"
    directory.mkdir()
    hang = {"LASTGASP_HANG_TIMEOUT": "8"} if fault == HUNG else {}
    with training(tmp_path, [script, "--dir", directory], each, fault, python=_python(script), **hang) as job:
        (directory / "go").touch()
    ranks = range(2 * each)
    rows = {rank: (directory / f"rank-{rank}").read_text().split("\n") for rank in ranks}
    entered = {rank: [row.split()[1] for row in rows[rank] if row.startswith("entered")] for rank in ranks}
    check(job, directory, entered, replaced)
    assert differences(undisturbed(script, 2 * each), directory / "final.pt") == []


@pytest.mark.parametrize(
    ("second", "ending"), [("group made,1", "in_place"), ("first step,1", "in_place"), ("state kept,0", "")]
)
def test_a_second_kill_loses_no_part(second: str, ending: str, tmp_path: Path, undisturbed: Any) -> None:
    """Of the new process on the second host: its arena, or its predecessor's, is there. Of the survivor: a restart."""
    directory, script = tmp_path / "d", SHARDED["sharded loop"]
    directory.mkdir()
    more = {again_faults.VARIABLE: f"{second},self"}
    with training(tmp_path, [script, "--dir", directory], 1, KILLED_LAST.format(1), **more) as job:
        (directory / "go").touch()
    found = incidents(directory)
    assert (directory / "second").exists(), job.output
    assert {(one.ending, one.rung, one.steps_lost) for one in found[:1]} == {("in_place", "replace", 0)}, job.output
    assert not any(one.steps_lost for one in found), (found, job.output)
    assert not ending or [one.ending for one in found] == ["in_place", ending], (found, job.output)
    for rank in range(2):
        rows = (directory / f"rank-{rank}").read_text().split("\n")
        assert {row.split()[2] for row in rows if row.startswith("entered")} == {"0", "6"}, (rows, job.output)
    assert differences(undisturbed(script, 2), directory / "final.pt") == []


@pytest.mark.parametrize("script", SHARDED.values(), ids=SHARDED)
@pytest.mark.parametrize("seconds", [5, 30])
def test_parts_of_a_host_whose_link_is_cut(script: Path, seconds: int, tmp_path: Path, undisturbed: Any) -> None:
    """A short cut is none; after a long one nobody has all parts, and the job goes on from what was left, or anew."""
    directory, more = tmp_path / "d", ("--stateless",) if script == SHARDED["shards"] else ()
    directory.mkdir()
    command = [script, "--dir", directory, *more]
    with waiting(tmp_path, command, 1) as job:
        job.hosts["hb"].cut()
        (directory / "go").touch()
        time.sleep(seconds)
        job.hosts["hb"].mend()
        codes = set(job.codes(START + LIMIT).values())
        if codes != {0}:
            job = HostsJob(job.hosts, command, "ha", 1)
            job.start()
            assert set(job.codes(START + LIMIT).values()) == {0}, job.output
    found = incidents(directory)
    assert (codes, found) == ({0}, []) or seconds > 5, (found, job.output)
    assert {one.ending for one in found} <= {"saved", "gave_up", "in_arenas"}, (found, job.output)
    assert differences(undisturbed(script, 2, *more), directory / "final.pt") == []


@pytest.mark.skipif(bool(place.missing()), reason=place.missing())
@pytest.mark.parametrize(
    ("fault", "replaced"),
    [
        pytest.param(KILLED_LAST.format(1), 1, id="killed"),
        pytest.param(KILLED_FIRST, 0, id="the only one of the first host"),
        pytest.param(RAISED, None, id="raised"),
    ],
)
def test_a_fault_of_megatron_is_answered_in_place(fault: str, replaced: int | None, tmp_path: Path) -> None:
    flags = f"--bf16 {TWO_INSTANCES}"
    plain = GptJob(folder=tmp_path / "plain", flags=flags, last=14, every=8, launcher="run")
    done = plain.run({"LASTGASP": "0"}, timeout=400.0)
    assert done.ok, done.output[-4000:]
    found = GptJob(folder=tmp_path, flags=flags, last=14, every=8, launcher="run")
    (tmp_path / "losses").mkdir()
    script = found.command()[found.command().index(str(SCRIPT)) :]
    more = {name: value for name, value in found.environment().items() if name not in os.environ or name in _OURS}
    hold = tmp_path / "go"
    with training(
        tmp_path, script, 1, fault, "--framework", "megatron", python=sys.executable, HOLD=str(hold), **more
    ) as job:
        hold.touch()
    lines = {rank: (tmp_path / "losses" / f"rank-{rank}.txt").read_text().splitlines() for rank in range(2)}
    check(job, found.checkpoints, {rank: [line.split()[0] for line in lines[rank]] for rank in lines}, replaced)
    before, after = plain.losses(), found.losses()
    assert before.keys() == after.keys(), job.output
    assert {key for key, times in after.items() if times[-1][-len(before[key][0]) :] != before[key][0]} == set()
