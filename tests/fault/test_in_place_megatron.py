"""Recovery in place of real Megatron jobs: `pretrain` is entered again, no healthy process ends, same losses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lastgasp import exitcodes
from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from lastgasp.testing.faults import read_log
from support import again_faults, card
from support.disturbed import READY, warm_for
from support.held import held, more
from support.launchers import Running, incidents, running, until
from support.megatron import place
from support.megatron.job import DIST_OPT, PIPELINE, TENSOR, TWO_INSTANCES, GptJob
from support.megatron.matrix import LAYOUTS, MOMENTS, OF_ARENAS, OF_EXPERTS, Case, flags_of

Losses = dict[tuple[int, int], list[list[str]]]
LAYOUT = DirectoryLayout("iter_*")

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


def job_in(folder: Path, flags: str, ranks: int = 2) -> GptJob:
    """Under `lastgasp run`, with no line of lastgasp in the script."""
    return GptJob(folder=folder, ranks=ranks, flags=flags, last=14, every=8, launcher="run",
                  launch_options=("--framework", "megatron"))  # fmt: skip


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses of an undisturbed job, by its ranks and flags."""
    found: dict[tuple[str, int], Losses] = {}

    def losses(flags: str, ranks: int = 2) -> Losses:
        if (flags, ranks) not in found:
            job = job_in(tmp_path_factory.mktemp("reference"), flags, ranks)
            done = job.run({"LASTGASP": "0"}, timeout=400.0)
            assert done.ok, done.output[-4000:]
            found[flags, ranks] = job.losses()
        return found[flags, ranks]

    return losses


@contextmanager
def disturbed(job: GptJob, faults: str, **variables: str) -> Iterator[Running]:
    """The job, whose faults come once a warm process is ready, if there is to be one; it ends well."""
    go, log = job.folder / "go", job.folder / "faults.log"
    (job.folder / "losses").mkdir(parents=True)
    environment = {"LASTGASP_WARM": warm_for(faults), "LASTGASP_LOG": "debug", "HOLD": str(go)}
    asked = {} if card.KIND == "cpu" else {"LASTGASP_RECOVERY": "auto"}  # the default there is `restart`
    environment |= asked | {"LASTGASP_FAULT": faults, "LASTGASP_FAULT_LOG": str(log)} | variables
    waits = ["--distributed-timeout-minutes", "6"]  # pipeline stages, for a rank that is held until then
    with running(job.folder, [*job.command(), *waits], **(job.environment() | environment)) as [started]:
        if environment["LASTGASP_WARM"] != "off":
            until(lambda: READY in started.output, "the warm process is ready")
        go.touch()
        yield started
        assert started.code() == 0, started.output[-6000:]
    assert len(read_log(log)) == len([part for part in faults.split(";") if part]), started.output[-6000:]


def pids(job: GptJob, rank: int) -> list[str]:
    """The processes of a rank, oldest first."""
    lines = (job.folder / "losses" / f"script-{rank}").read_text().splitlines()
    return list(dict.fromkeys(line.split()[0] for line in lines))


def check(job: GptJob, started: Running, expected: Losses, *lost: int | None) -> None:
    """Recoveries in place, one for each of `lost` (a rank, or none), which lost no step and no other process."""
    found = incidents(job.checkpoints)
    where = f"{found}\n{started.output[-6000:]}"
    rungs = ["retry" if rank is None else "replace" for rank in lost or (None,)]
    assert [(one.ending, one.steps_lost, one.rung) for one in found] == [("in_place", 0, rung) for rung in rungs], where
    assert [len(pids(job, rank)) for rank in range(job.ranks)] == [1 + lost.count(r) for r in range(job.ranks)], where
    check_losses(job, expected, where)


def check_losses(job: GptJob, expected: Losses, where: str) -> None:
    """Each step has the numbers of the undisturbed job, and what is on disk verifies."""
    found = job.losses()
    assert found.keys() == expected.keys(), where
    # The step that was cut short and the one that was done again are one in the log of a process.
    wrong = {key for key, times in found.items() if times[-1][-len(expected[key][0]) :] != expected[key][0]}
    assert wrong == set(), where
    assert all(verify(c.path, LAYOUT).ok for c in candidates([job.checkpoints], LAYOUT)), where


def test_a_killed_rank_is_replaced(tmp_path: Path, expected: Any) -> None:
    flags = f"--bf16 {TWO_INSTANCES}"
    job = job_in(tmp_path, flags)
    with disturbed(job, "kind=sigkill,rank=0,step=6,phase=backward") as started:
        pass
    check(job, started, expected(flags), 0)
    script = [(job.folder / "losses" / f"script-{rank}").read_text().splitlines() for rank in range(2)]
    new, survivor = ([line.split() for line in lines] for lines in script)
    begun = next(n for n, line in enumerate(new) if line[0] != new[0][0])
    assert new[begun][1] == "1" and [one[1:] for one in new[begun:]] == [one[1:] for one in survivor[begun - len(new):]]


