"""Recovery in place: survivors keep their processes, a dead rank is replaced, no step is lost, same numbers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from lastgasp.checkpoint import candidates
from lastgasp.exitcodes import SAVED
from lastgasp.pytorch.loop.files import LAYOUT
from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support.disturbed import READY, disturbed, lines
from support.launchers import SUPPORT, Running, finish, incidents, run, running, torchrun, undisturbed_jobs, until

WORKER = SUPPORT / "train_again.py"

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Final weights of a job without a fault, by its number of ranks."""
    return undisturbed_jobs(tmp_path_factory, lambda folder, ranks: job(torchrun, ranks, folder))


def job(launcher: Any, ranks: int, directory: Path, *more: str) -> list[str]:
    """Its command line."""
    command: list[str] = launcher(WORKER, "--dir", directory, "--final", directory / "final.pt", *more, ranks=ranks)
    return command


@pytest.mark.parametrize(
    ("ranks", "victim", "phase", "more"),
    [
        (3, 0, "backward", ["--keep"]),
        pytest.param(4, 2, "backward", [], marks=pytest.mark.full),
        pytest.param(2, 1, "forward", ["--keep"], marks=pytest.mark.full),
    ],
)
def test_a_killed_rank_is_replaced(
    ranks: int, victim: int, phase: str, more: list[str], tmp_path: Path, undisturbed: Any
) -> None:
    directory = tmp_path / "d"
    command = job(torchrun if ranks == 3 else run, ranks, directory, *more)
    with disturbed(tmp_path, command, f"kind=sigkill,rank={victim},step=8,phase={phase}") as started:
        pass
    check_in_place(directory, started, ranks, victim)
    assert differences(undisturbed(ranks), directory / "final.pt") == []


@pytest.mark.full
def test_two_ranks_that_are_killed_at_once_are_both_replaced(tmp_path: Path, undisturbed: Any) -> None:
    """A few milliseconds apart, in one step: before it is agreed on how to go on, or when that has just been done."""
    directory = tmp_path / "d"
    faults = ";".join(f"kind=sigkill,rank={rank},step=8,phase=backward" for rank in (1, 2))
    with disturbed(tmp_path, job(run, 3, directory), faults) as started:
        pass
    found, where = incidents(directory), started.output[-6000:]
    assert {(one.ending, one.rung, one.step_saved, one.steps_lost) for one in found} == {("in_place", "replace", 8, 0)}
    assert {fault.rank for one in found for fault in one.faults if fault.kind == "killed"} == {1, 2}, where
    for rank in range(3):
        entered = lines(directory, rank, "entered")
        assert [begun for _, begun, _ in entered] in (["0", "8"], ["0", "8", "8"]), where
        assert (len({pid for pid, _, _ in entered}) == 1) == (rank == 0), where
    assert differences(undisturbed(3), directory / "final.pt") == []


def check_in_place(directory: Path, job: Running, ranks: int, replaced: int | None, step: int = 8) -> None:
    """One fault in step 9, answered in place: all processes stay but that of the dead rank."""
    [incident] = incidents(directory)
    rung = "retry" if replaced is None else "replace"
    assert (incident.ending, incident.rung, incident.steps_lost) == ("in_place", rung, 0), job.output[-6000:]
    assert replaced is None or [fault.rank for fault in incident.faults] == [replaced]
    assert incident.phases.restarted is not None
    assert incident.phases.first_step is not None
    for rank in range(ranks):
        entered, ended = lines(directory, rank, "entered"), lines(directory, rank, "ended")
        assert [begun for _, begun, _ in entered] == ["0", str(step)], entered
        assert [resumed for *_, resumed in entered] == ["False", "True"]
        assert (len({pid for pid, _, _ in entered}) == 1) == (rank != replaced)
        assert ended == [[entered[-1][0], "12"]]
    only = ranks == 2 and (replaced is not None or step == 9)  # the only copy is saved, and nothing else is written
    assert len(list(directory.glob("*.pt"))) == 1 + only


