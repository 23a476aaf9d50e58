"""Marks of real MindSpore and MindFormers jobs without a line of the user's: the report reads every step of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from lastgasp.cli import main
from lastgasp.steps.report.job import JobReader
from lastgasp.steps.report.sources import locate
from support.mindspore import place
from support.mindspore.job import Job, LlamaJob

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]
STEPS = 16
"""Two epochs of eight."""


def check(marked: Path, ranks: int) -> None:
    """Each rank has all steps, with their times and the fetches of their data."""
    done = CliRunner().invoke(main, ["report", str(marked), "--json"])
    assert done.exit_code == 0, done.output
    assert {one["rank"] for one in json.loads(done.stdout)["ranks"]} == set(range(ranks))
    reader = JobReader(locate(marked / "profiling"))
    reader.read()
    reader.end()
    job = reader.job()
    assert set(job.ranks) == set(range(ranks))
    for data in job.ranks.values():
        assert list(data.table.numbers) == list(range(1, STEPS + 1))
        assert (data.unreadable, data.dropped) == (0, 0)
        assert "mindspore" in data.information.framework or "mindformers" in data.information.framework
        assert all(seconds > 0 for seconds in data.table.times("time"))
        assert any(seconds > 0 for seconds in data.table.times("data"))


@pytest.mark.full
def test_plain_mindspore(tmp_path: Path) -> None:
    ckpts = tmp_path / "ckpts"
    job = Job(folder=tmp_path, ranks=1, arguments=["--lastgasp", str(ckpts)])
    done = job.run(timeout=400)
    assert done.returncode == 0, done.output[-4000:]
    check(ckpts, 1)


@pytest.mark.full
@pytest.mark.fault
def test_mindformers_with_two_ranks(tmp_path: Path) -> None:
    job = LlamaJob(folder=tmp_path, ranks=2, launcher="run", changes={"lastgasp": {"enable": True}})
    done = job.run(timeout=400)
    assert done.returncode == 0, done.output[-4000:]
    check(tmp_path / "output", 2)