def test_a_step_that_failed_is_done_again(tmp_path: Path, expected: Any) -> None:
    flags = f"--bf16 {TWO_INSTANCES}"
    job = job_in(tmp_path, flags)
    with disturbed(job, "kind=exception,rank=1,step=5,phase=forward") as started:
        pass
    check(job, started, expected(flags))


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "ranks", "faults", "lost"),
    [
        (f"--bf16 {TWO_INSTANCES}", 4, "kind=sigkill,rank=3,step=6,phase=forward", (3,)),
        (f"--bf16 {DIST_OPT}", 2, "kind=sigkill,rank=0,step=6,phase=backward", (0,)),
        (f"--bf16 {TENSOR}", 4, "kind=sigkill,rank=0,step=8,phase=periodic_save", (0,)),
        ("--bf16", 2, "kind=sigstop,rank=1,step=6,phase=backward", (1,)),
        ("--bf16", 2, "kind=sigkill,rank=1,step=5,phase=after_update", (1,)),
        ("--bf16", 2, "kind=sigkill,rank=0,step=4,phase=backward;"
         "kind=sigkill,rank=1,step=9,phase=backward,incarnation=1", (0, 1)),
        ("--bf16", 2, "kind=sigkill,rank=0,step=6,phase=backward;"
         "kind=sigkill,rank=1,step=6,phase=backward,incarnation=1", (0, 1)),
        ("--bf16 --eval-iters 2 --eval-interval 3 --num-workers 1", 2, "kind=sigkill,rank=1,step=6,phase=data", (1,)),
        (f"--bf16 {PIPELINE} {DIST_OPT} --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 --overlap-grad-reduce "
         "--overlap-param-gather", 4, "kind=sigkill,rank=3,step=6,phase=forward", (3,)),
    ],
    ids=["four-ranks", "from-an-arena", "tensor-parallel", "hang", "after-the-update", "two-faults",
         "before-a-new-step", "evaluation", "virtual-stages"],
)  # fmt: skip
def test_more_of_them(
    flags: str, ranks: int, faults: str, lost: tuple[int, ...], tmp_path: Path, expected: Any
) -> None:
    job = job_in(tmp_path, flags, ranks)
    # Longer than the wait for the warm process, in which no rank makes progress.
    hang = {"LASTGASP_HANG_TIMEOUT": "90"} if "sigstop" in faults else {}
    with disturbed(job, faults, **hang) as started:
        pass
    check(job, started, expected(flags, ranks), *lost)


def matrix() -> list[Case]:
    """Each layout with a killed rank, the moments taking turns; each moment of an exception; of some layouts one."""
    layouts = (*LAYOUTS, *OF_EXPERTS)
    return [
        *(Case(layout, "sigkill", moment) for layout, moment in zip(layouts, itertools.cycle(MOMENTS), strict=False)),
        *(Case("dp2", "exception", moment) for moment in MOMENTS),
        *(Case(layout, "exception", "backward") for layout in ("pp2-dp2", "tp2", "dp2-one-instance")),
        *(Case(layout, "exception", "forward") for layout in ("ep2-one-instance", "ep2-dp4-two-instances")),
        *(Case("dp2-one-instance", "sigkill", moment) for moment in OF_ARENAS),
    ]


@pytest.mark.product("layout")
@pytest.mark.full
@pytest.mark.parametrize("case", matrix(), ids=str)
def test_the_matrix_of_faults(case: Case, tmp_path: Path, expected: Any) -> None:
    """That of `test_megatron_faults`, in place."""
    ranks, flags = flags_of(case.layout)
    job = job_in(tmp_path, flags, ranks)
    with disturbed(job, case.environment["LASTGASP_FAULT"], LASTGASP_ARENA="every 1") as started:
        pass
    check(job, started, expected(flags, ranks), *([case.victim] if case.kind == "sigkill" else []))


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "fault", "stuck", "lost"),
    [(4, "sigkill,rank=3,step=6,phase=data", 0, (0, 3)), (2, "exception,rank=0,step=6,phase=data", 1, (1,))],
)
def test_a_survivor_that_does_not_leave_its_training_is_replaced(
    ranks: int, fault: str, stuck: int, lost: tuple[int, ...], tmp_path: Path, expected: Any
) -> None:
    job = job_in(tmp_path, "--bf16", ranks)
    variables = {"STAYS": str(stuck), "LASTGASP_FINISH_TIMEOUT": "1", "LASTGASP_WARM": "auto"}
    with disturbed(job, f"kind={fault}", **variables) as started:
        pass
    [incident] = incidents(job.checkpoints)
    where = f"{incident}\n{started.output[-6000:]}"
    assert (incident.ending, incident.rung, incident.steps_lost) == ("in_place", "replace", 0), where
    assert incident.notes == [f"rank {stuck} does not leave its training: it gets a new process"], where
    assert [len(pids(job, rank)) for rank in range(ranks)] == [1 + (rank in lost) for rank in range(ranks)], where
    check_losses(job, expected("--bf16", ranks), where)