@pytest.mark.parametrize(("phase", "step"), [("backward", 8), ("update", 9)])
def test_a_step_that_failed_is_done_again(phase: str, step: int, tmp_path: Path, undisturbed: Any) -> None:
    """A rank that raised in the middle of its update takes the state from the other, which has completed the step."""
    directory = tmp_path / "d"
    faults = f"kind=exception,rank=1,step=8,phase={phase}"
    more = ["--trick", "behind"] if phase == "update" else []
    with disturbed(tmp_path, job(run, 2, directory, "--keep", *more), faults) as started:
        pass
    check_in_place(directory, started, 2, replaced=None, step=step)
    assert started.output.count("Traceback (most recent call last)") == 1, started.output[-6000:]
    assert differences(undisturbed(2), directory / "final.pt") == []


def test_who_has_raised_behind_its_update_takes_the_step_from_a_rank_that_has_done_it_to_its_end(
    tmp_path: Path, undisturbed: Any
) -> None:
    """What the loop does behind the update (an average of the weights) is a part of the step, too."""
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(run, 2, directory), "kind=exception,rank=0,step=8,phase=after_update") as started:
        pass
    check_in_place(directory, started, 2, replaced=None, step=9)
    assert differences(undisturbed(2), directory / "final.pt") == []


def test_what_is_raised_behind_the_backward_pass_loses_no_random_state(tmp_path: Path, undisturbed: Any) -> None:
    """The other rank has all gradients, and completes the step without this one."""
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(run, 2, directory, "--trick", "signalled"), "") as started:
        pass
    check_in_place(directory, started, 2, replaced=None, step=9)
    assert incidents(directory)[0].notes == [], started.output[-6000:]
    assert differences(undisturbed(2), directory / "final.pt") == []


@pytest.mark.full
def test_a_rank_that_ends_its_training_meanwhile_enters_it_again(tmp_path: Path, undisturbed: Any) -> None:
    """All ranks are needed, also by the one that has raised behind its last step."""
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(run, 2, directory, "--trick", "ends"), "") as started:
        pass
    [incident] = incidents(directory)
    assert (incident.ending, incident.rung, incident.steps_lost) == ("in_place", "retry", 0), started.output[-6000:]
    for rank in range(2):
        entered = lines(directory, rank, "entered")
        assert [(pid, begun) for pid, begun, _ in entered] == [(entered[0][0], "0"), (entered[0][0], "12")]
    assert differences(undisturbed(2), directory / "final.pt") == []


