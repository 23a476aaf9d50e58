"""Real Lightning jobs of ModelParallelStrategy with real faults: no step is lost, plain Lightning reads the saves."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from lastgasp.checkpoint import DirectoryLayout
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import run_job
from lastgasp.testing.weights import differences
from support import lean
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


COVERING = (LightningCase("sigkill", "backward", "first", "run"),)
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
    if case == COVERING[0]:
        plain_lightning_resumes(tmp_path, tmp_path / "ckpts" / f"gasp-step={STEP:08d}.ckpt")


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


def plain_lightning_resumes(folder: Path, gasp: Path) -> None:
    """Without lastgasp, on another number of ranks, by Lightning's own defaults."""
    assert {"meta.pt", ".metadata", "__0_0.distcp", "__1_0.distcp"} < {path.name for path in gasp.iterdir()}
    command = [lean.python(), str(SCRIPT), "--dir", str(folder / "plain"), "--without", "--devices", "1"]
    done = run_job([*command, "--from", str(gasp), "--steps", str(STEP + 1)], folder / "plain.log", timeout=LIMIT,
                   environ=os.environ | {"LASTGASP": "0"})  # fmt: skip
    assert done.ok, done.output[-4000:]
    assert f"Restored all states from the checkpoint at {gasp}" in done.output
    assert f"max_steps={STEP + 1}" in done.output
