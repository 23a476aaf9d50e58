"""Real MindSpore and MindFormers jobs with real faults: the step is saved, the losses stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lastgasp import exitcodes
from lastgasp.events import Incident, decode_incident
from lastgasp.testing.faults import read_log
from support.mindspore import place
from support.mindspore.job import LENGTH, Job, LlamaJob, dataset

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]
STEP, LAST = 11, 16
"""Completed updates when the fault comes, in the middle of the second epoch; and at the end."""


@dataclass(frozen=True)
class Case:
    """One fault on one rank. `saved`: the step that must be saved, or one of these."""

    kind: str
    rank: int
    phase: str = "forward"
    saved: Sequence[int] = (STEP,)
    job: str = "plain"

    def __str__(self) -> str:
        return f"{self.job}-{self.kind}-rank{self.rank}-{self.phase}"

    @property
    def fault(self) -> str:
        """For LASTGASP_FAULT."""
        return f"kind={self.kind},rank={self.rank},step={STEP},phase={self.phase}"


# A signal comes when it comes: a rank that is asked to stop goes on to the end of its graph, and so do the others, also
# one that was held before it began that step. By the time that all are told it may be the graph of a later step.
TOLD = range(STEP + 1, LAST)
KILLED = [Case("sigkill", rank) for rank in (0, 1)]
REST = [
    *(Case("exception", rank) for rank in (0, 1)),
    *(Case("sigterm", rank, saved=TOLD) for rank in (0, 1)),
    *(Case("sigkill", rank, "data") for rank in (0, 1)),
    *(Case("sigkill", rank, "after_update", (STEP + 1,)) for rank in (0, 1)),
    *(Case("exception", rank, "after_update", (STEP + 1,)) for rank in (0, 1)),
    *(Case("sigkill", rank, "step_end", (STEP + 1,)) for rank in (0, 1)),
]
COVERING = [KILLED[0]]
# A rank that dies in its own save of step 12 leaves an incomplete one, which the gasp moves aside.
LLAMA = [replace(case, job="llama") for case in (*KILLED, *REST, Case("sigkill", 1, "periodic_save", (STEP + 1,)))]


def plain(folder: Path, ranks: int = 2) -> Job:
    """Two epochs of eight steps, nothing saved but by a gasp. No clipping: nothing gathers the gradients."""
    return Job(folder=folder, ranks=ranks, launcher="run", arguments=("--lastgasp", str(folder / "ckpts")))


def llama(folder: Path, ranks: int = 2) -> LlamaJob:
    """MindFormers with the flag in its YAML; CheckpointMonitor saves at step 4, 8, 12."""
    changes = {"lastgasp": {"enable": True, "dir": str(folder / "ckpts")}}
    return LlamaJob(folder=folder, ranks=ranks, launcher="run", changes=changes)


JOBS = {"plain": plain, "llama": llama}
Losses = dict[tuple[int, int], list[str]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Losses]:
    """The losses of uninterrupted runs, filled as they are asked for."""
    return {}


def reference(name: str, ranks: int, kept: dict[tuple[str, int], Losses], near: Path) -> Losses:
    """The losses of the uninterrupted run, without lastgasp."""
    if (name, ranks) not in kept:
        folder = near.parent / f"reference-{name}-{ranks}"
        folder.mkdir()
        bare = Job(folder=folder, ranks=ranks) if name == "plain" else LlamaJob(folder=folder, ranks=ranks)
        finished = bare.run({"LASTGASP_FAULT": ""}, timeout=300)
        assert finished.returncode == 0, finished.output
        kept[name, ranks] = bare.losses()
        assert {step for _, step in kept[name, ranks]} == set(range(1, LAST + 1))
    return kept[name, ranks]


def incidents(folder: Path) -> list[Incident]:
    """The records, oldest first."""
    return [decode_incident(path.read_bytes()) for path in sorted((folder / "ckpts" / "incidents").glob("*.json"))]


def run_with(job: Job, fault: str, **environ: str) -> str:
    """Run it under the launcher, which restarts it; returns the output."""
    log = job.folder / "faults"
    finished = job.run({"LASTGASP_FAULT": fault, "LASTGASP_FAULT_LOG": str(log)} | environ, timeout=300)
    assert finished.returncode == 0, finished.output
    assert not finished.left
    assert len(read_log(log)) == fault.count("kind="), finished.output
    return finished.output


def check(case: Case, folder: Path, kept: dict[tuple[str, int], Losses], ranks: int = 2) -> None:
    """Saved at the right step, by nobody that was dead, and trained on as if nothing had been."""
    expected = reference(case.job, ranks, kept, folder)
    job = JOBS[case.job](folder, ranks)
    output = run_with(job, case.fault)
    (incident,) = incidents(folder)
    saved = incident.step_saved
    if (case.kind, case.job, incident.ending) == ("sigterm", "llama", "nothing_to_save"):
        saved = 12  # all ranks have gone on to its end, and to the end of the framework's own save of it
    else:
        assert incident.ending == "saved", (incident, output)
    assert saved in case.saved and incident.steps_lost == 0, (incident, output)
    assert case.kind != "sigkill" or case.rank not in incident.savers
    if case.kind == "exception":
        unlogged = any("their logs, have nothing of it" in note for note in incident.notes)
        assert unlogged == (case.phase == "after_update"), (incident, output)
    assert saved is not None
    check_losses(job, expected, saved)


def check_losses(job: Job, expected: Losses, saved: int) -> None:
    """Each step after the saved one was trained by the second process, and every loss is bit for bit the same."""
    losses = job.losses()
    assert set(losses) | {key for key in expected if key[1] == saved} == set(expected)
    wrong = {key: (times, expected[key]) for key, times in losses.items() if set(times) != set(expected[key])}
    assert not wrong, wrong
    for rank in {rank for rank, _ in expected}:
        assert job.steps(rank)[-1] == list(range(saved + 1, LAST + 1))


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering(case: Case, tmp_path: Path, references: dict[tuple[str, int], Losses]) -> None:
    check(case, tmp_path, references)


@pytest.mark.product("shape")
@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in (*KILLED, *REST, *LLAMA) if case not in COVERING], ids=str)
def test_rest_of_the_matrix(case: Case, tmp_path: Path, references: dict[tuple[str, int], Losses]) -> None:
    check(case, tmp_path, references)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pangu", "resnet", "together"])
def test_the_guides_own_directories(layout: str, tmp_path: Path, references: dict[tuple[str, int], Losses]) -> None:
    """Both ranks die, and nobody can save: the restart resumes from what ModelCheckpoint of all ranks has saved."""
    expected = reference("plain", 2, references, tmp_path)
    saves = ("--save", str(tmp_path / "saves"), "--layout", layout)
    job = replace(plain(tmp_path), arguments=(*plain(tmp_path).arguments, *saves))
    output = run_with(job, ";".join(case.fault for case in KILLED))
    (incident,) = incidents(tmp_path)
    assert incident.step_saved is None, (incident, output)
    assert "from scratch" not in output.partition("resuming after step 8")[2]
    losses = job.losses()
    assert {key: times[-1] for key, times in losses.items()} == {key: times[0] for key, times in expected.items()}
    assert [job.steps(rank)[-1] for rank in (0, 1)] == [list(range(9, LAST + 1))] * 2


@pytest.mark.full
@pytest.mark.parametrize("how", [("--mode", "stand_alone"), ("--own-seed",)], ids=["stand alone", "own seed"])
def test_ranks_that_do_not_hold_the_same_are_no_replicas(how: tuple[str, ...], tmp_path: Path) -> None:
    """MindSpore's default trains a model on each rank: nobody saves it for one that was killed."""
    bare = Job(folder=tmp_path / "reference", arguments=how)
    bare.folder.mkdir()
    run_with(bare, "")
    saves = ("--save", str(tmp_path / "saves"))
    job = replace(plain(tmp_path), arguments=(*plain(tmp_path).arguments, *saves, *how))
    output = run_with(job, KILLED[1].fault)
    (incident,) = incidents(tmp_path)
    assert incident.step_saved is None, (incident, output)
    assert ("NOT SAVED" in output) == (how[0] == "--mode")
    assert any("should hold the same" in note for note in incident.notes) == (how[0] != "--mode")
    assert {key: times[-1] for key, times in job.losses().items()} == {k: t[0] for k, t in bare.losses().items()}
    assert [job.steps(rank)[-1] for rank in (0, 1)] == [list(range(9, LAST + 1))] * 2


