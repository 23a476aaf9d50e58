"""Real Megatron jobs, real faults: no step is lost, and the losses are those of a job that had none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from lastgasp.events import Incident, decode_incident
from lastgasp.testing.faults import read_log
from support.megatron import place
from support.megatron.job import GptJob
from support.megatron.matrix import (
    COVERING,
    EXPERTS_WITHOUT_REPLICAS,
    LAST,
    PLACES,
    SAVE_STEP,
    STEP,
    WITHOUT_REPLICAS,
    Case,
    all_cases,
    reference,
)  # fmt: skip
from support.together import killed_together

LAYOUT = DirectoryLayout("iter_*")
LIMIT = 400.0
"""Seconds for one job with its restart, on a loaded machine."""

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GptJob]:
    """Uninterrupted jobs by layout; made when first asked for."""
    return _References(tmp_path_factory.mktemp("reference"))


class _References(dict[str, GptJob]):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, layout: str) -> GptJob:
        job = reference(layout, self._folder / layout)
        done = job.run(timeout=LIMIT)
        assert done.ok, done.output[-4000:]
        self[layout] = job
        return job


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering(case: Case, tmp_path: Path, references: dict[str, GptJob]) -> None:
    check(case, tmp_path, references)


@pytest.mark.product("layout")
@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in all_cases() if case not in COVERING], ids=str)
def test_rest_of_the_matrix(case: Case, tmp_path: Path, references: dict[str, GptJob]) -> None:
    check(case, tmp_path, references)


def check(case: Case, folder: Path, references: dict[str, GptJob]) -> None:
    """Run the job into its fault and to its end; then look at everything it left."""
    expected = references[case.layout].losses()
    job, fired = case.job(folder), folder / "fired"
    done = job.run(case.environment | {"LASTGASP_FAULT_LOG": str(fired)}, timeout=LIMIT)
    _check_fired(case, fired, done.output)
    assert done.returncode == 0, done.output[-6000:]
    assert done.left == ()
    step = _check_saved(case, job.checkpoints, done.output)
    begun = job.begun_before_restart()
    assert step in (begun, begun + 1), f"step {step} was saved, but iteration {begun} had begun"
    _check_losses(job, expected)


def _check_fired(case: Case, log: Path, output: str) -> None:
    """Once, on the right rank, and where the moment's name says."""
    fired = [(one["at_rank"], one["phase"]) for one in read_log(log)]
    assert fired == [(case.victim, case.moment)], f"{fired}\n{output[-4000:]}"
    if case.kind == "exception":
        assert f"in {PLACES[case.moment]}" in output


def _check_losses(job: GptJob, expected: dict[tuple[int, int], list[list[str]]]) -> None:
    losses = job.losses()
    assert losses.keys() == expected.keys()
    wrong = {
        key: times for key, times in losses.items() if any(t != expected[key][0] for t in _whole(times, expected[key]))
    }
    assert wrong == {}, "losses differ from the uninterrupted run's"


def _whole(times: list[list[str]], expected: list[list[str]]) -> list[list[str]]:
    """All but an iteration that the fault cut short; that one must be trained again."""
    cut = [t for t in times[:-1] if len(t) < len(expected[0]) and t == expected[0][: len(t)]]
    return [t for t in times if t not in cut]


def _incident(directory: Path, output: str) -> Incident:
    records = [decode_incident(path.read_bytes()) for path in (directory / "incidents").glob("*.json")]
    assert len(records) == 1, f"{records}\n{output[-4000:]}"
    return records[0]


