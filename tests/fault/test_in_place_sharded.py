"""Recovery in place where each rank alone holds a part: survivors stay, a new process takes the dead one's arena."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lastgasp.checkpoint import candidates
from lastgasp.gasp.incidents import NOBODY
from lastgasp.testing.weights import differences
from support import again_faults, fsdp_strategy
from support.again_in_parts import LIGHTNING, LOOP, MOMENTS, Case, Job, check_same
from support.disturbed import disturbed, lines
from support.launchers import incidents, undisturbed_jobs
from support.train_sharded import FLAT

FSDP = tuple(one for one in fsdp_strategy.SHAPES if one not in ("fsdp-grads", "fsdp-whole", "fsdp-hybrid"))

KILL = "kind=sigkill,rank=1,step=7,phase=backward"  # ModelCheckpoint has not saved that step
SECOND = "no step was completed since training began, when the fault before was answered in place"
NOT_BEGUN = "not every rank can be entered again"
OTHER_SHAPES = (
    (LOOP, "zero", 2, "sigkill,0,8,forward"),
    (LOOP, "zero", 2, "sigkill,1,8,backward"),
    (LOOP, "zero", 2, "sigkill,1,8,after_update"),
    (LOOP, "zero", 2, "exception,1,8,forward"),
    (LOOP, "half", 2, "sigkill,1,8,backward"),
    (LOOP, "offload", 2, "sigkill,1,8,update"),
    (LOOP, "checkpointed", 2, "sigkill,1,8,backward"),
    (LOOP, "hybrid", 4, "sigkill,3,8,backward"),
    *((LOOP, shape, 2, f"sigkill,{rank},8,{moment}") for shape in FLAT if shape not in ("flat-hybrid", "flat-whole")
      for rank, moment in ((0, "update"), (1, "backward"))),
    (LIGHTNING, "plain", 4, "sigkill,0,8,update"),
    (LIGHTNING, "tensor", 2, "sigkill,1,8,backward"),
    (LIGHTNING, "both", 4, "sigkill,3,8,update"),
    (LIGHTNING, "ending", 2, "sigkill,1,8,backward"),
    (LIGHTNING, "ending", 2, "sigkill,0,8,update"),
    (LIGHTNING, "manual", 2, "sigkill,1,8,update"),
    (LIGHTNING, "late", 2, "sigkill,0,8,backward"),
    *((LIGHTNING, shape, 2, f"sigkill,{rank},8,{moment}") for shape in FSDP
      for rank, moment in ((0, "update"), (1, "backward"))),
    (LIGHTNING, "fsdp", 4, "sigkill,2,8,backward"),
    (LIGHTNING, "fsdp", 2, "sigstop,1,8,backward"),
    (LIGHTNING, "fsdp", 2, "exception,1,8,forward"),
    *((job, *case) for job in (LOOP, LIGHTNING) for case in (
        ("plain", 4, "sigkill,2,8,backward"),
        ("hybrid", 4, "sigkill,0,8,forward"),
        ("hybrid", 4, "exception,1,8,backward"),
        ("accumulated", 2, "sigkill,1,8,backward"),
    )),
)  # fmt: skip

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]
full = pytest.mark.full


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directory of a job without a fault."""
    return undisturbed_jobs(tmp_path_factory, lambda folder, job, *key: job.command(folder, *key), "")


def cases() -> Iterator[Case]:
    """Each kind of fault on either rank at each moment; other shapes; several faults; arenas that hold older steps."""
    for job in (LOOP, LIGHTNING):
        for kind, rank, phase in itertools.product(("sigkill", "exception", "sigstop"), (0, 1), MOMENTS):
            # Who raises behind its update has completed the step: it is there for the copy into its arena.
            complete = kind == "exception" and phase in ("step_end", "arena_copy")
            yield Case(job, (f"{kind},{rank},8,{phase}",), begun=(8 + complete,))
        yield Case(job, ("sigkill,1,7,backward", "sigkill,1,8,update"), begun=(7, 8))
        # From live states: no step is lost although the arenas hold an older one.
        yield Case(job, ("exception,1,8,forward",), more=("--arena", "every 5"))
    yield Case(LOOP, ("sigkill,1,8,backward",), more=("--arena", "every 5"), begun=(5,), lost=3)
    for job, shape, ranks, fault in OTHER_SHAPES:
        yield Case(job, (fault,), shape, ranks)
    for rank in (0, 3):  # where its replica has completed that step, the new process begins with what that one has
        yield Case(LOOP, (f"sigkill,{rank},8,update",), "hybrid", 4, replica=True)


def marks(case: Case) -> tuple[Any, ...]:
    """A kill in the update, where the survivor has completed the step and goes back, covers the others."""
    kind = "sigkill" if case.job is LIGHTNING else "exception"
    covers = case.shape == "plain" and case.faults == (f"{kind},1,8,update",)
    return (() if covers else (full,)) + ((pytest.mark.cold,) if "sigstop" in case.faults[0] else ())


