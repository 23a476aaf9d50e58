"""MindIO's orders to real Megatron jobs: `pretrain` is entered again from the step that was saved within them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from lastgasp.testing.jobs import Finished
from support import mindx
from support.again_faults import DEVICE, VARIABLE
from support.launchers import incidents
from support.megatron import place
from support.megatron.job import DIST_OPT, TENSOR, GptJob
from support.recovery_backends import LEADERS, TORCH, Backend, Trace, used

Losses = dict[tuple[int, int], list[list[str]]]
LAYOUT = DirectoryLayout("iter_*")
RETRY = ["stop", "clean", "rollback"]
RECOVER = ["stop", "clean", "rebuild_group", "repair", "rollback"]
LINK, MEMORY = "HCCL OP RETRY FAILED", "UCE ERROR"
POD = {
    "HIGH_AVAILABILITY": "dump,recover,retry", "LASTGASP_TOKEN": "the secret of this test's job",
    "LASTGASP_BIND": mindx.HOST,
}  # fmt: skip
KILLED = "kind=sigkill,rank=1,step=8,phase=backward"
LATER = "kind=sigkill,rank=0,step=11,phase=backward,incarnation=1"

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


def job_in(folder: Path, flags: str = "--bf16", ranks: int = 2) -> GptJob:
    """Under `lastgasp run`, with no line of lastgasp in the script; a periodic save comes before the fault."""
    return GptJob(folder=folder, ranks=ranks, flags=flags, last=14, every=6, launcher="run",
                  launch_options=("--framework", "megatron"))  # fmt: skip


def in_pods(folder: Path, flags: str = "--bf16", ranks: int = 2) -> GptJob:
    """The same where TaskD and ClusterD have an agent."""
    return replace(job_in(folder, flags, ranks), launcher="mindx", launch_options=())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses of an undisturbed job, by its ranks and flags."""
    found: dict[tuple[str, int], Losses] = {}

    def losses(flags: str = "--bf16", ranks: int = 2) -> Losses:
        if (flags, ranks) not in found:
            job = job_in(tmp_path_factory.mktemp("reference"), flags, ranks)
            done = job.run({"LASTGASP": "0"}, timeout=400.0)
            assert done.ok, done.output[-4000:]
            found[flags, ranks] = job.losses()
        return found[flags, ranks]

    return losses


def run(job: GptJob, **variables: str) -> Finished:
    """To its end, which is a good one."""
    common = {"LASTGASP_RECOVERY": "auto", "LASTGASP_WARM": "off", "LASTGASP_FAULT_LOG": str(job.folder / "faults.log")}
    done = job.run(common | variables, timeout=400.0)
    assert done.ok, done.output[-8000:]
    return done


def pids(job: GptJob, rank: int) -> list[str]:
    """The processes of a rank, oldest first."""
    lines = (job.folder / "losses" / f"rank-{rank}.txt").read_text().splitlines()
    return list(dict.fromkeys(line.split()[0] for line in lines))


def check_losses(job: GptJob, expected: Losses, done: Finished) -> None:
    """Each step has the numbers of the undisturbed job, no complete one is done again, what is saved verifies."""
    found = job.losses()
    assert found.keys() == expected.keys(), done.output[-8000:]
    wrong = {key for key, times in found.items() if times[-1][-len(expected[key][0]) :] != expected[key][0]}
    assert wrong == set(), done.output[-8000:]
    again = {step for (_, step), times in found.items() if len(times) > 1 or len(times[0]) > len(expected[0, 0][0])}
    assert again <= {8, 11}, done.output[-8000:]
    assert all(verify(c.path, LAYOUT).ok for c in candidates([job.checkpoints], LAYOUT))


def check_orders(trace: Trace, rank: int, orders: list[str], states: list[str]) -> None:
    """What MindIO has ordered of a rank, and what that has reported."""
    known = {*RECOVER, "save_ckpt"}
    assert [name for name in trace.names(rank) if name in known] == orders
    assert [event["state"] for event in trace.events("report", rank)] == states


