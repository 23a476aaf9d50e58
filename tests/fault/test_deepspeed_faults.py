"""Real jobs of a DeepSpeed engine, ZeRO stages 1 to 3 on the CPU, real faults: DeepSpeed itself reads what is saved."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lastgasp.checkpoint import verify
from lastgasp.gasp.attempt import FROM_ARENAS
from lastgasp.pytorch.deepspeed.layout import LAYOUT
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import run_job
from lastgasp.testing.weights import differences
from support import deepspeed_place as place
from support.matrix import LIMIT, STEP, Case, References, check_saved, first_incident, run_case, undisturbed
from support.together import killed_together

SCRIPT = Path(__file__).parents[1] / "support" / "train_deepspeed.py"
Reference = References[tuple[int, int, str], Path]
pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


@dataclass(frozen=True)
class EngineCase(Case):
    """One job with one fault."""

    stage: int = 2
    shape: str = "plain"

    def __str__(self) -> str:
        return f"{super().__str__()}-stage{self.stage}-{self.shape}"

    @property
    def exact_step(self) -> int | None:
        """A killed rank's partition is that of the last boundary, wherever in the next step it dies."""
        if self.moment in ("update", "after_update", "arena_copy"):
            return STEP if self.kind == "sigkill" else None
        return super().exact_step

    @property
    def key(self) -> tuple[int, int, str]:
        """Of the undisturbed job."""
        return self.world, self.stage, self.shape

    def command(self, directory: Path, final: Path) -> list[str]:
        """The job's command line."""
        script = [str(SCRIPT), "--dir", str(directory), "--final", str(final)]
        script += ["--stage", str(self.stage), "--shape", self.shape]
        return [sys.executable, "-m", "lastgasp", "run", "--nproc-per-node", str(self.world), *script]


COVERING = (
    EngineCase("sigkill", "update", "last", "run", 2, 3),
    EngineCase("sigkill", "forward", "first", "run", 2, 1),
)
REST = (
    *(EngineCase("sigkill", moment, rank, "run", 2, stage) for stage, moment, rank in itertools.product(
        (1, 2, 3), ("data", "backward", "update", "after_update", "arena_copy", "periodic_save"), ("first", "last"))),
    *(EngineCase(kind, moment, "last", "run", 2, stage) for stage, kind, moment in itertools.product(
        (2, 3), ("exception", "sigterm", "sigstop"), ("forward", "after_update"))),
    *(EngineCase("sigkill", moment, "last", "run", 2, stage, shape) for stage, shape, moment in itertools.product(
        (1, 2, 3), ("accumulated", "half"), ("backward", "update"))),
    *(EngineCase("sigkill", "backward", "last", "run", 4, stage) for stage in (2, 3)),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> Iterator[None]:
    """What the jobs of this module import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(place.folder()), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Final weights of uninterrupted jobs."""
    folder = tmp_path_factory.mktemp("reference")

    def make(key: tuple[int, int, str]) -> Path:
        return undisturbed(EngineCase("none", "none", "first", "run", *key), folder / "-".join(map(str, key)))

    return References(make)


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_deepspeed_covering(case: EngineCase, tmp_path: Path, reference: Reference) -> None:
    check(case, tmp_path, reference)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in REST if case not in COVERING], ids=str)
def test_deepspeed_rest_of_the_matrix(case: EngineCase, tmp_path: Path, reference: Reference) -> None:
    check(case, tmp_path, reference)


def check(case: EngineCase, folder: Path, reference: Reference) -> None:
    """No step lost, bit-equal, verified, and DeepSpeed makes the same of what was saved as lastgasp does."""
    fired = folder / "fired"
    done = run_case(case, folder, {"LASTGASP_FAULT": case.faults, "LASTGASP_FAULT_LOG": str(fired)})
    assert len(read_log(fired)) >= case.fired, done.output[-4000:]
    assert done.returncode == 0, done.output[-4000:]
    check_saved(case, folder / "ckpts", done, LAYOUT, "step=00000004.zero")
    assert differences(reference[case.key], folder / "final.pt") == [], done.output[-4000:]
    if case in COVERING:
        assert FROM_ARENAS.format(case.victim) in first_incident(folder / "ckpts").notes or case.moment == "update"
        (saved,) = (folder / "ckpts").glob("gasp-*.zero")
        deepspeed_reads(case, folder, saved)


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("shape", "batch", "rank"), [("accumulated", 2 * STEP + 1, 1), ("quarters", 4 * STEP + 2, 0)])
def test_killed_in_the_middle_of_an_accumulation(
    stage: int, shape: str, batch: int, rank: int, tmp_path: Path, reference: Reference
) -> None:
    """The batches of the next step that were drawn already are drawn again, and count from its beginning."""
    case = EngineCase("sigkill", "backward", ("first", "last")[rank], "run", 2, stage, shape)
    command = [*case.command(tmp_path / "ckpts", tmp_path / "final.pt"), "--die", f"{rank}:{batch}"]
    done = run_job(command, tmp_path / "log", timeout=LIMIT)
    assert done.returncode == 0, done.output[-4000:]
    check_saved(case, tmp_path / "ckpts", done, LAYOUT, "step=00000004.zero")
    assert differences(reference[case.key], tmp_path / "final.pt") == [], done.output[-4000:]


@pytest.mark.full
def test_all_ranks_at_once_cost_the_steps_since_the_checkpoint(tmp_path: Path, reference: Reference) -> None:
    """Nobody is left to save, and an engine does not begin with arenas: a note says so, and the result is the same."""
    case, fired = EngineCase("killed-together", "data", "all", "run", 2, 2), tmp_path / "fired"
    faults = f"kind=sigstop,rank=all,step={STEP},phase=data"
    with killed_together(fired, case.world):
        done = run_case(case, tmp_path, {"LASTGASP_FAULT": faults, "LASTGASP_FAULT_LOG": str(fired)})
    assert done.returncode == 0, done.output[-4000:]
    assert f"step {STEP} was left in arenas" in done.output and "from files alone" in done.output, done.output[-4000:]
    assert "step=00000004.zero: step 4" in done.output, done.output[-4000:]
    assert differences(reference[case.key], tmp_path / "final.pt") == [], done.output[-4000:]


def deepspeed_reads(case: EngineCase, folder: Path, saved: Path) -> None:
    """Without lastgasp: loaded by plain DeepSpeed and saved again by it, all files hold the same."""
    assert verify(saved, LAYOUT).ok
    again = folder / "again"
    script = [str(SCRIPT), "--plain", str(saved), "--dir", str(again), "--stage", str(case.stage)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.world)]
    done = run_job([*torchrun, *script, "--shape", case.shape], folder / "log-plain", timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    tag = (saved / "latest").read_text()
    assert tag == (again / "latest").read_text() == f"global_step{STEP}"
    assert {path.name for path in saved.iterdir()} == {path.name for path in again.iterdir()} | {"lastgasp.pt"}
    same = [sys.executable, str(SCRIPT.with_name("deepspeed_same.py")), str(saved / tag), str(again / tag)]
    compared = run_job(same, folder / "log-same", timeout=LIMIT, environ=os.environ | {"DS_ACCELERATOR": "cpu"})
    assert (compared.returncode, compared.output) == (0, ""), "what DeepSpeed has saved is something else"