@pytest.mark.product("shape")
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=marks(case)) for case in cases()])
def test_faults_are_answered_in_place(case: Case, tmp_path: Path, undisturbed: Any) -> None:
    case.check(tmp_path, undisturbed)
    [first, *_] = incidents(tmp_path / "d")
    assert any("3 completed steps are done again" in note for note in first.notes) == bool(case.lost)


@pytest.mark.product("second")
@full
@pytest.mark.parametrize("job", [LOOP, LIGHTNING], ids=lambda job: job.name)
@pytest.mark.parametrize(
    ("ranks", "second", "more"),
    [
        pytest.param(2, "", ("--dies", "1"), id="the new process, at once"),
        pytest.param(2, "kind=sigkill,rank=0,step=7,phase=forward", (), id="a survivor"),
        pytest.param(2, "kind=sigkill,rank=1,step=7,phase=forward", (), id="the new process"),
        *(pytest.param(3, where, (), id=where) for where in (
            "state kept,0", "joining,2", "function called,0", "group made,1", "first step,2")),
    ],
)  # fmt: skip
def test_a_second_kill_is_answered_in_place_as_well(
    job: Job, ranks: int, second: str, more: tuple[str, ...], tmp_path: Path, undisturbed: Any
) -> None:
    """The step is in the arenas of the living and the dead.

    A rank that is there and has not begun costs a restart.
    """
    directory, injected = tmp_path / "d", second.startswith("kind=")
    faults = f"{KILL};{second},incarnation=1" if injected else KILL
    variables = {again_faults.VARIABLE: f"{second},self"} if second and not injected else {}
    with disturbed(tmp_path, job.command(directory, "plain", ranks, *job.restarts, *more), faults, **variables) as it:
        pass
    assert (directory / "second").exists() == bool(variables), it.output[-6000:]
    first, last = found = incidents(directory)
    assert [(one.step_saved, one.steps_lost) for one in found] == [(7, 0)] * 2, (found, it.output[-6000:])
    assert first.ending == "in_place", found
    assert last.ending == "in_place" or last.not_in_place == NOT_BEGUN, found
    assert last.ending == "in_place" or not injected, found
    for rank in range(ranks):
        assert {row[1] for row in lines(directory, rank, "entered")} == {"0", "7"}
    assert differences(undisturbed(job, "plain", ranks, *job.restarts) / "final.pt", directory / "final.pt") == []


@pytest.mark.product("second")
@full
@pytest.mark.parametrize("job", [LOOP, LIGHTNING], ids=lambda job: job.name)
@pytest.mark.parametrize(
    ("second", "more"),
    [
        pytest.param("", ("--dies", "0"), id="the only one that has begun"),
        pytest.param("kind=exception,rank=1,step=7,phase=forward", (), id="an exception"),
        pytest.param("kind=sigkill,rank=all,step=7,phase=forward", (), id="all"),
    ],
)
def test_another_second_fault_is_answered_by_a_restart(
    job: Job, second: str, more: tuple[str, ...], tmp_path: Path, undisturbed: Any
) -> None:
    """The step is saved from the arenas; all killed leave it there."""
    directory, ranks = tmp_path / "d", 2
    faults = f"{KILL};{second},incarnation=1" if second else KILL
    with disturbed(tmp_path, job.command(directory, "plain", ranks, *job.restarts, *more), faults) as it:
        pass
    first, last = incidents(directory)
    assert (first.ending, first.rung, first.step_saved, first.steps_lost) == ("in_place", "replace", 7, 0), first
    assert (last.step_saved, last.steps_lost) == (7, 0), (last, it.output[-6000:])
    if last.ending == "in_place":  # the other one was still there when that was agreed
        assert "rank=all" in second and last.notes == [NOBODY], last
    elif last.ending == "in_arenas":  # nobody was there who could have saved
        assert "rank=all" in second or (more == ("--dies", "0") and "rank 1: never joined" in last.reason), last
    else:
        assert (last.ending, last.rung) == ("saved", "") and last.not_in_place.startswith((SECOND, NOT_BEGUN)), last
        assert [one.step for one in candidates([directory], job.layout) if "gasp" in one.path.name] == [7]
    for rank in range(ranks):
        assert {row[1] for row in lines(directory, rank, "entered")} == {"0", "7"}
    assert differences(undisturbed(job, "plain", ranks, *job.restarts) / "final.pt", directory / "final.pt") == []