def _check_saved(case: Case, directory: Path, output: str) -> int:
    """Returns the step that was saved."""
    incident = _incident(directory, output)
    where = f"{incident}\n{output[-4000:]}"
    assert incident.ending in ("saved", "nothing_to_save"), where
    assert incident.steps_lost == 0, where
    found = candidates([directory], LAYOUT)
    assert all(verify(c.path, LAYOUT).ok for c in found), where
    step = incident.step_saved if incident.step_saved is not None else SAVE_STEP
    assert case.exact_step in (None, step), where
    if case.kind == "exception":
        noted = any(note.startswith(f"iteration {step} was cut short on rank") for note in incident.notes)
        cut_short = case.moment == "after_update" and case.victim == case.job(directory).ranks - 1
        assert noted or not cut_short, where
        # The last rank may be cut short by another one's fault, too: whoever notes it must be right.
        assert not (noted and re.search(rf"iteration +{step}/", output)), where
    assert step in [c.step for c in found], where
    assert [p.name for p in directory.iterdir() if ".tmp" in p.name or p.name.startswith(".gasp-")] == []
    return step


# -- all ranks at once ----------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("layout", [*WITHOUT_REPLICAS, *EXPERTS_WITHOUT_REPLICAS])
def test_all_ranks_killed_at_once_lose_no_step(layout: str, tmp_path: Path, references: dict[str, GptJob]) -> None:
    """Nobody is left to save: the restart writes what arenas hold, and Megatron loads it."""
    case = Case(layout, "sigstop", "forward", 0)
    job, fired = case.job(tmp_path), tmp_path / "fired"
    moment = "data" if "pp2" in layout else "forward"  # a stage's forward pass waits for that of the one before
    where = f"kind=sigstop,rank=all,step={STEP},phase={moment}"
    environ = {"LASTGASP_FAULT": where, "LASTGASP_FAULT_LOG": str(fired), "LASTGASP_ARENA": "every 1"}
    with killed_together(fired, job.ranks):
        done = job.run(environ, timeout=LIMIT)
    assert len(read_log(fired)) == job.ranks and done.ok and done.left == (), done.output[-6000:]
    incident = _incident(job.checkpoints, done.output)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("in_arenas", STEP, 0), incident
    found = {c.step: verify(c.path, LAYOUT).ok for c in candidates([job.checkpoints], LAYOUT)}
    assert found[STEP] and all(found.values()), found
    assert [p.name for p in job.checkpoints.iterdir() if ".tmp" in p.name or p.name.startswith(".gasp-")] == []
    assert f"step {STEP} was left in memory by ranks that are gone" in done.output
    _check_losses(job, references[layout].losses())


# -- options ---------------------------------------------------------------------------------------


def _survived(folder: Path, flags: str, fault: str) -> tuple[GptJob, Incident, GptJob]:
    """A job with these flags survives the fault.

    Returns:
        It, its incident, and another one that had no fault.
    """
    plain = GptJob(folder=folder / "plain", flags=f"--bf16 {flags}", last=14, every=8)
    job = GptJob(folder=folder / "job", flags=plain.flags, last=14, every=8, launcher="run",
                 launch_options=("--framework", "megatron"))  # fmt: skip
    expected = plain.run(timeout=LIMIT)
    assert expected.ok, expected.output[-4000:]
    fired = folder / "fired"
    done = job.run({"LASTGASP_FAULT": fault, "LASTGASP_FAULT_LOG": str(fired)}, timeout=LIMIT)
    assert len(read_log(fired)) == 1 and done.ok, done.output[-6000:]
    return job, _incident(job.checkpoints, done.output), plain


@pytest.mark.full
def test_options_of_the_start_have_no_part_in_a_restart(tmp_path: Path) -> None:
    """As MindSpeed-LLM's examples have them: without Adam's state the resumed job would train other numbers."""
    flags, fault = "--no-load-optim --no-load-rng", f"kind=sigkill,rank=0,step={STEP},phase=forward"
    job, incident, plain = _survived(tmp_path, flags, fault)
    assert (incident.step_saved, incident.steps_lost, incident.notes) == (STEP, 0, [])
    _check_losses(job, plain.losses())