@pytest.mark.full
def test_statistics_and_random_state_of_a_dead_rank_are_its_own(tmp_path: Path) -> None:
    """BatchNorm's means differ from rank to rank, and the forward pass that hung has changed them already."""
    options = ("--norm", "--final")
    finals = []
    for name, lastgasp in (("reference", False), ("faulty", True)):
        folder = tmp_path / name
        folder.mkdir()
        arguments = (*options, "--lastgasp", str(folder / "ckpts")) if lastgasp else options
        job = Job(folder=folder, launcher="run" if lastgasp else "msrun", arguments=arguments)
        run_with(job, KILLED[1].fault if lastgasp else "")
        finals.append([(folder / "losses" / f"final-{rank}.json").read_text() for rank in (0, 1)])
    assert finals[0][0] != finals[0][1], "the ranks have the same statistics: the test proves nothing"
    assert finals[0] == finals[1]
    (incident,) = incidents(tmp_path / "faulty")
    assert (incident.step_saved, incident.savers) == (STEP, [0])


@pytest.mark.full
@pytest.mark.skipif(bool(place.missing(place.OLD)), reason=place.missing(place.OLD))
@pytest.mark.parametrize("name", ["plain", "llama"])
def test_the_older_mindspore(tmp_path: Path, name: str) -> None:
    job = replace(JOBS[name](tmp_path / "faulty"), version=place.OLD)
    bare = replace(job, folder=tmp_path / "reference", launcher="msrun")
    bare = replace(bare, changes={}) if isinstance(bare, LlamaJob) else replace(bare, arguments=())
    for each, fault in ((bare, ""), (job, KILLED[0].fault)):
        each.folder.mkdir()
        run_with(each, fault)
    (incident,) = incidents(job.folder)
    assert (incident.ending, incident.step_saved) == ("saved", STEP)
    check_losses(job, bare.losses(), STEP)