def test_a_hung_rank_is_replaced(tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    faults = "kind=sigstop,rank=1,step=8,phase=forward"
    with disturbed(tmp_path, job(run, 2, directory), faults, LASTGASP_HANG_TIMEOUT="8") as started:
        pass
    check_in_place(directory, started, 2, replaced=1)
    assert differences(undisturbed(2), directory / "final.pt") == []


KILL = "kind=sigkill,rank=1,step=8,phase=backward"
KILL_0 = "kind=sigkill,rank=0,step=8,phase=forward,incarnation=1"
SECOND = "no step was completed since training began, when the fault before was answered in place"


@pytest.mark.parametrize(
    ("faults", "more", "first", "why"),
    [
        pytest.param("", ["--trick", "bug"], (), "a fault of that kind is not answered in place", id="bug"),
        pytest.param("", ["--trick", "stubborn"], ("retry",), SECOND, id="twice the same"),
        pytest.param(KILL, ["--dies", "0"], ("replace",), SECOND, id="the only one that is there, at once",
                     marks=pytest.mark.full),
        pytest.param(
            f"{KILL};{KILL_0};kind=sigkill,rank=1,step=8,phase=forward,incarnation=2", [], ("replace", "replace"),
            SECOND, id="three kills", marks=pytest.mark.full,
        ),
        pytest.param(
            f"{KILL};kind=exception,rank=1,step=8,phase=forward,incarnation=1", [], ("replace",), SECOND,
            id="an exception", marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_what_is_not_answered_in_place_is_saved_and_the_job_restarts(
    faults: str, more: list[str], first: tuple[str, ...], why: str, tmp_path: Path, undisturbed: Any
) -> None:
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(run, 2, directory, *more), faults) as started:
        pass
    *before, last = incidents(directory)
    assert tuple(incident.rung for incident in before) == first, started.output[-6000:]
    # The only copy of a step is saved before the first recovery goes on.
    assert (last.ending, last.step_saved) in (("saved", 8), ("nothing_to_save", None), ("nothing_to_save", 8)), last
    assert [c.step for c in candidates([directory], LAYOUT)] == [8]
    assert (last.steps_lost, last.rung) == (0, ""), last
    assert last.not_in_place.startswith(why)
    assert differences(undisturbed(2), directory / "final.pt") == []


@pytest.mark.parametrize(
    ("ranks", "faults", "dies", "lost"),
    [
        pytest.param(2, f"{KILL};{KILL_0}", "", (0, 1), id="a survivor"),
        pytest.param(2, KILL, "1", (1,), id="the new process, at once", marks=pytest.mark.full),
        pytest.param(3, KILL, "2", (1, 2), id="a survivor, at once", marks=pytest.mark.full),
    ],
)
def test_a_second_kill_before_there_is_a_new_step_is_answered_in_place_as_well(
    ranks: int, faults: str, dies: str, lost: tuple[int, ...], tmp_path: Path, undisturbed: Any
) -> None:
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(run, ranks, directory, "--dies", dies), faults) as started:
        pass
    found, where = incidents(directory), started.output[-6000:]
    assert [(one.ending, one.rung, one.steps_lost) for one in found] == [("in_place", "replace", 0)] * 2, (found, where)
    assert not any(one.notes for one in found), found
    for rank in range(ranks):
        entered, ended = lines(directory, rank, "entered"), lines(directory, rank, "ended")
        assert {begun for _, begun, _ in entered} == {"0", "8"}, (entered, where)
        assert (len({pid for pid, _, _ in entered}) == 1) == (rank not in lost), entered
        assert ended == [[entered[-1][0], "12"]]
    assert differences(undisturbed(ranks), directory / "final.pt") == []


@pytest.mark.full
def test_a_later_fault_is_answered_in_place_although_a_step_has_failed_twice(tmp_path: Path, undisturbed: Any) -> None:
    """What raises again at once, as a file server that is away for some seconds, says nothing of the next month."""
    directory = tmp_path / "d"
    faults = "kind=exception,rank=0,step=10,phase=backward,attempt=1"
    with disturbed(tmp_path, job(run, 2, directory, "--trick", "stubborn"), faults) as started:
        pass
    found = [(one.ending, one.rung, one.steps_lost) for one in incidents(directory)]
    assert found == [("in_place", "retry", 0), ("saved", "", 0), ("in_place", "retry", 0)], started.output[-6000:]
    assert differences(undisturbed(2), directory / "final.pt") == []


@pytest.mark.parametrize(
    ("more", "variables", "why"),
    [
        pytest.param(["--outside"], {}, "", id="process group outside"),
        pytest.param(
            ["--full"], {}, "rank 0: copies of the state would take", id="host without memory", marks=pytest.mark.full
        ),
        pytest.param([], {"LASTGASP_RECOVERY": "restart"}, "recovery=restart", id="restart", marks=pytest.mark.full),
        pytest.param(
            [], {"LASTGASP_RECOVERY": "retry"}, "recovery=retry: no rank is replaced", id="retry",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_job_that_may_not_or_cannot_restarts_as_ever(
    more: list[str], variables: dict[str, str], why: str, tmp_path: Path, undisturbed: Any
) -> None:
    directory = tmp_path / "d"
    with disturbed(tmp_path, job(run, 2, directory, *more), KILL, **variables) as started:
        pass
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.rung) == ("saved", 8, ""), started.output[-6000:]
    assert incident.not_in_place.startswith(why) and bool(incident.not_in_place) == bool(why)
    line = "this training cannot be entered again: the process group was made outside of the function"
    assert (line in started.output) == ("--outside" in more)
    assert differences(undisturbed(2), directory / "final.pt") == []


@pytest.mark.full
def test_a_rank_killed_before_the_launchers_first_look_finds_out_what_it_can_do(tmp_path: Path) -> None:
    """A rank that is killed holds the launcher up before that has told what it can do; the job need not guess."""
    directory = tmp_path / "d"
    directory.mkdir()
    (directory / "go").touch()
    command = job(run, 3, directory)
    command[command.index(str(WORKER)) : command.index(str(WORKER))] = ["--monitor-interval", "1"]
    done = finish(command, tmp_path, LASTGASP_FAULT=KILL, LASTGASP_WARM="off")
    assert done.ok, done.output[-6000:]
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 8, 0)
    assert incident.not_in_place == "there is no warm process (LASTGASP_WARM=off)", done.output[-6000:]


def test_save_ends_the_job_and_the_next_start_resumes(tmp_path: Path, undisturbed: Any) -> None:
    directory, log = tmp_path / "d", tmp_path / "faults.log"
    directory.mkdir()
    (directory / "go").touch()
    variables = {"LASTGASP_WARM": "off", "LASTGASP_RECOVERY": "save", "LASTGASP_FAULT_LOG": str(log)}
    first = finish(job(run, 2, directory), tmp_path, LASTGASP_FAULT=KILL, **variables)
    assert first.returncode == SAVED, first.output
    assert "as recovery=save asks" in first.output
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.not_in_place) == ("saved", 8, "recovery=save")
    assert len(read_log(log)) == 1
    assert finish(job(run, 2, directory), tmp_path, **variables).ok
    assert [begun for _, begun, _ in lines(directory, 0, "entered")] == ["0", "8"]
    assert differences(undisturbed(2), directory / "final.pt") == []


@pytest.mark.full
def test_an_exception_is_answered_by_a_restart_where_only_replace_is_allowed(tmp_path: Path, undisturbed: Any) -> None:
    directory = tmp_path / "d"
    faults = "kind=exception,rank=1,step=8,phase=backward"
    with disturbed(tmp_path, job(run, 2, directory), faults, LASTGASP_RECOVERY="replace") as started:
        pass
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.rung) == ("saved", 8, ""), started.output[-6000:]
    assert incident.not_in_place == "recovery=replace: no step is tried again"
    assert differences(undisturbed(2), directory / "final.pt") == []


def test_sigterm_before_the_ranks_have_joined_again_has_the_step_saved(tmp_path: Path, undisturbed: Any) -> None:
    """It comes to both, when no session takes it and no step is on disk."""
    directory = tmp_path / "d"
    faults = "kind=exception,rank=1,step=8,phase=forward"
    with disturbed(tmp_path, job(run, 2, directory, "--stopped"), faults) as started:
        pass
    first, last = incidents(directory)
    assert (first.ending, first.rung) == ("in_place", "retry"), started.output[-6000:]
    assert {fault.kind for fault in last.faults} == {"sigterm"}, last
    assert [c.step for c in candidates([directory], LAYOUT)] == [8]
    assert differences(undisturbed(2), directory / "final.pt") == []


def test_a_rank_is_not_replaced_by_another_program(tmp_path: Path) -> None:
    """Its script has been edited since: the launcher finds that when it is to be replaced. The job restarts."""
    script, directory = tmp_path / "own.py", tmp_path / "d"
    shutil.copy(WORKER, script)
    directory.mkdir()
    command = run(script, "--dir", directory, "--final", directory / "final.pt", ranks=2)
    fault = "kind=sigkill,rank=1,step=8,phase=backward"
    with running(tmp_path, command, LASTGASP_WARM="auto", LASTGASP_LOG="debug", LASTGASP_FAULT=fault) as [started]:
        until(lambda: READY in started.output, "the warm process is ready")
        os.utime(script, ns=(0, 0))
        (directory / "go").touch()
        assert started.code() == 0, started.output[-6000:]
    first, second = incidents(directory)
    why = f"{script} has changed since it was imported"
    assert (first.ending, first.not_in_place) == ("in_place", f"could not be replaced: {why}")
    assert (second.rung, second.not_in_place, second.steps_lost) == ("", why, 0)
    assert started.output.count("a new process takes its place") == 1