@pytest.mark.full
def test_without_random_states_a_restart_says_so(tmp_path: Path) -> None:
    """They are in no checkpoint, and Megatron exits where it looks for them."""
    flags = "--no-save-rng --no-load-rng --attention-dropout 0 --hidden-dropout 0"
    fault = f"kind=sigkill,rank=0,step={STEP},phase=forward"
    job, incident, plain = _survived(tmp_path, flags, fault)
    assert (incident.step_saved, incident.steps_lost) == (STEP, 0)
    assert [note.split(":")[0] for note in incident.notes] == ["--no-save-rng"]
    _check_losses(job, plain.losses())


@pytest.mark.full
def test_what_is_not_to_be_kept_is_removed_once_there_is_a_newer_one(tmp_path: Path) -> None:
    """With the periodic save that a gasp followed: Megatron knows of the gasp only."""
    flags, fault = "--save-interval 4 --save-retain-interval 8", f"kind=sigkill,rank=0,step={STEP},phase=forward"
    job, incident, plain = _survived(tmp_path, flags, fault)
    assert (incident.step_saved, incident.steps_lost, incident.notes) == (STEP, 0, [])
    found = {c.step: verify(c.path, LAYOUT).ok for c in candidates([job.checkpoints], LAYOUT)}
    assert found == {8: True, 14: True}, "12 is neither kept nor the newest, and 6 and the 4 before it are not kept"
    _check_losses(job, plain.losses())


@pytest.mark.full
def test_a_rank_is_killed_in_an_evaluation(tmp_path: Path) -> None:
    """Those that follow have the samples that they would have had, and it is said which one is missing."""
    flags, fault = "--eval-interval 4 --eval-iters 3", "kind=sigkill,rank=1,step=7,phase=validation"
    job, incident, plain = _survived(tmp_path, flags, fault)
    assert (incident.step_saved, incident.steps_lost) == (8, 0)
    assert ["evaluation behind iteration 8 was cut short" in note for note in incident.notes] == [True]
    losses, expected = job.losses(), plain.losses()  # evaluations are logged with the iteration before them
    cut = {key: (losses.pop(key), expected.pop(key)) for key in ((0, 7), (1, 7))}
    assert losses == expected and all(len(times[0]) == 8 for (_, done), times in expected.items() if done == 11)
    for [times], [whole] in cut.values():
        assert 2 <= len(times) < len(whole) and times == whole[: len(times)]


@pytest.mark.full
def test_a_long_evaluation_is_no_hang(tmp_path: Path) -> None:
    """All of it takes longer than the job may go without progress, and each forward pass does not."""
    job = GptJob(folder=tmp_path, flags="--bf16 --eval-interval 4 --eval-iters 12", last=6, every=8, launcher="run",
                 launch_options=("--framework", "megatron"))  # fmt: skip
    done = job.run({"LASTGASP_HANG_TIMEOUT": "8", "SLOW_EVALUATION": "0.5"}, timeout=LIMIT)
    assert done.ok and not list(job.checkpoints.glob("incidents/*")), done.output[-4000:]
    assert "validation loss at iteration 4" in done.output


# -- torn updates ---------------------------------------------------------------------------------

TORN = SAVE_STEP + 2
"""Completed iterations when an update is cut short: two after a periodic save."""
KILLED_LATER = ("kind=sleep:3,rank=1,phase=after_update", "kind=sigkill,rank=1,phase=after_update")
"""Rank 1 is killed behind its update, once rank 0 is in its own, however busy the machine is."""


def torn(layout: str, folder: Path, faults: list[str], **environ: str) -> tuple[GptJob, str]:
    """Run a job with `faults` at iteration `TORN`; returns it and its output. All of them must have happened."""
    job = Case(layout, "exception", "forward").job(folder)
    fault = ";".join(f"step={TORN},{one}" for one in faults)
    environ |= {"LASTGASP_FAULT": fault, "LASTGASP_FAULT_LOG": str(folder / "fired"), "LASTGASP_RECOVERY": "restart"}
    done = job.run(environ, timeout=LIMIT)
    assert len(read_log(folder / "fired")) == len(faults), done.output[-4000:]
    assert done.ok, done.output[-6000:]
    return job, done.output


