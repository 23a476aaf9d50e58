"""A DDP model that exists already gets the bucket layout that was saved: else sums over three ranks differ."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lastgasp.testing.jobs import run_job

WORKER = Path(__file__).parents[1] / "support/buckets_worker.py"


@pytest.mark.fault
@pytest.mark.slow
def test_buckets_decide_the_last_bit_and_are_laid_out_as_before(tmp_path: Path) -> None:
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = run_job([*ranks, str(WORKER)], tmp_path / "log", timeout=250)
    assert done.ok, done.output[-3000:]
    assert "rebuilt: True" in done.output
    assert "again: True" in done.output, "a second fault, right after the first step"
    assert "fresh: False" in done.output, "the layout does not matter any more: is it still worth being kept?"