@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize(
    ("text", "flags", "ranks", "every"),
    [
        pytest.param(LINK, "--bf16", 2, 6, id="link"),
        pytest.param(LINK, "--bf16", 2, 8, id="saved just before", marks=pytest.mark.full),
        pytest.param(MEMORY, "--bf16", 2, 6, id="memory", marks=pytest.mark.full),
        pytest.param(LINK, f"--bf16 {TENSOR}", 4, 6, id="tensor-parallel", marks=pytest.mark.full),
        pytest.param(LINK, f"--bf16 {DIST_OPT}", 2, 6, id="shards", marks=pytest.mark.full),
    ],
)
def test_a_device_fault_is_repaired_and_the_step_done_again(
    leader: Backend, text: str, flags: str, ranks: int, every: int, tmp_path: Path, expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    job = replace(job_in(tmp_path / "job", flags, ranks), every=every)
    job.folder.mkdir()
    with used(leader, tmp_path, monkeypatch) as trace:
        done = run(job, **{DEVICE: text})
        if leader is TORCH:
            for rank in range(ranks):
                state = "RS_NORMAL" if rank != 1 else "RS_UCE" if text == MEMORY else "RS_HCCL_FAILED"
                check_orders(trace, rank, [*RETRY[:2], *(["repair"] if text == MEMORY else []), RETRY[2]], [state])
    assert [len(pids(job, rank)) for rank in (0, 1)] == [1, 1], done.output[-8000:]
    check_losses(job, expected(flags, ranks), done)
    assert (job.checkpoints / "iter_0000008").exists()
    [incident] = incidents(job.checkpoints)
    assert (incident.ending, incident.rung, incident.step_saved, incident.steps_lost) == ("in_place", "retry", 8, 0)
    assert [fault.rank for fault in incident.faults] == [1] and incident.led_by == "MindIO" and incident.from_files


@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_killed_ranks_get_new_processes_and_the_others_keep_theirs(
    leader: Backend, ranks: int, tmp_path: Path, expected: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """First rank 1, then, three steps later, rank 0, which writes and publishes otherwise, and where all meet."""
    flags = "--bf16" if ranks == 2 else "--bf16 --global-batch-size 12"
    job = in_pods(tmp_path / "job", flags, ranks)
    job.folder.mkdir()
    with used(leader, tmp_path, monkeypatch) as trace:
        done = run(job, LASTGASP_FAULT=f"{KILLED};{LATER}", **POD)
        if leader is TORCH:
            assert trace.events("save_ckpt") == []
    assert [len(pids(job, rank)) for rank in range(ranks)] == [2, 2, 1][:ranks], done.output[-8000:]
    check_losses(job, expected(flags, ranks), done)
    found = incidents(job.checkpoints)
    for incident, victim, step in zip(found, (1, 0), (8, 11), strict=True):
        ended = (incident.ending, incident.rung, incident.step_saved, incident.steps_lost)
        assert ended == ("in_place", "replace", step, 0) and incident.led_by == "MindIO in TaskD"
        assert [fault.rank for fault in incident.faults] == [victim] and incident.from_files


def check_restart(job: GptJob, done: Finished, expected: Losses) -> None:
    """Nothing was lost, and the job has ended as an undisturbed one."""
    assert (job.folder / "losses" / "second").exists(), done.output[-8000:]
    *_, incident = incidents(job.checkpoints)
    ends = ("saved", 8), ("nothing_to_save", None)  # where it was on disk already
    assert (incident.ending, incident.step_saved) in ends and incident.steps_lost == 0, incident
    check_losses(job, expected, done)


@pytest.mark.product("second")
@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize(
    "second",
    ["stop,0,self", "clean,1,self", "writing,0,self", "publishing,0,self", "rollback,1,self", "kept,0,self",
     "let go,1,self", "entered,0,self", "data sets,1,self", "first step,0,self"],
)  # fmt: skip
def test_a_second_fault_in_a_retry_is_answered_by_a_restart_from_the_same_step(
    leader: Backend, second: str, tmp_path: Path, expected: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    job = job_in(tmp_path / "job")
    job.folder.mkdir()
    with used(leader, tmp_path, monkeypatch):
        done = run(job, **{DEVICE: LINK, VARIABLE: second})
    check_restart(job, done, expected())


@pytest.mark.product("second")
@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize(
    "second",
    ["stop,0,self", "rebuild,1,self", "writing,0,self", "publishing,0,self", "rollback,0,self", "kept,0,self",
     "let go,0,self", "entered,1,self", "data sets,0,self", "first step,1,self"],
)  # fmt: skip
def test_a_second_fault_in_a_recover_is_answered_by_a_restart_from_the_same_step(
    leader: Backend, second: str, tmp_path: Path, expected: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    job = in_pods(tmp_path / "job", "--bf16 --global-batch-size 12", 3)
    job.folder.mkdir()
    with used(leader, tmp_path, monkeypatch):
        done = run(job, **POD, **{"LASTGASP_FAULT": KILLED, VARIABLE: second})
    check_restart(job, done, expected("--bf16 --global-batch-size 12", 3))


@pytest.mark.full
def test_what_nobody_asked_for_is_refused_and_dumped(
    tmp_path: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron's own default is a restart."""
    job = in_pods(tmp_path / "job")
    job.folder.mkdir()
    with used(TORCH, tmp_path, monkeypatch) as trace:
        done = run(job, LASTGASP_FAULT=KILLED, **POD, LASTGASP_RECOVERY="restart")
        assert "strategy recover is refused: rank 0: recovery=restart" in done.output
        assert trace.events("rebuild_group") == [] and trace.events("save_ckpt")
    [incident] = incidents(job.checkpoints)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 8, 0), incident
    check_losses(job, expected(), done)