@pytest.mark.full
def test_a_rank_inside_its_update_is_waited_for(tmp_path: Path, references: dict[str, GptJob]) -> None:
    faults = ["kind=sleep:6,rank=0,phase=update", *KILLED_LATER]
    job, output = torn("dp2", tmp_path, faults)
    incident = _incident(job.checkpoints, output)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", TORN + 1, 0), incident
    assert incident.savers == [0], "rank 0 finished its update first"
    _check_losses(job, references["dp2"].losses())


@pytest.mark.full
def test_the_wait_for_an_update_has_an_end(tmp_path: Path, references: dict[str, GptJob]) -> None:
    faults = ["kind=sleep:60,rank=0,phase=update", *KILLED_LATER]
    job, output = torn("dp2", tmp_path, faults, LASTGASP_FINISH_TIMEOUT="2")
    _check_given_up(job, output, "update", lost=(TORN - SAVE_STEP,))
    _check_losses(job, references["dp2"].losses())


@pytest.mark.full
def test_an_update_that_was_left_half_way_is_not_saved(tmp_path: Path) -> None:
    job, output = torn("tp2", tmp_path, ["kind=exception,rank=1,phase=update"], LASTGASP_ARENA="off")
    # Rank 0 may have made its own update before it heard of rank 1's.
    _check_given_up(job, output, "between two steps", lost=(TORN - SAVE_STEP, TORN + 1 - SAVE_STEP))
    again = {key: times for key, times in job.losses().items() if len(times) > 1}
    assert {iteration for _, iteration in again} >= {SAVE_STEP, TORN}, "not resumed from the save"
    assert all(iteration >= SAVE_STEP for _, iteration in again)
    assert all(first[: len(second)] == second[: len(first)] for first, second in again.values()), "losses differ"


@pytest.mark.full
def test_a_saver_that_dies_is_replaced_by_its_replica(tmp_path: Path, references: dict[str, GptJob]) -> None:
    faults = ["kind=sigkill,rank=3,phase=forward", "kind=sigkill,rank=0,phase=gasp_save"]
    job, output = torn("dp4-two-instances", tmp_path, faults)
    incident = _incident(job.checkpoints, output)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", TORN, 0), incident
    assert incident.savers == [1, 2], "ranks 0 and 3 are gone; 2 and 1 hold the same slices"
    assert all(verify(c.path, LAYOUT).ok for c in candidates([job.checkpoints], LAYOUT))
    _check_losses(job, references["dp4-two-instances"].losses())


@pytest.mark.full
def test_a_step_that_one_instance_of_the_optimizer_has_made_is_not_lost(
    tmp_path: Path, references: dict[str, GptJob]
) -> None:
    """Half of it died with rank 0, and the other instance has not begun it: nobody could go on with the half."""
    faults = [f"kind=sleep:20,rank={rank},phase=before_update" for rank in (2, 3)]
    job, output = torn("dp4-two-instances", tmp_path, ["kind=sigkill,rank=0,phase=after_update", *faults])
    incident = _incident(job.checkpoints, output)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", TORN, 0), incident
    assert incident.savers == [2, 3]
    _check_losses(job, references["dp4-two-instances"].losses())


def _check_given_up(job: GptJob, output: str, reason: str, lost: tuple[int, ...]) -> None:
    """Nothing was written but what Megatron itself saves, and what is there is good."""
    incident = _incident(job.checkpoints, output)
    assert incident.ending == "gave_up" and reason in incident.reason, incident
    assert incident.steps_lost in lost, incident
    found = candidates([job.checkpoints], LAYOUT)
    assert all(c.step in (SAVE_STEP, 2 * SAVE_STEP, 3 * SAVE_STEP, LAST) for c in found), found
    assert all(verify(c.path, LAYOUT).ok for c in found)
