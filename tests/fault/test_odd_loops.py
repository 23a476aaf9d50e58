"""Loops and shells that do what they should not: it costs no job, and what a checkpoint lacks is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lastgasp import exitcodes
from lastgasp.checkpoint import candidates
from lastgasp.pytorch.loop.files import LAYOUT
from lastgasp.pytorch.loop.record import KEY, SHARDED_FILE
from lastgasp.pytorch.sharded import LAYOUT as SHARDED
from support.launchers import LIMIT, SUPPORT, environment, finish, incidents, run

pytestmark = pytest.mark.fault
SCRIPT = SUPPORT / "train_odd.py"

NOTED = {
    "refreshes": ("saved", "rank 1 ended inside a step that the others completed"),
    "averages": ("saved", "rank 1 ended inside a step that the others completed"),
    "replaces": ("saved", "an optimizer (SGD) that is not in TorchState trains its model"),
    "spreads": ("gave_up", "optimizers hold on one rank what they do not hold on the others"),
    "ignores": ("saved", "parameters that are not sharded (2.weight, 2.bias) differ between ranks"),
    "unfreezes": ("gave_up", "2 parameters are trained that were frozen when DDP was made"),
}


@pytest.mark.full
@pytest.mark.parametrize("what", NOTED)
def test_what_a_checkpoint_lacks_is_noted(what: str, tmp_path: Path) -> None:
    done = finish(run(SCRIPT, what, tmp_path / "d"), tmp_path)
    assert done.returncode == 0, done.output[-4000:]
    [incident] = incidents(tmp_path / "d")
    ending, text = NOTED[what]
    assert incident.ending == ending, incident
    assert [note for note in incident.notes if text in note], incident.notes
    assert text in done.output


@pytest.mark.full
def test_experts_that_begin_with_other_values_under_one_name_are_refused(tmp_path: Path) -> None:
    """A checkpoint has one of them."""
    done = finish(run(SCRIPT, "experts", tmp_path / "d"), tmp_path)
    assert done.returncode == exitcodes.REFUSED, done.output[-4000:]
    assert "2.weight, 2.bias: ranks hold different values of the same part on meshes that nothing joins" in done.output


@pytest.mark.full
def test_experts_that_become_different_come_back_from_memory_alone(tmp_path: Path) -> None:
    """Each rank's arena has its own."""
    for name in ("d", "undisturbed"):
        (tmp_path / name).mkdir()
    (tmp_path / "undisturbed/died").touch()
    for name in ("d", "undisturbed"):
        done = finish(run(SCRIPT, "late_experts", tmp_path / name), tmp_path)
        assert done.returncode == 0, done.output[-4000:]
        assert "ranks hold different values of the same part of 2.weight, 2.bias, on meshes" in done.output
        [periodic, *_] = candidates([tmp_path / name], SHARDED)
        small = torch.load(periodic.path / SHARDED_FILE, weights_only=False)
        assert "the ranks did not hold the same" in str(small[KEY])
    [incident] = incidents(tmp_path / "d")
    assert incident.ending == "in_arenas" and not list((tmp_path / "d").glob("gasp*"))
    ends = [[(tmp_path / name / f"expert-{rank}").read_text() for rank in range(2)] for name in ("d", "undisturbed")]
    assert ends[0] == ends[1] and ends[0][0] != ends[0][1]


REFUSED = {
    "makes": ("forward makes buffers, or changes their shape: model.2.calls", "2.calls is only in the checkpoint"),
    "adds": ("parameters were added to an optimizer in the middle", "add_param_group must be called before"),
}
"""What is noted as soon as it happens, and what a resume is refused with."""


@pytest.mark.full
@pytest.mark.parametrize("what", REFUSED)
def test_what_a_resume_will_refuse_is_noted_before(what: str, tmp_path: Path) -> None:
    done = finish(run(SCRIPT, what, tmp_path / "d"), tmp_path)
    assert done.returncode == exitcodes.REFUSED, done.output[-4000:]
    text, refusal = REFUSED[what]
    [note] = [note for note in incidents(tmp_path / "d")[0].notes if note.startswith(text)]
    assert done.output.index(note) < done.output.index(refusal)


@pytest.mark.full
def test_layers_that_lightning_unfreezes_under_ddp_are_noted(tmp_path: Path) -> None:
    done = finish(run(SUPPORT / "train_finetuning.py", tmp_path / "d"), tmp_path)
    assert done.returncode == 0, done.output[-4000:]
    [incident] = incidents(tmp_path / "d")
    assert incident.ending == "gave_up", incident
    assert [note for note in incident.notes if "2 parameters are trained that were frozen when DDP was made" in note]


