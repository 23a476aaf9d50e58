"""Real Lightning jobs of ModelParallelStrategy and FSDPStrategy: no step is lost, plain Lightning reads the saves."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lastgasp.checkpoint import DirectoryLayout
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import run_job
from lastgasp.testing.weights import differences
from support import fsdp_strategy, lean
from support.matrix import LIMIT, SAVE_STEP, STEP, References, check_saved, first_incident, run_case, undisturbed
from support.together import ShardedCase, killed_together

SCRIPT = Path(__file__).parents[1] / "support" / "train_lightning_sharded.py"
LAYOUT = DirectoryLayout("*.ckpt")
Reference = References[tuple[int, str], Path]
pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(1200)]


@dataclass(frozen=True)
class LightningCase(ShardedCase):
    """One job with one fault."""

    @property
    def exact_step(self) -> int | None:
        """A killed rank's shard is that of the last boundary; what the others did beyond it nobody could train on."""
        if self.moment in ("update", "after_update", "arena_copy", "step_end"):
            return STEP if self.kind == "sigkill" else None
        if self.shape == "ending" and self.moment == "periodic_save":
            return None  # the save comes before the end of the step there
        return super().exact_step

    def command(self, directory: Path, final: Path) -> list[str]:
        """The job's command line."""
        script = [str(SCRIPT), "--dir", str(directory), "--final", str(final), "--shape", self.shape]
        ranks = ["--nproc-per-node", str(self.world)]
        return [lean.python(), "-m", "lastgasp", "run", *ranks, *script, "--devices", str(self.world)]


COVERING = (
    LightningCase("sigkill", "backward", "first", "run"),
    LightningCase("sigkill", "backward", "last", "run", 2, "fsdp-full"),
)
MOMENTS = ("data", "forward", "backward", "update", "after_update", "arena_copy", "step_end", "periodic_save",
           "gasp_save")  # fmt: skip
REST = (
    *(LightningCase("sigkill", moment, rank, "run") for moment, rank in itertools.product(MOMENTS, ("first", "last"))),
    *(LightningCase(kind, moment, "last", "run") for kind, moment in itertools.product(
        ("exception", "sigterm", "sigstop"), ("forward", "after_update", "periodic_save"))),
    *(LightningCase("sigkill", moment, "last", "run", 2, shape)
      for shape in ("ending", "accumulated", "manual")
      for moment in ("backward", "update", "arena_copy", "periodic_save")),
    *(LightningCase(kind, moment, rank, "run", world, shape)
      for world, shape in ((4, "hybrid"), (2, "tensor"), (4, "both"))
      for kind, moment, rank in (("sigkill", "backward", "last"), ("sigkill", "update", "first"),
                                 ("killed-together", "data", "all"))),
    *(LightningCase("killed-together", moment, "all", "run", 2, shape) for shape, moment in (
        ("plain", "forward"), ("plain", "arena_copy"), ("ending", "data"), ("accumulated", "backward"),
        ("manual", "data"))),
    *(LightningCase("sigkill", moment, rank, "run", 2, "fsdp") for moment in MOMENTS for rank in ("first", "last")),
    *(LightningCase(kind, moment, "first", "run", 2, "fsdp") for kind in ("exception", "sigterm", "sigstop")
      for moment in ("forward", "after_update", "periodic_save")),
    *(LightningCase(kind, moment, rank, "run", 4 if shape == "fsdp-hybrid" else 2, shape)
      for shape in fsdp_strategy.SHAPES
      for kind, moment, rank in (("sigkill", "backward", "first"), ("sigkill", "update", "last"),
                                 ("sigkill", "periodic_save", "first"), ("exception", "forward", "first"),
                                 ("sigterm", "data", "last"), ("killed-together", "data", "all"))),
)  # fmt: skip


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Final weights of uninterrupted jobs, by world size and shape."""
    folder = tmp_path_factory.mktemp("reference")
    return References(
        lambda key: undisturbed(LightningCase("none", "none", "first", "run", *key), folder / "-".join(map(str, key)))
    )


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_lightning_sharded_covering(case: LightningCase, tmp_path: Path, reference: Reference) -> None:
    check(case, tmp_path, reference)
    if case in COVERING:
        plain_lightning_resumes(tmp_path, tmp_path / "ckpts" / f"gasp-step={STEP:08d}.ckpt", case.shape)


@pytest.mark.product("shape")
@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in REST if case not in COVERING], ids=str)
def test_lightning_sharded_rest_of_the_matrix(case: LightningCase, tmp_path: Path, reference: Reference) -> None:
    check(case, tmp_path, reference)


def check(case: LightningCase, folder: Path, reference: Reference) -> None:
    """One case: no step lost, bit-equal, everything verified."""
    fired = folder / "fired"
    with killed_together(fired, case.world if case.rank == "all" else 0):
        done = run_case(case, folder, case.environment(fired))
    assert len(read_log(fired)) >= case.fired, done.output[-4000:]
    assert done.returncode == 0, done.output[-6000:]
    if case.nobody_left:
        found = first_incident(folder / "ckpts")
        assert (found.ending, found.step_saved, found.steps_lost) == ("in_arenas", STEP, 0), done.output[-6000:]
        assert "training cannot begin with it" not in done.output
        assert not list((folder / "ckpts").glob("gasp-*")), done.output[-4000:]
    else:
        check_saved(case, folder / "ckpts", done, LAYOUT, f"step={SAVE_STEP}.ckpt")
    assert differences(reference[case.world, case.shape], folder / "final.pt") == [], done.output[-4000:]


def plain_lightning_resumes(folder: Path, gasp: Path, shape: str) -> None:
    """Without lastgasp, on another number of ranks, by Lightning's own defaults."""
    assert {"meta.pt", ".metadata", "__0_0.distcp", "__1_0.distcp"} < {path.name for path in gasp.iterdir()}
    found = plain_lightning(folder, gasp, shape, "--devices", "1", "--steps", str(STEP + 1))
    assert f"max_steps={STEP + 1}" in found


