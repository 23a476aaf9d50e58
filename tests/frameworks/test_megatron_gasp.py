"""The checkpoint that survivors write is Megatron's own: equal to the one it would have written, loaded without us."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lastgasp import exitcodes
from lastgasp.checkpoint import DirectoryLayout, verify
from lastgasp.events import Incident, decode_incident
from lastgasp.testing.faults import read_log
from support.megatron import place
from support.megatron.job import DIST_OPT, EXPERT_PARALLEL, EXPERTS, PIPELINE, TENSOR, TWO_INSTANCES, GptJob

LAYOUT = DirectoryLayout("iter_*")
COMPARE = Path(__file__).parents[1] / "support" / "megatron" / "compare.py"
FAULT, SAVED = 6, 4
"""Completed iterations at the fault; the newest periodic save before it."""
LAST = 12
FLAGS = ("--framework", "megatron")
LIMIT = 420.0

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


def fault(kind: str, rank: int, phase: str, folder: Path) -> dict[str, str]:
    hang = {"LASTGASP_HANG_TIMEOUT": "8"} if kind == "sigstop" else {}
    text = f"kind={kind},rank={rank},step={FAULT},phase={phase}"
    files = {"LASTGASP_RECOVERY": "restart"}  # in place nothing is saved
    return {"LASTGASP_FAULT": text, "LASTGASP_FAULT_LOG": str(folder / "fired")} | files | hang


def incident_of(job: GptJob) -> Incident:
    (path,) = (job.checkpoints / "incidents").glob("*.json")
    return decode_incident(path.read_bytes())


def file_differences(job: GptJob, one: Path, other: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(COMPARE), str(one), str(other)],
        env=job.environment(), capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("flags", "phase"),
    [
        pytest.param("--bf16", "forward", marks=pytest.mark.full),
        (f"--bf16 {TWO_INSTANCES}", "after_update"),
        pytest.param(f"--bf16 {EXPERT_PARALLEL} {DIST_OPT}", "forward", marks=pytest.mark.full),
        pytest.param(f"--bf16 {EXPERT_PARALLEL}", "forward", marks=pytest.mark.full),
        pytest.param(f"--bf16 {EXPERTS} {TWO_INSTANCES}", "after_update", marks=pytest.mark.full),
        pytest.param(f"--bf16 {DIST_OPT}", "forward", marks=pytest.mark.full),
        pytest.param("", "after_update", marks=pytest.mark.full),
        pytest.param(
            f"--bf16 {TWO_INSTANCES} --overlap-grad-reduce --overlap-param-gather", "forward", marks=pytest.mark.full
        ),
        pytest.param(f"--bf16 {EXPERT_PARALLEL} {DIST_OPT} {PIPELINE}", "forward", marks=pytest.mark.full),
        pytest.param(
            f"--bf16 {EXPERT_PARALLEL} {DIST_OPT} {PIPELINE} --moe-layer-freq [0,1]", "forward", marks=pytest.mark.full
        ),
    ],
    ids=[
        "plain", "two-instances", "ep2", "ep2-plain", "experts", "one-instance", "fp32", "overlapped", "ep2-pp2",
        "ep2-pp2-bare-stage",
    ],
)  # fmt: skip
def test_a_gasp_is_what_megatron_would_have_saved_and_loads_without_lastgasp(
    flags: str, phase: str, tmp_path: Path
) -> None:
    once, ranks = (*FLAGS, "--max-restarts", "0"), 4 if PIPELINE in flags else 2
    broken = GptJob(
        folder=tmp_path / "job", flags=flags, ranks=ranks, last=LAST, every=SAVED, launcher="run", launch_options=once
    )  # fmt: skip
    done = broken.run(fault("sigkill", 1, phase, tmp_path), timeout=LIMIT)
    assert done.returncode == exitcodes.SAVED, done.output[-4000:]
    assert len(read_log(tmp_path / "fired")) == 1
    step = incident_of(broken).step_saved or 0
    # A rank that is killed after its update may have been the only one to which all gradients came.
    assert step in ((FAULT, FAULT + 1) if phase == "after_update" else (FAULT,))
    whole = GptJob(folder=tmp_path / "whole", flags=flags, ranks=ranks, last=LAST, every=step)
    assert (done := whole.run(timeout=LIMIT)).ok, done.output[-4000:]
    checkpoint = broken.checkpoints / f"iter_{step:07d}"
    assert verify(checkpoint, LAYOUT).ok
    files = sorted(path.relative_to(checkpoint) for path in checkpoint.rglob("*.pt"))
    stock = whole.checkpoints / checkpoint.name
    assert files == sorted(path.relative_to(stock) for path in stock.rglob("*.pt"))
    for path in files:
        found = file_differences(broken, stock / path, checkpoint / path)
        assert [line for line in found if not _expected(line)] == []
    rest = GptJob(folder=tmp_path / "job", flags=flags, ranks=ranks, last=LAST, every=SAVED)
    assert (done := rest.run(timeout=LIMIT)).ok, done.output[-4000:]
    losses, expected = rest.losses(), whole.losses()
    assert losses.keys() == expected.keys()
    assert {key: times[-1:] for key, times in losses.items()} == expected


def _expected(line: str) -> bool:
    """Options of this job and of that one; the state of Megatron's own error injector, which stays out of a gasp.

    What a dead rank has left has the learning rate of the step, and the scheduler sets it anew when it is loaded.
    """
    ours = ("/args/lastgasp_", "/args/load:", "/args/save:", "/args/save_interval:")
    return line.startswith((*ours, "/rerun_state_machine")) or ("/param_groups/" in line and "/lr: " in line)


@pytest.mark.full
def test_a_lost_shard_without_replica_is_reported_with_what_would_have_saved_it(tmp_path: Path) -> None:
    flags = f"--bf16 {DIST_OPT}"
    job = GptJob(folder=tmp_path / "job", flags=flags, last=LAST, every=SAVED, launcher="run", launch_options=FLAGS)
    environ = fault("sigkill", 0, "forward", tmp_path) | {"LASTGASP_ARENA": "off"}
    done = job.run(environ, timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    found = incident_of(job)
    assert found.ending == "gave_up" and found.steps_lost == FAULT - SAVED
    assert "no live holder" in found.reason
    assert "--num-distributed-optimizer-instances 2" in done.output and "MiB more per rank" in done.output
    again = {key: times for key, times in job.losses().items() if len(times) > 1}
    assert {iteration for _, iteration in again} >= {SAVED, SAVED + 1}, "not resumed from the periodic checkpoint"
    assert all(iteration >= SAVED for _, iteration in again)
    assert all(first[: len(second)] == second[: len(first)] for first, second in again.values())


@pytest.mark.full
def test_fp32_weights_that_are_kept_in_another_form_are_never_saved(tmp_path: Path) -> None:
    """As with MindSpeed's --reuse-fp32-param, from an option that nobody knows."""
    flags, script = f"--bf16 {TWO_INSTANCES}", Path(place.__file__).with_name("train_reused.py")
    whole = GptJob(folder=tmp_path / "whole", flags=flags, last=LAST, every=SAVED)
    assert (done := whole.run(timeout=LIMIT)).ok, done.output[-4000:]
    job = GptJob(
        folder=tmp_path / "job", flags=flags, last=LAST, every=SAVED, launcher="run", launch_options=FLAGS,
        script=script,
    )  # fmt: skip
    done = job.run(fault("sigkill", 1, "forward", tmp_path), timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    assert len(read_log(tmp_path / "fired")) == 1
    found = incident_of(job)
    assert found.ending == "gave_up" and "does not round to the bfloat16 weight" in found.reason, found
    assert "rank 0 can save nothing after a fault" in done.output, "it is said when the first update was made"
    assert not (job.checkpoints / f"iter_{FAULT:07d}").exists()
    assert {key: times[-1:] for key, times in job.losses().items()} == whole.losses()


OVERFLOW = "--fp16 --loss-scale-window 4 --hysteresis 1 --initial-loss-scale"


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "every"),
    [
        (f"{OVERFLOW} 1048576", SAVED),
        # So much that no update comes before the fault; Megatron itself could not save then.
        (f"{OVERFLOW} 67108864 {TWO_INSTANCES}", LAST),
    ],
    ids=["first", "all-until-the-fault"],
)
def test_iterations_that_an_overflow_skips_are_counted_and_saved(flags: str, every: int, tmp_path: Path) -> None:
    whole = GptJob(folder=tmp_path / "whole", flags=flags, last=LAST, every=every)
    done = whole.run(timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    skipped = done.output.count("number of skipped iterations:   1")
    assert (0 if every == SAVED else FAULT) < skipped < LAST, "what is to be tested did not happen"
    job = GptJob(folder=tmp_path / "job", flags=flags, last=LAST, every=every, launcher="run", launch_options=FLAGS)
    done = job.run(fault("sigkill", 0, "backward", tmp_path), timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    assert incident_of(job).step_saved == FAULT
    assert {key: times[-1:] for key, times in job.losses().items()} == whole.losses()


@pytest.mark.full
@pytest.mark.parametrize("more", ["", f" {EXPERT_PARALLEL} {DIST_OPT}"], ids=["dense", "expert-parallel"])
def test_periodic_saves_in_torch_dist_and_a_gasp_in_torch_live_together(more: str, tmp_path: Path) -> None:
    flags = f"--bf16 --ckpt-format torch_dist{more}"
    whole = GptJob(folder=tmp_path / "whole", flags=f"--bf16{more}", last=LAST, every=SAVED)
    assert (done := whole.run(timeout=LIMIT)).ok, done.output[-4000:]
    job = GptJob(folder=tmp_path / "job", flags=flags, last=LAST, every=SAVED, launcher="run", launch_options=FLAGS)
    done = job.run(fault("sigkill", 1, "forward", tmp_path), timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    assert incident_of(job).step_saved == FAULT
    assert {key: times[-1:] for key, times in job.losses().items()} == whole.losses()


@pytest.mark.cold
def test_megatrons_verdict_on_a_result_ends_the_job(tmp_path: Path) -> None:
    job = GptJob(
        folder=tmp_path, flags="--bf16 --rerun-mode validate_results", last=LAST, every=SAVED, launcher="run",
        launch_options=FLAGS,
    )  # fmt: skip
    done = job.run({"NAN_AT": str(FAULT)}, timeout=LIMIT)
    assert done.returncode == 16, done.output[-4000:]
    assert "found NaN in local forward loss calculation" in done.output, "what is to be tested did not happen"
    assert "stopped with exit code 16: Megatron's rerun machine" in done.output
    assert {len(times) for times in job.losses().values()} == {1}, "it was started again"
    assert not list((job.checkpoints / "incidents").glob("*.json")), "a verdict is not a fault"


NO_GLOO = f"--bf16 {DIST_OPT} --disable-gloo-process-groups --ckpt-format torch_dist"


@pytest.mark.full
def test_a_gasp_loads_without_gloo_groups(tmp_path: Path) -> None:
    job = GptJob(folder=tmp_path, flags=NO_GLOO, last=FAULT + 2, every=99, launcher="run", launch_options=FLAGS)
    done = job.run(fault("exception", 1, "forward", tmp_path), timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    assert len(read_log(tmp_path / "fired")) == 1
    found = incident_of(job)
    assert (found.ending, found.step_saved, found.steps_lost) == ("saved", FAULT, 0)
    again = {key: times for key, times in job.losses().items() if len(times) > 1}
    assert {iteration for _, iteration in again} == {FAULT}, "it did not go on from the gasp"
    assert all(first[: len(second)] == second[: len(first)] for first, second in again.values()), "losses differ"
    assert (job.checkpoints / f"iter_{FAULT:07d}").is_dir(), "it was not moved away"


@pytest.mark.full
def test_a_gasp_of_another_cut_is_set_aside_and_the_save_before_is_resharded(tmp_path: Path) -> None:
    once, dist = (*FLAGS, "--max-restarts", "0"), "--bf16 --ckpt-format torch_dist"
    made = GptJob(
        folder=tmp_path, flags=f"{dist} {TENSOR}", last=LAST, every=SAVED, launcher="run", launch_options=once
    )
    done = made.run(fault("exception", 1, "forward", tmp_path), timeout=LIMIT)
    assert done.returncode != 0 and incident_of(made).step_saved == FAULT, done.output[-4000:]
    (tmp_path / "losses").rename(tmp_path / "losses-of-tp2")
    again = GptJob(folder=tmp_path, flags=dist, last=FAULT + 1, every=SAVED, launcher="run", launch_options=once)
    done = again.run(timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    assert {iteration for _, iteration in again.losses()} == {SAVED, SAVED + 1, SAVED + 2}
    assert (again.checkpoints / f"iter_{FAULT:07d}.unfit/mp_rank_01").is_dir()
    assert "holds TP2 PP1 in format torch, and the job asks for TP1 PP1" in done.output
    assert f"step {SAVED} was resumed from, and {FAULT - SAVED} steps are trained again" in done.output


@pytest.mark.full
def test_a_checkpoint_of_another_model_is_set_aside_and_the_one_before_is_loaded(tmp_path: Path) -> None:
    wide = GptJob(folder=tmp_path / "wide", flags="--bf16 --hidden-size 64", last=FAULT, every=FAULT)
    assert (done := wide.run(timeout=LIMIT)).ok, done.output[-4000:]
    job = GptJob(folder=tmp_path / "job", flags="--bf16", last=SAVED, every=SAVED, launcher="run", launch_options=FLAGS)
    assert (done := job.run(timeout=LIMIT)).ok, done.output[-4000:]
    name = f"iter_{FAULT:07d}"
    shutil.copytree(wide.checkpoints / name, job.checkpoints / name)
    (job.checkpoints / "latest_checkpointed_iteration.txt").write_text(str(FAULT))
    done = replace(job, last=FAULT).run(timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    assert {iteration for _, iteration in job.losses()} == set(range(FAULT))
    assert (job.checkpoints / f"{name}.unfit").is_dir() and verify(job.checkpoints / name, LAYOUT).ok
    assert "this job cannot load it" in done.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "option"),
    [
        (f"--bf16 {EXPERTS} --moe-enable-routing-replay", "--moe-enable-routing-replay"),
        pytest.param("--bf16 --no-save-optim", "--no-save-optim", marks=pytest.mark.full),
    ],
)
def test_what_survivors_could_not_save_is_refused_at_the_start(flags: str, option: str, tmp_path: Path) -> None:
    once = (*FLAGS, "--max-restarts", "0")
    job = GptJob(folder=tmp_path, ranks=1, flags=flags, last=LAST, launcher="run", launch_options=once)
    done = job.run(timeout=LIMIT)
    assert done.returncode not in (None, 0), done.output[-4000:]
    assert "ConfigError" in done.output and f"{option}=" in done.output, done.output[-4000:]
    assert job.losses() == {}, "it trained"