@pytest.mark.parametrize("what", ["prints", pytest.param("reports", marks=pytest.mark.full)])
def test_a_job_whose_output_nobody_reads_is_not_restarted(what: str, tmp_path: Path) -> None:
    """As `job | head` leaves it; a training that had ended is no fault, and one that had not is saved."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            run(SCRIPT, what, tmp_path / "d"), stdout=writing, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            env=environment(), text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    assert "nobody reads its output any more" in done.stderr, done.stderr[-4000:]
    assert "restarting" not in done.stderr
    assert done.returncode == (exitcodes.SAVED if what == "prints" else 1), done.stderr[-4000:]
    assert [i.step_saved for i in incidents(tmp_path / "d")] == ([1] if what == "prints" else [])


@pytest.mark.full
def test_a_job_without_any_output(tmp_path: Path) -> None:
    """`>&- 2>&-`: its first sockets would get the numbers of standard output and error."""
    command = ["/bin/sh", "-c", 'exec "$@" >&- 2>&-', "sh", *run(SCRIPT, "prints", tmp_path / "d")]
    done = finish(command, tmp_path)
    assert done.returncode == 0, done.output
    assert [one.step for one in candidates([tmp_path / "d"], LAYOUT)] == [8, 4]


@pytest.mark.full
def test_plain_values_that_a_restarted_lightning_fit_has_lost_are_noted(tmp_path: Path) -> None:
    """They change its loss; what `state_dict` or `on_save_checkpoint` saves is not among them."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d/go").touch()
    fault = {"LASTGASP_FAULT": "kind=sigkill,rank=1,step=8,phase=backward", "LASTGASP_RECOVERY": "restart"}
    done = finish(run(SUPPORT / "train_values_lightning.py", tmp_path / "d"), tmp_path, **fault)
    assert done.returncode == 0, done.output[-4000:]
    [incident] = incidents(tmp_path / "d")
    assert (incident.ending, incident.steps_lost) == ("saved", 0), incident
    [note] = [note for note in incident.notes if "training has changed what objects keep beside their state" in note]
    assert "Net.training_step_outputs, Net.count, Net.recent, Net.classes and " in note
    assert note in done.output


@pytest.mark.full
def test_plain_values_that_a_restarted_trainer_has_lost_are_noted(tmp_path: Path) -> None:
    """Of a subclass of Trainer, a callback and the model; neither Trainer's own nor an `ExportableState`'s."""
    pytest.importorskip("transformers", reason="pip install '.[transformers]'")
    script = [SUPPORT / "train_transformers.py", "--dir", tmp_path / "d", "--shape", "counting"]
    fault = {"LASTGASP_FAULT": "kind=sigkill,rank=1,step=5,phase=backward", "LASTGASP_RECOVERY": "restart"}
    command = [sys.executable, *run(*script)[1:]]
    done = finish(command, tmp_path, **fault)
    assert done.returncode == 0, done.output[-4000:]
    [incident] = incidents(tmp_path / "d")
    assert (incident.ending, incident.steps_lost) == ("saved", 0), incident
    [note] = [note for note in incident.notes if "training has changed what objects keep beside their state" in note]
    assert "state: passing, Counting.steps, Counter.losses. No checkpoint" in note
    assert note in done.output


FULL = "stopped with exit code {}: its output goes to /dev/full, which takes nothing"


@pytest.mark.parametrize(
    ("what", "code"), [("prints", exitcodes.SAVED), pytest.param("reports", 1, marks=pytest.mark.full)]
)
def test_a_job_whose_output_takes_nothing_is_not_restarted(what: str, code: int, tmp_path: Path) -> None:
    """Each restart would print, and end, again; a training that had ended is no fault."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            run(SCRIPT, what, tmp_path / "d"), stdout=full, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            env=environment(), text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
    assert done.returncode == code, done.stderr[-4000:]
    assert FULL.format(code) in done.stderr and "restarting" not in done.stderr
    assert [i.step_saved for i in incidents(tmp_path / "d")] == ([1] if what == "prints" else [])


@pytest.mark.full
def test_another_fault_of_a_job_whose_output_takes_nothing_is_answered(tmp_path: Path) -> None:
    """It prints nothing; rank 1 is killed once."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            run(SCRIPT, "dies", tmp_path / "d"), stdout=full, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
            env=environment(), text=True, timeout=LIMIT, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert [i.ending for i in incidents(tmp_path / "d")] in (["saved"], ["in_place"])


@pytest.mark.full
def test_files_that_may_not_be_as_large_as_the_buffer_are_refused(tmp_path: Path) -> None:
    """Nothing could be saved; the job is not tried again, and told why."""
    command = ["/bin/sh", "-c", 'ulimit -f 64; exec "$@"', "sh", *run(SCRIPT, "dies", tmp_path / "d")]
    done = finish(command, tmp_path)
    assert done.returncode == exitcodes.REFUSED, done.output[-4000:]
    assert "RLIMIT_FSIZE=32768 is not allowed: expected at least " in done.output
    assert "restarting" not in done.output