@pytest.mark.full
def test_a_sigterm_restarts(tmp_path: Path, expected: Any) -> None:
    job = job_in(tmp_path, "--bf16")
    with disturbed(job, "kind=sigterm,rank=1,step=6,phase=forward") as started:
        pass
    [incident] = incidents(job.checkpoints)
    assert (incident.ending, incident.steps_lost) == ("saved", 0), started.output[-6000:]
    assert "a fault of that kind is not answered in place (sigterm on rank 1)" in incident.not_in_place
    check_losses(job, expected("--bf16"), started.output[-6000:])


ASYNC = (
    f"--bf16 {DIST_OPT} --ckpt-format torch_dist --async-save --use-persistent-ckpt-worker --async-strategy mcore"
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("faults", "lost"),
    [
        ("kind=sigkill,rank=1,step=8,phase=forward", (1,)),
        ("kind=sigkill,rank=0,step=8,phase=backward", (0,)),
        ("kind=exception,rank=1,step=8,phase=forward", ()),
        ("kind=sigkill,rank=1,step=6,phase=backward", (1,)),
        ("kind=sigkill,rank=0,step=8,phase=periodic_save", (0,)),
    ],
    ids=["last-rank", "first-rank", "exception", "before-any", "while-it-begins"],
)
def test_an_async_save_under_way_is_abandoned(
    faults: str, lost: tuple[int, ...], tmp_path: Path, expected: Any
) -> None:
    """Those that follow are made, and nothing that writes is left of it."""
    job = job_in(tmp_path, ASYNC)
    with disturbed(job, faults, LASTGASP_ARENA="every 1") as started:
        pass
    check(job, started, expected(ASYNC), *lost)
    assert next(c.step for c in candidates([job.checkpoints], LAYOUT)) == 14
    assert [path.name for path in job.checkpoints.iterdir() if "tmp" in path.name] == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"LASTGASP_RECOVERY": "retry"}, "recovery=retry: no rank is replaced"),
        ({"LASTGASP_RECOVERY": "replace", "LASTGASP_FAULT": "kind=exception,rank=0,step=6,phase=backward"},
         "recovery=replace: no step is tried again"),
        ({"LASTGASP_FAULT": "kind=sigkill,rank=0,step=0,phase=forward"}, ""),
    ],
    ids=["retry-only", "replace-only", "before-a-step"],
)  # fmt: skip
def test_what_is_not_answered_in_place_restarts(
    variables: dict[str, str], why: str, tmp_path: Path, expected: Any
) -> None:
    job = job_in(tmp_path, "--bf16")
    with disturbed(job, "kind=sigkill,rank=0,step=6,phase=backward", **variables) as started:
        pass
    [incident] = incidents(job.checkpoints)
    assert why in incident.not_in_place, started.output[-6000:]
    assert incident.rung == "" and len(pids(job, 1)) == 2
    check_losses(job, expected("--bf16"), started.output[-6000:])


@pytest.mark.full
def test_save_ends_the_job_and_the_next_start_resumes(tmp_path: Path, expected: Any) -> None:
    """By Megatron's own form of the setting."""
    job = job_in(tmp_path, "--bf16 --lastgasp-recovery save")
    fault = {"LASTGASP_FAULT": "kind=sigkill,rank=0,step=6,phase=backward"}
    first = job.run({"LASTGASP_WARM": "off"} | fault, timeout=400.0)
    assert first.returncode == exitcodes.SAVED, first.output[-6000:]
    [incident] = incidents(job.checkpoints)
    assert (incident.ending, incident.step_saved, incident.not_in_place) == ("saved", 6, "recovery=save")
    second = job.run({"LASTGASP_WARM": "off"}, timeout=400.0)
    assert second.ok, second.output[-6000:]
    check_losses(job, expected("--bf16"), second.output[-6000:])


