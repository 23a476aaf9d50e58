"""Real jobs of a hand-written DDP loop, real faults: no step is lost and the numbers stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.checkpoint import candidates
from lastgasp.pytorch.loop.files import LAYOUT
from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support.loop_matrix import COVERING, FRAMEWORK_CASES, SHAPES, LoopCase, all_cases
from support.matrix import (
    SAVE_STEP,
    References,
    check_marks,
    check_saved,
    first_incident,
    run_case,
    undisturbed,
)

Reference = References[tuple[int, str], Path]
pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Final weights of uninterrupted jobs, by world size and shape."""
    folder = tmp_path_factory.mktemp("reference")
    return References(
        lambda key: undisturbed(LoopCase("none", "none", "first", "run", *key), folder / "-".join(map(str, key)))
    )


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_loop_covering(case: LoopCase, tmp_path: Path, reference: Reference) -> None:
    check(case, tmp_path, reference)


@pytest.mark.product("shape")
@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in (*all_cases(), *SHAPES, *FRAMEWORK_CASES) if c not in COVERING], ids=str)
def test_loop_rest_of_the_matrix(case: LoopCase, tmp_path: Path, reference: Reference) -> None:
    check(case, tmp_path, reference)


@pytest.mark.full
def test_ranks_that_differ_are_not_saved_from_one_another(tmp_path: Path) -> None:
    """`replicated=True` without a common seed: without the killed rank its model is gone, and nobody pretends."""
    case = LoopCase("sigkill", "backward", "last", "run", shape="unlike")
    done = run_case(case, tmp_path, {"LASTGASP_FAULT": case.faults, "LASTGASP_FAULT_LOG": str(tmp_path / "fired")})
    assert read_log(tmp_path / "fired"), done.output[-4000:]
    assert done.returncode == 0, done.output[-4000:]
    incident = first_incident(tmp_path / "ckpts")
    assert (incident.ending, incident.steps_lost) == ("gave_up", 1), incident
    assert "shard 1 of 2 has no live holder (rank 1: gone" in incident.reason
    assert [note for note in incident.notes if "ranks 0 and 1 should hold the same, but their model" in note]
    assert "this is what rank 0 held" in done.output  # the periodic checkpoint that both went on from
    assert [c.step for c in candidates([tmp_path / "ckpts"], LAYOUT)] == [12, 8, 4]


def check(case: LoopCase, folder: Path, reference: Reference) -> None:
    """Run the job into its fault and to its end; then look at everything it left."""
    expected = reference[case.world, case.shape]
    directory, final, fired = folder / "ckpts", folder / "final.pt", folder / "fired"
    done = run_case(case, folder, {"LASTGASP_FAULT": case.faults, "LASTGASP_FAULT_LOG": str(fired)})
    assert len(read_log(fired)) >= case.fired, f"the fault did not fire\n{done.output[-4000:]}"
    if case.launcher == "script":
        assert done.returncode not in (0, None), done.output[-4000:]
        check_saved(case, directory, done, LAYOUT, f"step={SAVE_STEP:08d}.pt")
        done = run_case(case, folder, {})  # nobody restarts it: the user does
    assert done.returncode == 0, done.output[-6000:]
    assert done.left == ()
    check_saved(case, directory, done, LAYOUT, f"step={SAVE_STEP:08d}.pt")
    assert differences(expected, final) == [], done.output[-4000:]
    if case.shape == "plain":
        check_marks(case, directory / "profiling")
    assert [p.name for p in directory.rglob("*") if ".tmp" in p.name or p.name.endswith(".corrupt")] == []
