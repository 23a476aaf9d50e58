"""Real jobs of a hand-written DDP loop, real faults: no step is lost and the numbers stay the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lastgasp.checkpoint import candidates, verify
from lastgasp.events import Incident, decode_incident
from lastgasp.pytorch.loop.files import LAYOUT
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import Finished, run_job
from lastgasp.testing.weights import differences
from support.loop_matrix import COVERING, FRAMEWORK_CASES, SHAPES, LoopCase, all_cases
from support.matrix import SAVE_STEP, check_marks

LIMIT = 400.0
"""Seconds for one job with its restarts, on a loaded machine."""

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> _Reference:
    """Final weights of uninterrupted jobs, by world size and shape; made when first asked for."""
    return _Reference(tmp_path_factory.mktemp("reference"))


class _Reference(dict[tuple[int, str], Path]):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, key: tuple[int, str]) -> Path:
        name = "-".join(map(str, key))
        final = self._folder / f"{name}.pt"
        case = LoopCase("none", "none", "first", "run", key[0], key[1])
        done = run_job(case.command(self._folder / f"dir{name}", final), self._folder / "log", timeout=LIMIT)
        assert done.ok, done.output[-4000:]
        self[key] = final
        return final


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_loop_covering(case: LoopCase, tmp_path: Path, reference: _Reference) -> None:
    check(case, tmp_path, reference)


@pytest.mark.full
@pytest.mark.parametrize("case", [c for c in (*all_cases(), *SHAPES, *FRAMEWORK_CASES) if c not in COVERING], ids=str)
def test_loop_rest_of_the_matrix(case: LoopCase, tmp_path: Path, reference: _Reference) -> None:
    check(case, tmp_path, reference)


@pytest.mark.full
def test_ranks_that_differ_are_not_saved_from_one_another(tmp_path: Path) -> None:
    """`replicated=True` without a common seed: without the killed rank its model is gone, and nobody pretends."""
    case = LoopCase("sigkill", "backward", "last", "run", shape="unlike")
    done = _run(case, tmp_path, {"LASTGASP_FAULT": case.faults, "LASTGASP_FAULT_LOG": str(tmp_path / "fired")})
    assert read_log(tmp_path / "fired"), done.output[-4000:]
    assert done.returncode == 0, done.output[-4000:]
    incident = _first_incident(tmp_path / "ckpts")
    assert (incident.ending, incident.steps_lost) == ("gave_up", 1), incident
    assert "shard 1 of 2 has no live holder (rank 1: gone" in incident.reason
    assert [note for note in incident.notes if "ranks 0 and 1 should hold the same, but their model" in note]
    assert "this is what rank 0 held" in done.output  # the periodic checkpoint that both went on from
    assert [c.step for c in candidates([tmp_path / "ckpts"], LAYOUT)] == [12, 8, 4]


def check(case: LoopCase, folder: Path, reference: _Reference) -> None:
    """Run the job into its fault and to its end; then look at everything it left."""
    expected = reference[case.world, case.shape]
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
    assert differences(expected, final) == [], done.output[-4000:]
    if case.shape == "plain":
        check_marks(case, directory / "profiling")
    assert [p.name for p in directory.rglob("*") if ".tmp" in p.name or p.name.endswith(".corrupt")] == []


def _run(case: LoopCase, folder: Path, environment: dict[str, str]) -> Finished:
    hang = {"LASTGASP_HANG_TIMEOUT": "8"} if case.kind == "sigstop" else {}
    command = case.command(folder / "ckpts", folder / "final.pt")
    log = folder / f"log-{len(list(folder.glob('log-*')))}"
    return run_job(command, log, timeout=LIMIT, environ=os.environ | environment | hang, grace=10.0)


def _check_saved(case: LoopCase, directory: Path, done: Finished) -> None:
    incident = _first_incident(directory)
    where = f"{incident}\n{done.output[-4000:]}"
    found = {c.path.name: c for c in candidates([directory], LAYOUT)}
    assert all(verify(c.path, LAYOUT).ok for c in found.values()), where
    older = found[f"step={SAVE_STEP:08d}.pt"].manifest if case.moment != "periodic_save" else None
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
    assert [c for c in found.values() if c.step == step], where


def _first_incident(directory: Path) -> Incident:
    records = [decode_incident(path.read_bytes()) for path in (directory / "incidents").glob("*.json")]
    assert records, "no incident was recorded"
    return min(records, key=lambda incident: incident.id)
