"""Real Lightning jobs, real faults, every launcher: no step is lost and the numbers stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.checkpoint import SingleFile
from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support.matrix import (
    SAVE_STEP,
    Case,
    References,
    all_cases,
    check_marks,
    check_saved,
    covering_cases,
    first_incident,
    run_case,
    undisturbed,
)

LAYOUT = SingleFile(".ckpt")
pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]
COVERING = covering_cases()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References[int, Path]:
    """Final weights of uninterrupted jobs, by world size."""
    folder = tmp_path_factory.mktemp("reference")
    return References(lambda world: undisturbed(Case("none", "none", "first", "run", world), folder / str(world)))


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering(case: Case, tmp_path: Path, reference: References[int, Path]) -> None:
    check(case, tmp_path, reference)


@pytest.mark.product
@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in all_cases() if case not in COVERING], ids=str)
def test_rest_of_the_matrix(case: Case, tmp_path: Path, reference: References[int, Path]) -> None:
    check(case, tmp_path, reference)


def check(case: Case, folder: Path, reference: References[int, Path]) -> None:
    """Run the job into its fault and to its end; then look at everything it left."""
    expected = reference[case.world]
    # Where rank 0 is the script itself and is killed, the others save after the command has returned.
    grace = 60.0 if case.launcher == "script" else 3.0
    directory, final, fired = folder / "ckpts", folder / "final.pt", folder / "fired"
    done = run_case(case, folder, {"LASTGASP_FAULT": case.faults, "LASTGASP_FAULT_LOG": str(fired)}, grace)
    assert len(read_log(fired)) >= case.fired, f"the fault did not fire\n{done.output[-4000:]}"
    if case.launcher == "script":
        assert done.returncode not in (0, None), done.output[-4000:]
        check_saved(case, directory, done, LAYOUT, f"step={SAVE_STEP}.ckpt")
        done = run_case(case, folder, {}, grace)  # nobody restarts it: the user does
    assert done.returncode == 0, done.output[-6000:]
    assert done.left == ()
    if (incident := first_incident(directory)).ending == "in_place":  # an exception, or a warm process was ready
        assert case.launcher != "script" and incident.steps_lost == 0, f"{incident}\n{done.output[-4000:]}"
    else:
        check_saved(case, directory, done, LAYOUT, f"step={SAVE_STEP}.ckpt")
    assert differences(expected, final) == []
    check_marks(case, directory / "profiling")
    assert [p.name for p in directory.rglob("*") if ".tmp" in p.name or p.name.endswith(".corrupt")] == []
