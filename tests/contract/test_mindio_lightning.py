"""A real Lightning job whose recoveries MindIO leads (its stand-in), through the unchanged adapter and launcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lastgasp.checkpoint import SingleFile, candidates, verify
from lastgasp.events import decode_incident
from lastgasp.testing.faults import read_log
from lastgasp.testing.jobs import run_job
from lastgasp.testing.weights import differences
from support.matrix import STEP, Case
from support.recovery_backends import TORCH, used

LIMIT = 400.0
pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]
FULL = pytest.mark.full
CASES = [
    Case("sigkill", "forward", "first", "run"),
    pytest.param(Case("exception", "backward", "last", "run"), marks=FULL),
    pytest.param(Case("sigkill", "update", "last", "run"), marks=FULL),
    pytest.param(Case("sigterm-all", "forward", "last", "run"), marks=FULL),
    pytest.param(Case("exit3", "data", "first", "run"), marks=FULL),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Final weights of an uninterrupted job."""
    folder = tmp_path_factory.mktemp("mindio-reference")
    case = Case("none", "none", "first", "run")
    done = run_job(case.command(folder / "ckpts", folder / "final.pt"), folder / "log", timeout=LIMIT)
    assert done.ok, done.output[-4000:]
    return folder / "final.pt"


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_step_is_lost(case: Case, tmp_path: Path, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fired, directory = tmp_path / "fired", tmp_path / "ckpts"
    with used(TORCH, tmp_path, monkeypatch) as trace:
        environ = os.environ | {"LASTGASP_FAULT": case.faults, "LASTGASP_FAULT_LOG": str(fired)}
        command = case.command(directory, tmp_path / "final.pt")
        done = run_job(command, tmp_path / "log", timeout=LIMIT, environ=environ, grace=15.0)
        assert len(read_log(fired)) >= case.fired, done.output[-4000:]
        assert done.returncode == 0, done.output[-6000:]
        assert trace.events("init_processor"), "MindIO was not used"
        if case.kind != "exit3":
            assert trace.events("rename"), "MindIO did not lead"
    [record] = (directory / "incidents").glob("*.json")
    incident = decode_incident(record.read_bytes())
    assert (incident.ending, incident.steps_lost, incident.backend) == ("saved", 0, "mindio"), incident
    if case.exact_step is not None:
        assert incident.step_saved == case.exact_step
    assert incident.step_saved is not None and incident.step_saved >= STEP
    layout = SingleFile(".ckpt")
    assert all(verify(candidate.path, layout).ok for candidate in candidates([directory], layout))
    assert differences(reference, tmp_path / "final.pt") == []
