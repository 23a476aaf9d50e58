"""`lastgasp demo` for real: what `make demo` shows holds, in under two minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lastgasp.cli import main


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(950)
def test_every_claim_of_the_demo_holds(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["demo", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert document["ok"]
    assert document["incident"]["step_saved"] == 33
    assert (tmp_path / "out" / "timeline.png").stat().st_size > 10_000