def plain_lightning(folder: Path, start: Path, shape: str, *more: str) -> str:
    """What it says."""
    command = [lean.python(), str(SCRIPT), "--dir", str(folder / "plain"), "--without", "--shape", shape]
    done = run_job([*command, "--from", str(start), *more], folder / "plain.log", timeout=LIMIT,
                   environ=os.environ | {"LASTGASP": "0"})  # fmt: skip
    assert done.ok, done.output[-4000:]
    assert f"Restored all states from the checkpoint at {start}" in done.output
    return done.output


@pytest.mark.full
@pytest.mark.parametrize("shape", [one for one in fsdp_strategy.SHAPES if one not in fsdp_strategy.FULL])
def test_plain_lightning_has_all_of_a_gasp(shape: str, tmp_path: Path) -> None:
    """torch's own function reads another optimizer's state where several groups of ranks hold all parts."""
    hybrid = shape == "fsdp-hybrid"
    case = LightningCase("sigkill", "backward", "first", "run", 4 if hybrid else 2, shape)
    run_case(case, tmp_path, case.environment(tmp_path / "fired"))
    gasp, saved = tmp_path / "ckpts" / f"gasp-step={STEP:08d}.ckpt", tmp_path / "saved.ckpt"
    plain_lightning(tmp_path, gasp, shape, "--devices", str(case.world), "--steps", str(STEP), "--state", str(saved))
    one, other = whole(gasp, tmp_path / "one.pt"), whole(saved, tmp_path / "other.pt")
    assert one.keys() == other.keys() and any("exp_avg" in name for name in one)
    differ = {name for name in one if not torch.equal(one[name], other[name])}
    assert {name.split(".")[0] for name in differ} == ({"optimizer_0"} if hybrid else set()), differ


def whole(directory: Path, file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint but those of batch norms, which each rank has of its own."""
    dcp_to_torch_save(directory, file)
    flat, _ = flatten_state_dict(torch.load(file, weights_only=False))
    return {name: value for name, value in flat.items() if isinstance(value, torch.Tensor) and "running" not in name}


@pytest.mark.full
@pytest.mark.parametrize("shape", fsdp_strategy.SHAPES)
def test_training_goes_on_from_lightnings_own_checkpoint(shape: str, tmp_path: Path, reference: Reference) -> None:
    case = LightningCase("none", "none", "first", "run", 4 if shape == "fsdp-hybrid" else 2, shape)
    command = case.command(tmp_path / "ckpts", tmp_path / "final.pt")
    for steps in (8, 12):
        done = run_job([*command, "--steps", str(steps)], tmp_path / "log", timeout=LIMIT)
        assert done.ok, done.output[-4000:]
    assert "resumes from step 8" in done.output
    assert (tmp_path / "ckpts" / "step=8.ckpt").is_dir() == (shape not in fsdp_strategy.FULL)
    assert differences(reference[case.world, shape], tmp_path / "final.pt") == [], done.output[-4000:]


@pytest.mark.full
@pytest.mark.parametrize("shape", ["fsdp", "fsdp-full", "fsdp-grads"])
@pytest.mark.parametrize("worlds", [(2, 1), (1, 2)], ids=str)
def test_another_number_of_ranks_goes_on(shape: str, worlds: tuple[int, int], tmp_path: Path) -> None:
    """From Lightning's own checkpoint as from a gasp."""
    for world, steps in zip(worlds, (8, 9), strict=True):
        case = LightningCase("none", "none", "first", "run", world, shape)
        command = case.command(tmp_path / "ckpts", tmp_path / "final.pt")
        done = run_job([*command, "--steps", str(steps), "--data-of", "2"], tmp_path / "log", timeout=LIMIT)
        assert done.ok, done.output[-4000:]
    assert "resumes from step 8" in done.output and "max_steps=9" in done.output
    assert f"there were {worlds[0]} ranks and are {worlds[1]}" in done.output, done.output[-3000:]