@pytest.mark.full
def test_a_job_that_is_trained_to_its_end_has_nothing_left_to_do(tmp_path: Path) -> None:
    """A fault behind the last update: that step is saved, and what starts again ends at once and well."""
    job = Job(folder=tmp_path, ranks=1, launcher="run", arguments=("--lastgasp", str(tmp_path / "ckpts")))
    output = run_with(job, f"kind=exception,rank=0,step={LAST - 1},phase=after_update")
    (incident,) = incidents(tmp_path)
    assert (incident.ending, incident.step_saved) == ("saved", LAST)
    assert "nothing left to do" in output
    schedulers = list((tmp_path / "msrun").glob("scheduler*.log"))
    assert schedulers, "msrun's scheduler runs the script as well, and would train beside the only rank"
    assert all("which does not train" in path.read_text() for path in schedulers)


@pytest.mark.full
def test_an_optimizer_that_calls_its_parents_construct_trains_as_without(tmp_path: Path) -> None:
    """What MindSpore compiles takes `super()` for that of the object's class: under the gate it called itself."""
    found = []
    for name, options in (("bare", ()), ("gated", ("--lastgasp", str(tmp_path / "ckpts")))):
        job = Job(folder=tmp_path / name, ranks=1, launcher="start", arguments=("--clip", *options))
        job.folder.mkdir()
        run_with(job, "")
        found.append(job.losses())
    assert len(found[0]) == LAST and found[0] == found[1]


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain", "llama"])
def test_recovery_save_ends_the_job_and_the_next_start_resumes(
    name: str, tmp_path: Path, references: dict[tuple[str, int], Losses]
) -> None:
    """By the variable, and by MindFormers' YAML."""
    expected, job, variables = reference(name, 2, references, tmp_path), JOBS[name](tmp_path), {"LASTGASP_FAULT": ""}
    if isinstance(job, LlamaJob):
        section = {"enable": True, "dir": str(tmp_path / "ckpts"), "recovery": "save"}
        job = replace(job, changes={"lastgasp": section})
    else:
        variables["LASTGASP_RECOVERY"] = "save"
    first = job.run(variables | {"LASTGASP_FAULT": KILLED[1].fault}, timeout=300)
    assert first.returncode == exitcodes.SAVED, first.output
    assert "as recovery=save asks" in first.output
    (incident,) = incidents(tmp_path)
    assert (incident.ending, incident.step_saved, incident.not_in_place) == ("saved", STEP, "recovery=save")
    assert [len(job.steps(rank)) for rank in (0, 1)] == [1, 1]
    assert job.run(variables, timeout=300).returncode == 0
    check_losses(job, expected, STEP)


@pytest.mark.full
def test_a_rank_that_waits_for_one_that_was_held_is_not_left_waiting(tmp_path: Path) -> None:
    """Rank 0 is asked to stop when its graph has begun; rank 1 is still at its data, and is held before that step."""
    job = plain(tmp_path)
    faults = (f"kind=sleep:2,rank=1,step={STEP},phase=data", f"kind=sigterm,rank=0,step={STEP},phase=forward")
    output = run_with(job, ";".join(faults))
    (incident,) = incidents(tmp_path)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", STEP + 1, 0), (incident, output)


SCALED = {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 64, "scale_factor": 3, "scale_window": 5}