@pytest.mark.product
@pytest.mark.full
@pytest.mark.parametrize(
    ("point", "who"), [("let go", "1"), *itertools.product(("entered", "data sets", "first step"), "01")]
)
def test_a_death_at_each_point_of_a_recovery_loses_no_step(
    point: str, who: str, tmp_path: Path, expected: Any
) -> None:
    """Rank 0 of two has a new process; the survivor dies, or that one. The step is on disk."""
    flags = "--bf16 --global-batch-size 4"  # one micro-batch: who begins another one begins a step
    job = job_in(tmp_path, flags)
    faults, second = "kind=sigkill,rank=0,step=6,phase=backward", {again_faults.VARIABLE: f"{point},{who},self"}
    with disturbed(job, faults, **second) as started:
        pass
    found = incidents(job.checkpoints)
    where = f"{found}\n{started.output[-6000:]}"
    assert (job.losses_folder / "second").exists(), where
    assert found[0].rung == "replace" and not any(one.steps_lost for one in found), where
    for rank in range(2):
        trained = [line.split()[0] for line in (job.losses_folder / f"script-{rank}").read_text().splitlines()]
        assert len([*itertools.groupby(trained)]) == len(set(trained)), where  # one process after the other
    check_losses(job, expected(flags), where)


@pytest.mark.full
def test_a_new_process_that_dies_before_it_meets_the_others_is_not_waited_for(tmp_path: Path, expected: Any) -> None:
    """By its own timeout the survivor would wait ten minutes for it, which is Megatron's default."""
    job = job_in(tmp_path, "--bf16 --distributed-timeout-minutes 10")
    with disturbed(job, "kind=sigkill,rank=0,step=6,phase=backward", DIES_STARTING="0") as started:
        pass
    found = incidents(job.checkpoints)
    where = f"{found}\n{started.output[-6000:]}"
    assert [one.rung for one in found][:1] == ["replace"] and not any(one.steps_lost for one in found), where
    check_losses(job, expected("--bf16"), where)


OFFER = "a fault can be answered in place, as incarnation {}\n"
FAULTS, SETTLED, MEMORY = 30, 5, 40_000
"""Faults in one job; after how many of them what is held is compared with; kB."""
KINDS = ("sigkill,rank=0", "sigkill,rank=0", "exception,rank=1", "sigkill,rank=0", "exception,rank=0")


@pytest.mark.full
def test_nothing_grows_with_the_number_of_faults(tmp_path: Path) -> None:
    """Neither with the survivor, which has workers of data loaders and what `torch_dist` saves with, nor the launcher.

    Nor is anything left of those that were killed.
    """
    last = 3 * FAULTS + 4
    flags = f"--bf16 --num-workers 2 --ckpt-format torch_dist --train-iters {last + 6}"
    calm, job = (replace(job_in(tmp_path / name, flags), last=last, every=2) for name in ("calm", "job"))
    assert calm.run({"LASTGASP": "0"}, timeout=400.0).ok
    job.folder.mkdir()
    holds = [3 * number for number in range(1, FAULTS + 2)]
    kinds = [KINDS[number % len(KINDS)] for number in range(FAULTS)]
    faults = ";".join(f"kind={kind},step={step},phase=backward,incarnation={number}"
                      for number, (kind, step) in enumerate(zip(kinds, holds, strict=False)))  # fmt: skip
    before, dead = "", list[int]()
    with disturbed(job, faults, HOLDS=",".join(map(str, holds))) as started:
        for number, step in enumerate(holds):
            until(lambda: OFFER.format(number + 1) in started.output or started.process.poll() is not None,  # noqa: B023
                  f"incarnation {number + 1} is offered")  # fmt: skip
            until(lambda: [_iteration(job, rank) for rank in range(2)] == [step, step], f"all are at {step}")  # noqa: B023
            assert [pid for pid in dead if _session(pid)] == []
            victim, survivor = (int(pids(job, rank)[-1]) for rank in range(2))
            both = (survivor, started.process.pid)
            if number == SETTLED:
                before = held(*both)
            if number == FAULTS:  # the launcher has a thread more at times
                until(lambda: not more(before, held(*both), MEMORY), f"no growth: {before}, {held(*both)}")  # noqa: B023
            if number < FAULTS and "sigkill" in kinds[number]:
                dead.append(victim)
            (job.folder / f"go-{step}").touch()
    check(job, started, calm.losses(), *[0 if "sigkill" in kind else None for kind in kinds])


def _iteration(job: GptJob, rank: int) -> int:
    lines = (job.folder / "losses" / f"rank-{rank}.txt").read_text().splitlines()
    return int(lines[-1].split()[1])


def _session(leader: int) -> list[int]:
    """Processes that are left of a rank, with all that it has started."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, session, *_ = file.read_text().rpartition(")")[2].split()
            if int(session) == leader and state != "Z":
                found.append(int(file.parent.name))
    return found
