"""lastgasp.pytorch.sharded on real FSDP2 and FSDP1 models of four ranks: all checks in one process group."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lastgasp.testing.jobs import run_job
from support.launchers import environment

WORKER = Path(__file__).parents[1] / "support/sharded_checks.py"


@pytest.mark.fault
@pytest.mark.slow
def test_a_sharded_state_is_described_written_and_loaded_bit_by_bit(tmp_path: Path) -> None:
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = run_job([*ranks, str(WORKER), str(tmp_path)], tmp_path / "log", timeout=500, environ=environment())
    assert done.ok, done.output[-3000:]
    lines = [line for line in done.output.splitlines() if line.endswith(": ok")]
    assert len(lines) == 15, done.output[-3000:]