def scaled(folder: Path, name: str) -> Job:
    """A job of one rank whose loss scale is three times greater after every fifth step."""
    if name == "plain":
        return replace(plain(folder, 1), arguments=("--scale", "--lastgasp", str(folder / "ckpts")))
    job = llama(folder, 1)
    return replace(job, changes={**job.changes, "runner_wrapper.scale_sense": SCALED})


@pytest.mark.full
@pytest.mark.parametrize("name", ["plain", "llama", "llama-newer"])
def test_a_dynamic_loss_scale_continues_unchanged(tmp_path: Path, name: str) -> None:
    """And its age. What the saved step reports is lost: the fault comes when its graph has returned."""
    job = scaled(tmp_path / "faulty", name)
    if name == "llama-newer":
        assert isinstance(job, LlamaJob)
        job = replace(job, changes={**job.changes, "use_legacy_format": False})
    bare = replace(job, folder=tmp_path / "reference", launcher="msrun")
    if isinstance(bare, LlamaJob):
        kept = {key: value for key, value in bare.changes.items() if key != "lastgasp"}
        bare = replace(bare, changes=kept)
    else:
        bare = replace(bare, arguments=("--scale",))
    for each, fault in ((bare, ""), (job, f"kind=exception,rank=0,step={STEP},phase=after_update")):
        each.folder.mkdir()
        run_with(each, fault)
    (incident,) = incidents(job.folder)
    assert (incident.ending, incident.step_saved) == ("saved", STEP + 1)
    scales = [losses[0].partition("*")[2] for _, losses in sorted(bare.losses().items())]
    assert len(set(scales)) == 4, scales
    check_losses(job, bare.losses(), STEP + 1)


@pytest.mark.full
def test_the_newer_format_of_mindformers(tmp_path: Path) -> None:
    """`iteration_*` directories, one process: a section `checkpoint:` in the YAML turns them on (mindformers.md §5)."""
    new = {"use_legacy_format": False}
    bare, job = (LlamaJob(folder=tmp_path / name, ranks=1, changes=new) for name in ("reference", "faulty"))
    job = replace(job, launcher="run", changes=new | {"lastgasp": {"enable": True, "dir": str(job.folder / "ckpts")}})
    for each, fault in ((bare, ""), (job, f"kind=exception,rank=0,step={STEP},phase=forward")):
        each.folder.mkdir()
        run_with(each, fault)
    (incident,) = incidents(job.folder)
    assert (incident.ending, incident.step_saved) == ("saved", STEP)
    assert (job.checkpoints / f"iteration_{STEP:08d}" / "common.json").exists()
    check_losses(job, bare.losses(), STEP)


@pytest.mark.full
def test_mindformers_verdict_on_a_result_ends_the_job(tmp_path: Path) -> None:
    """Each restart would add one step that is worth nothing, and push a good checkpoint out."""
    bare = llama(tmp_path)
    nan = {"check_for_nan_in_loss_and_grad": True, "lr_schedule.learning_rate": 1e30, "lr_schedule.lr_end": 1e30}
    job = replace(bare, changes={**bare.changes, **nan})
    done = job.run({"LASTGASP_FAULT": ""}, timeout=300)
    assert done.returncode == 1, done.output[-4000:]
    assert "stopped with exit code 1: MindFormers found NaN or inf and ends the training" in done.output
    assert len(job.steps(0)) == 1, "it was started again"
    assert not incidents(tmp_path), "a verdict is not a fault"


@pytest.mark.full
def test_a_long_evaluation_of_mindformers_is_no_hang(tmp_path: Path) -> None:
    """`do_eval`: all of it takes longer than the job may go without progress; a batch, or a compilation, does not."""
    job = llama(tmp_path)
    texts = str(dataset(8 * 8, length=LENGTH - 1))
    data = {"data_loader": {"type": "MindDataset", "dataset_dir": texts, "shuffle": False},
            "input_columns": ["input_ids"], "batch_size": 4, "drop_remainder": True}  # fmt: skip
    changes = {"do_eval": True, "eval_step_interval": 6, "metric": {"type": "PerplexityMetric"}, "eval_dataset": data,
               "eval_dataset_task": {"type": "CausalLanguageModelDataset", "dataset_config": data}}  # fmt: skip
    done = replace(job, epochs=1, changes={**job.changes, **changes}).run(
        {"LASTGASP_HANG_TIMEOUT": "40", "SLOW_EVALUATION": "6.0"}, timeout=300
    )
    assert done.returncode == 0, done.output[-4000:]
    assert incidents(tmp_path) == [], done.output[-4000:]
    assert done.output.count("Eval result") == 2, "one evaluation on each of two ranks"
