"""Jobs of the shapes that users' scripts have, killed and resumed bit for bit; what they logged is that of one run."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from lastgasp.events import decode_incident
from lastgasp.testing.jobs import run_job
from lastgasp.testing.weights import differences
from support import lean, logged

SCRIPT = Path(__file__).parents[1] / "support/lightning_shapes.py"
LIMIT = 400.0

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]

COVERING = [("gan", "0,0,6")]
"""Shape; rank, fit and step of the kill. In the GAN the killed rank's statistics count, in the folds the second fit."""
REST = [("gan", "1,0,6"), ("folds", "1,1,5"), ("folds", "0,0,5"), ("sweep", "1,1,8"),
        ("sweep", "0,0,8"), ("tuner", "1,0,5"), ("workers", "0,0,5"),
        ("bf16", "0,0,5"), ("fp16", "0,0,5"), ("fp16", "1,0,11"), ("plain", "1,0,5")]  # fmt: skip


def run(folder: Path, shape: str, *more: str) -> Path:
    """One job under `lastgasp run`; returns where its final weights stand."""
    folder.mkdir()
    python = sys.executable if importlib.util.find_spec("tensorboard") else lean.python()
    command = [python, "-m", "lastgasp", "run", "--nproc-per-node", "2", str(SCRIPT), "--shape", shape]
    command += ["--dir", str(folder / "ckpts"), "--final", str(folder / "final.pt"), *more]
    done = run_job(command, folder / "log", timeout=LIMIT, environ=os.environ)
    assert done.ok, done.output[-6000:]
    return folder / "final.pt"


def check(tmp_path: Path, shape: str, kill: str) -> None:
    """The same weights at the end, in each fit; and the step of the fault was saved."""
    straight = run(tmp_path / "straight", shape)
    killed = run(tmp_path / "killed", shape, "--kill", kill)
    records = [decode_incident(path.read_bytes()) for path in (tmp_path / "killed/ckpts").rglob("incidents/*.json")]
    assert [record.ending for record in records] == ["saved"], "the fault fired once, and its step is safe"
    assert records[0].steps_lost == 0
    step = int(kill.split(",")[2]) + (2 if shape == "gan" else 1)
    assert records[0].step_saved == step
    assert differences(straight, killed) == []
    if shape != "sweep":
        logs_alike(straight.parent, killed.parent, 2 if shape == "folds" else 1, again=kill.split(",")[1] == "1")
    assert [note for note in records[0].notes if "DataLoader workers" in note] != [] or shape != "workers"


def logs_alike(straight: Path, killed: Path, fits: int, again: bool) -> None:
    """`again`: the first fold, which saves no checkpoint, was trained once more after a fault in the second one."""
    for version in range(fits):
        for read, where in ((logged.rows, "logs/table"), (logged.scalars, "logs/board")):
            assert read(killed / where, version) == read(straight / where, version)
    versions = logged.versions(straight / "logs/table") + (["version_2"] if again else [])
    assert logged.versions(killed / "logs/table") == versions


@pytest.mark.parametrize(("shape", "kill"), COVERING)
def test_covering(tmp_path: Path, shape: str, kill: str) -> None:
    check(tmp_path, shape, kill)


@pytest.mark.full
@pytest.mark.parametrize(("shape", "kill"), REST)
def test_rest(tmp_path: Path, shape: str, kill: str) -> None:
    check(tmp_path, shape, kill)