@full
@pytest.mark.parametrize(
    ("job", "fault", "rung"), [(LOOP, "sigkill", "replace"), (LIGHTNING, "sigkill", "replace"),
                               (LIGHTNING, "exception", "retry")],
    ids=["loop", "lightning", "lightning-exception"],
)  # fmt: skip
def test_a_survivor_that_does_not_leave_its_training_is_replaced(
    job: Job, fault: str, rung: str, tmp_path: Path, undisturbed: Any
) -> None:
    """Its part of the step is in its arena; plain values of a fit come from another rank."""
    directory, limits = tmp_path / "d", {"LASTGASP_FINISH_TIMEOUT": "1", "LASTGASP_WARM": "auto"}
    command, faults = job.command(directory, "plain", 3, "--stuck", "2"), f"kind={fault},rank=1,step=8,phase=data"
    with disturbed(tmp_path, command, faults, **limits) as started:
        pass
    found, where = incidents(directory), started.output[-6000:]
    assert [(one.ending, one.rung, one.steps_lost) for one in found] == [
        ("in_place", rung, 0), ("in_place", "replace", 0)
    ], (found, where)  # fmt: skip
    assert [(one.kind, one.rank) for one in found[1].faults] == [("hang", 2)], where
    assert all("has another rank's values: Sharded.seen" in note for one in found for note in one.notes), found
    for rank in range(3):
        entered = lines(directory, rank, "entered")
        assert [row[1] for row in entered] == ["0", "8"], (entered, where)
        stays = rank == 0 or (rank == 1 and rung == "retry")
        assert (len({row[0] for row in entered}) == 1) == stays, entered
    check_same(directory, undisturbed(job, "plain", 3), 3)


@full
@pytest.mark.parametrize(
    ("job", "shape", "more", "line", "why"),
    [
        *(pytest.param(job, "plain", more, line, "no rank holds a common step", id=f"{job.name} {name}")
          for job in (LOOP, LIGHTNING) for name, more, line in (
            ("off", ("--arena", "off"), "there is no recovery in place without arenas"),
            ("no memory", ("--full",), "of memory are available"))),
        pytest.param(LIGHTNING, "hooked", (), "is not called at each step", "is not called at each step", id="a hook"),
        pytest.param(LIGHTNING, "plain", ("--recovery", "restart"), "", "", id="restart"),
        *(pytest.param(LIGHTNING, f"fsdp-{shape}", ("--recovery", "auto"), "keeps parts in memory when a backward pass",
                       "", id=f"fsdp-{shape}") for shape in ("grads", "whole")),
        pytest.param(LOOP, "flat-whole", (), "there is no recovery in place with FSDP1's HYBRID_SHARD or NO_SHARD", "",
                     id="flat-whole"),
    ],
)  # fmt: skip
def test_where_it_cannot_be_the_job_restarts_as_ever(
    job: Job, shape: str, more: tuple[str, ...], line: str, why: str, tmp_path: Path, undisturbed: Any
) -> None:
    directory = tmp_path / "d"
    with disturbed(tmp_path, job.command(directory, shape, 2, *job.restarts, *more), KILL) as started:
        pass
    [incident] = incidents(directory)
    assert (incident.ending in ("saved", "gave_up"), incident.rung) == (True, ""), started.output[-6000:]
    assert why in incident.not_in_place, incident
    assert line in started.output
    assert differences(undisturbed(job, shape, 2, *job.restarts) / "final.pt", directory / "final.pt") == []


@full
def test_a_model_that_was_sharded_before_is_not_entered_again(tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    with disturbed(tmp_path, LOOP.command(directory, "plain", 2, "--outside"), KILL) as started:
        pass
    first, last = incidents(directory)
    assert (first.ending, first.rung, first.steps_lost) == ("in_place", "replace", 0), started.output[-6000:]
    assert (last.ending, last.step_saved, last.steps_lost, last.rung) == ("saved", 7, 0, ""), last
    assert last.not_in_place.startswith("a fault of that kind is not answered in place"), last
    assert differences(undisturbed(LOOP, "plain", 2) / "final.pt", directory / "final.pt") == []


@full
def test_a_damaged_arena_is_not_begun_with(tmp_path: Path, undisturbed: Any) -> None:
    """The new process finds it; the step before is saved from other slots, and the incident says what that costs."""
    directory = tmp_path / "d"
    with disturbed(tmp_path, LOOP.command(directory, "plain", 2, "--damaged"), KILL) as started:
        pass
    first, last = incidents(directory)
    assert (last.ending, last.step_saved, last.rung) == ("saved", 6, ""), (last, started.output[-6000:])
    assert any("does not match its digest" in fault.cause for fault in last.faults), last
    assert first.steps_lost == 1 and any("went on from step 6" in note for note in first.notes), first
    assert {step for _, step, _ in lines(directory, 0, "entered")} == {"0", "6"}
    assert differences(undisturbed(LOOP, "plain", 2) / "final.pt", directory / "final.pt") == []
