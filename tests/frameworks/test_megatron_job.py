"""The real Megatron trains on this machine, without lastgasp, and resumes bit for bit: the ground of other tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.megatron import place
from support.megatron.job import PIPELINE, TENSOR, TWO_INSTANCES, GptJob

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


@pytest.mark.full
@pytest.mark.parametrize("flags", ["", "--bf16", f"--bf16 {TWO_INSTANCES}", f"--bf16 {TENSOR}", f"--bf16 {PIPELINE}"])
def test_a_job_resumes_bit_for_bit(flags: str, tmp_path: Path) -> None:
    whole = GptJob(folder=tmp_path / "whole", flags=flags, last=14)
    cut = GptJob(folder=tmp_path / "cut", flags=flags, last=10)
    rest = GptJob(folder=tmp_path / "cut", flags=flags, last=14)
    for job in (whole, cut, rest):
        done = job.run()
        assert done.ok, done.output[-4000:]
    assert (rest.checkpoints / "latest_checkpointed_iteration.txt").read_text() == "14"
    losses = whole.losses()
    assert {iteration for _, iteration in losses} == set(range(14))
    assert rest.losses() == losses
