"""`lastgasp demo` for real: what `make demo` shows holds, in under two minutes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lastgasp.testing.jobs import run_job


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(950)
def test_every_claim_of_the_demo_holds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lastgasp", "demo", "--out", str(tmp_path / "out")]
    done = run_job(command, tmp_path / "log", timeout=900)
    assert done.ok, done.output
    document = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert document["ok"]
    assert document["incident"]["step_saved"] == 33
    assert (tmp_path / "out" / "timeline.png").stat().st_size > 10_000
