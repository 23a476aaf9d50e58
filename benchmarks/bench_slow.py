"""Whether the report names the slow rank and the cause: four real DDP ranks, one slowed in turn, and healthy jobs.

Hit: the victim and no other rank is named, with the right cause. Wrong: any other rank, or another cause, is named as
well or instead. Missed: nobody is named. The rest of each job's shape stands in tests/support/slow_job.py. Half of the
jobs have communication marks on, those that are late for collectives all of them: without, nobody could tell why. Half
of the models have buffers, as batch norm has.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Measure, Options
from lastgasp.steps.report.job import JobReader
from lastgasp.steps.report.judge import judge
from lastgasp.steps.report.sample import samples
from lastgasp.steps.report.saving import saving_of
from lastgasp.steps.report.sources import locate
from lastgasp.steps.report.verdict import Verdict

ROOT = Path(__file__).parent.parent
JOB = ROOT / "tests/support/slow_job.py"
CAUSES = ("data", "compute", "communication", "checkpoint")
SEEDS, RANKS = 20, 4
FITS_OF_A_JOB = 20
LIMIT = 600.0
"""Seconds for a job of so many trainings."""


@dataclass(frozen=True)
class Case:
    """One training. Checkpoints are written by rank 0 alone."""

    cause: str
    seed: int

    @property
    def victim(self) -> int:
        """The slow rank; of a healthy job none, whatever this says."""
        return self.seed % RANKS if self.cause in CAUSES[:3] else 0

    @property
    def argument(self) -> str:
        """For the job's command line."""
        return f"{self.cause}:{self.victim}:{self.seed}" + ":comm" * (self.seed % 2)

    @property
    def task(self) -> str:
        """Name of its directory."""
        return f"{self.cause}-{self.victim}-{self.seed}"

    def rate(self, verdict: Verdict) -> str:
        """`hit`, `wrong` or `missed`; of a healthy job `quiet` or `wrong`."""
        named = [(slow.rank, slow.cause) for slow in verdict.slow]
        if self.cause == "healthy":
            return "wrong" if named else "quiet"
        if not named:
            return "missed"
        return "hit" if named == [(self.victim, self.cause)] else "wrong"


def measure(options: Options) -> list[Measure]:
    """Rates of hits, wrong names and false alarms, in percent of the jobs."""
    seeds = range(1 if options.quick else SEEDS)
    cases = [Case(cause, seed) for seed in seeds for cause in (*CAUSES, "healthy")]
    train(cases, options.folder)
    rates: dict[str, list[str]] = {}
    for case in cases:
        verdict = verdict_on(options.folder / case.task)
        rates.setdefault(case.cause, []).append(case.rate(verdict))
        if rates[case.cause][-1] in ("wrong", "missed"):
            print(f"{case.argument}: {[(s.rank, s.cause, s.confidence, s.evidence) for s in verdict.slow]}")
    found = [_share(f"slow by {cause}: hit", rates[cause], "hit") for cause in CAUSES]
    for what, which in (("missed", "missed"), ("a wrong rank or cause", "wrong")):
        found += [_share(f"slow by {cause}: {what}", rates[cause], which, target=0.0) for cause in CAUSES]
    return [*found, _share("healthy job: somebody is named", rates["healthy"], "wrong", target=0.0)]


def _share(name: str, rates: Sequence[str], which: str, target: float | None = None) -> Measure:
    count = rates.count(which)
    return Measure(
        name=f"{name}, {count} of {len(rates)}", unit="%", samples=[100.0 * count / len(rates)], target=target
    )


def train(cases: Sequence[Case], folder: Path) -> None:
    """Run all trainings, many in one set of processes.

    Raises:
        CalledProcessError: a rank failed; what it printed has been shown.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for first in range(0, len(cases), FITS_OF_A_JOB):
        fits = [case.argument for case in cases[first : first + FITS_OF_A_JOB]]
        command = [sys.executable, "-W", "ignore", str(JOB), "--out", str(folder), *fits]
        subprocess.run(command, env=environment, check=True, timeout=LIMIT, stdout=subprocess.DEVNULL)


def verdict_on(directory: Path) -> Verdict:
    """As `lastgasp report` has it."""
    reader = JobReader(locate(directory))
    reader.read()
    reader.end()
    job = reader.job()
    return judge(samples(job), [saving_of(rank) for rank in job.ranks.values()])
