"""Real Lightning jobs, real faults, every launcher: no step is lost and the numbers stay the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lastgasp.checkpoint import SingleFile, candidates, verify
from lastgasp.events import Incident, decode_incident
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import Finished, run_job
from lastgasp.testing.weights import differences
from support.matrix import SAVE_STEP, Case, all_cases, check_marks, covering_cases

LAYOUT = SingleFile(".ckpt")
LIMIT = 400.0
"""Seconds for one job with its restarts, on a loaded machine."""

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]
COVERING = covering_cases()


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Final weights of uninterrupted jobs, by world size; made when first asked for."""
    return _Reference(tmp_path_factory.mktemp("reference"))


class _Reference(dict[int, Path]):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, world: int) -> Path:
        final = self._folder / f"{world}.pt"
        case = Case("none", "none", "first", "run", world)
        done = run_job(case.command(self._folder / f"dir{world}", final), self._folder / "log", timeout=LIMIT)
        assert done.ok, done.output[-4000:]
        self[world] = final
        return final


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering(case: Case, tmp_path: Path, reference: dict[int, Path]) -> None:
    check(case, tmp_path, reference)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in all_cases() if case not in COVERING], ids=str)
def test_rest_of_the_matrix(case: Case, tmp_path: Path, reference: dict[int, Path]) -> None:
    check(case, tmp_path, reference)


def check(case: Case, folder: Path, reference: dict[int, Path]) -> None:
    """Run the job into its fault and to its end; then look at everything it left."""
    expected = reference[case.world]
    directory, final, fired = folder / "ckpts", folder / "final.pt", folder / "fired"
    done = _run(case, folder, {"LASTGASP_FAULT": case.faults, "LASTGASP_FAULT_LOG": str(fired)})
    assert len(read_log(fired)) >= case.fired, f"the fault did not fire\n{done.output[-4000:]}"
    if case.launcher == "script":
        assert done.returncode not in (0, None), done.output[-4000:]
        _check_saved(case, directory, done)
        done = _run(case, folder, {})  # nobody restarts it: the user does
    assert done.returncode == 0, done.output[-6000:]
    assert done.left == ()
    _check_saved(case, directory, done)
    assert differences(expected, final) == []
    check_marks(case, directory / "profiling")
    assert [p.name for p in directory.rglob("*") if ".tmp" in p.name or p.name.endswith(".corrupt")] == []


def _run(case: Case, folder: Path, environment: dict[str, str]) -> Finished:
    hang = {"LASTGASP_HANG_TIMEOUT": "8"} if case.kind == "sigstop" else {}
    command = case.command(folder / "ckpts", folder / "final.pt")
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    # Where rank 0 is the script itself and is killed, the others save after the command has returned.
    grace = 60.0 if case.launcher == "script" else 3.0
    return run_job(command, log, timeout=LIMIT, environ=os.environ | environment | hang, grace=grace)


def _check_saved(case: Case, directory: Path, done: Finished) -> None:
    incident = _first_incident(directory)
    where = f"{incident}\n{done.output[-4000:]}"
    found = {c.path.name: c for c in candidates([directory], LAYOUT)}
    assert all(verify(c.path, LAYOUT).ok for c in found.values()), where
    older = found[f"step={SAVE_STEP}.ckpt"].manifest if case.moment != "periodic_save" else None
    assert older is None or older.attempt == 0, "the older checkpoint was written anew"
    if case.should_give_up:  # the job continues from the periodic checkpoint instead, and the record says why
        assert incident.ending == "gave_up", where
        assert "no live holder" in incident.reason
        return
    assert incident.ending in ("saved", "nothing_to_save"), where
    assert incident.steps_lost == 0, where
    step = incident.step_saved if incident.step_saved is not None else SAVE_STEP
    if case.exact_step is not None:
        assert step == case.exact_step, where
    saved = [c for c in found.values() if c.step == step]
    assert saved, where


def _first_incident(directory: Path) -> Incident:
    records = [decode_incident(path.read_bytes()) for path in (directory / "incidents").glob("*.json")]
    assert records, "no incident was recorded"
    return min(records, key=lambda incident: incident.id)
