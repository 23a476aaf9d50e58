"""A real job of four DDP ranks, one of them slowed: the report names that rank and that cause, and nobody in a
healthy job. Rates over 20 seeds: `python -m benchmarks slow`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.steps.report.job import Job, JobReader
from lastgasp.steps.report.judge import judge
from lastgasp.steps.report.sample import samples
from lastgasp.steps.report.saving import saving_of
from lastgasp.steps.report.sources import locate
from lastgasp.testing.jobs import run_job
from support import lean
from support.launchers import SUPPORT, environment
from support.slow_job import STEPS, WORLD

CASES = {
    "data:1:1": [(1, "data")],
    "compute:2:1": [(2, "compute")],
    "communication:3:1": [(3, "communication")],
    "checkpoint:0:1": [(0, "checkpoint")],
    "healthy:0:1": [],
    "healthy:0:2:comm": [],
}

LIMIT = 800.0
"""Seconds; it takes 30 where nothing else runs."""

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trainings, in one set of four processes."""
    out = tmp_path_factory.mktemp("profiling")
    command = [lean.python(), str(SUPPORT / "slow_job.py"), "--out", str(out), *CASES]
    job = run_job(command, out / "log", timeout=LIMIT, environ=environment())
    assert job.ok, job.output[-4000:]
    return out


def read(trained: Path, case: str) -> Job:
    """The rows of one training."""
    cause, victim, seed = case.split(":")[:3]
    reader = JobReader(locate(trained / f"{cause}-{victim}-{seed}"))
    reader.read()
    reader.end()
    return reader.job()


@pytest.mark.parametrize("case", CASES)
def test_the_slow_rank_and_its_cause(case: str, trained: Path) -> None:
    job = read(trained, case)
    verdict = judge(samples(job), [saving_of(rank) for rank in job.ranks.values()])
    assert [(slow.rank, slow.cause) for slow in verdict.slow] == CASES[case], verdict


def test_all_steps_of_all_ranks_are_there(trained: Path) -> None:
    for case in CASES:
        ranks = read(trained, case).ranks
        assert sorted(ranks) == list(range(WORLD))
        for data in ranks.values():
            assert list(data.table.numbers) == list(range(1, STEPS + 1))
            assert (data.unreadable, data.dropped) == (0, 0)
