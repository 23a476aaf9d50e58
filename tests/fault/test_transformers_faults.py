"""Real jobs of Hugging Face's Trainer, real faults: no step is lost and the numbers stay the same, logs included."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from lastgasp.testing.corrupt import flip_bit
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import Finished, run_job
from lastgasp.testing.weights import differences
from support.matrix import LIMIT, SAVE_STEP, STEP, References, check_marks, first_incident
from support.transformers_matrix import COVERING, SCRIPT, SHAPES, TransformersCase, all_cases, launcher

pytest.importorskip("transformers", reason="pip install '.[transformers]'")

LAYOUT = DirectoryLayout("checkpoint-[0-9]*")
Reference = References[tuple[int, str], Path]
pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Results of uninterrupted jobs without lastgasp, by world size and shape."""
    home = tmp_path_factory.mktemp("reference")

    def make(key: tuple[int, str]) -> Path:
        folder = home / "-".join(map(str, key))
        folder.mkdir()
        _run([*launcher(key[0], "torchrun"), str(SCRIPT), "--dir", str(folder / "out"), "--final",
              str(folder / "final.pt"), "--shape", key[1], "--without"], folder)  # fmt: skip
        return folder / "final.pt"

    return References(make)


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering(case: TransformersCase, tmp_path: Path, reference: Reference) -> None:
    """The gasp is a `checkpoint-N` like all others: a Trainer without lastgasp resumes from it, too."""
    check(case, tmp_path, reference)
    gasp = tmp_path / f"out/checkpoint-{case.exact_step}"
    names = {path.name for path in (tmp_path / f"out/checkpoint-{SAVE_STEP}").iterdir()}
    assert {path.name for path in gasp.iterdir()} == names
    _run([*launcher(case.world, "torchrun"), str(SCRIPT), "--dir", str(tmp_path / "plain"), "--final",
          str(tmp_path / "plain.pt"), "--without", "--resume", str(gasp)], tmp_path)  # fmt: skip
    state = json.loads((tmp_path / "plain/checkpoint-12/trainer_state.json").read_text())
    assert (state["global_step"], state["epoch"]) == (12, 2.0)
    assert [row["step"] for row in state["log_history"] if "loss" in row] == [3, 6, 9, 12]


@pytest.mark.product("shape")
@pytest.mark.full
@pytest.mark.parametrize("case", [*all_cases(), *SHAPES], ids=str)
def test_rest_of_the_matrix(case: TransformersCase, tmp_path: Path, reference: Reference) -> None:
    check(case, tmp_path, reference)


@pytest.mark.full
def test_a_damaged_checkpoint_is_not_resumed_from(tmp_path: Path, reference: Reference) -> None:
    """The next older one is, to the same end; and where none is left, the start is refused."""
    final, out = tmp_path / "final.pt", tmp_path / "out"
    script = [*launcher(2), str(SCRIPT), "--dir", str(out), "--final", str(final)]
    _run(script, tmp_path)
    flip_bit(out / "checkpoint-12/model.safetensors", 2000)
    done = _run(script, tmp_path)
    assert "checkpoint-12" in done.output and "was not used" in done.output
    assert (out / "checkpoint-12.corrupt").exists()
    assert differences(reference[2, "plain"], final) == []
    for path in out.glob("checkpoint-*[0-9]"):
        flip_bit(path / "optimizer.pt", 3000)
    refused = run_job(script, tmp_path / "log", timeout=LIMIT, environ=os.environ)
    assert refused.returncode == 87, refused.output[-4000:]
    assert "NoGoodCheckpoint" in refused.output


def test_a_gasp_within_trainers_own_save_is_whole(tmp_path: Path) -> None:
    """What a rank has still to write of Trainer's does not fall into it."""
    out, script = tmp_path / "out", str(SCRIPT.with_name("train_transformers_late.py"))
    command = [*launcher(2), "--max-restarts", "0", script, str(out)]
    done = run_job(command, tmp_path / "log", timeout=LIMIT, environ=os.environ)
    assert (out / "late").exists(), done.output[-4000:]
    assert first_incident(out).step_saved == 4, done.output[-4000:]
    [found] = candidates([out], LAYOUT)
    assert found.step == 4
    assert verify(found.path, LAYOUT).ok, done.output[-4000:]


def check(case: TransformersCase, folder: Path, reference: Reference) -> None:
    """Run the job into its fault and to its end; then look at everything it left."""
    expected = reference[case.world, case.shape]
    out, final, fired = folder / "out", folder / "final.pt", folder / "fired"
    hang = {"LASTGASP_HANG_TIMEOUT": "8"} if case.kind == "sigstop" else {}
    faults = {"LASTGASP_FAULT": case.faults, "LASTGASP_FAULT_LOG": str(fired), "LASTGASP_RECOVERY": "restart"}
    done = _run(case.command(out, final), folder, faults | hang, restarts=True)
    assert len(read_log(fired)) >= case.fired, f"the fault did not fire\n{done.output[-4000:]}"
    _check_saved(case, out, done)
    assert differences(expected, final) == [], done.output[-6000:]
    if case.shape == "plain" and case.launcher == "run":
        check_marks(case, out / "profiling")
    assert [path.name for path in out.iterdir() if ".tmp" in path.name or path.name.endswith(".corrupt")] == []


def _check_saved(case: TransformersCase, out: Path, done: Finished) -> None:
    incident, where = first_incident(out), done.output[-4000:]
    found = {c.step: c for c in candidates([out], LAYOUT)}
    assert all(verify(c.path, LAYOUT).ok for c in found.values()), where
    if case.should_give_up or (case.world == 1 and case.moment == "update"):
        assert incident.ending == "gave_up", f"{incident}\n{where}"
        return
    assert incident.ending in ("saved", "nothing_to_save"), f"{incident}\n{where}"
    assert incident.steps_lost == 0, f"{incident}\n{where}"
    step = incident.step_saved if incident.step_saved is not None else case.exact_step
    late = case.world > 1 and case.moment in ("before_update", "step_end")  # the others may not have begun their update
    assert case.exact_step in (None, step) or (late and step == STEP), f"{incident}\n{where}"
    limited = case.shape == "epochs"  # save_total_limit=2 removes older ones, gasps as well
    assert limited or step in found or step == STEP + 1, f"{incident}\n{where}"


def _run(command: list[str], folder: Path, environ: dict[str, str] | None = None, restarts: bool = False) -> Finished:
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    again = command.index("--nproc-per-node")
    if restarts and "torch.distributed.run" in command:
        command = [*command[:again], "--max-restarts", "3", *command[again:]]
    done = run_job(command, log, timeout=LIMIT, environ=os.environ | (environ or {}), grace=10.0)
    assert done.ok, done.output[-6000:]
    return done
