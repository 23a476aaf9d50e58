"""What a step of an `ElasticLoader` costs, with gradients summed in any order and in one order, beside DDP.

The training of bench_in_place (AdamW over 1.3 M parameters), gloo, on one host; all of them take turns within one
job, block by block. A ratio is taken between neighbouring blocks. DDP exchanges gradients during the backward pass, in
buckets of 2 MB; an `ElasticLoader` does when it is over, and with `canonical=True` by `all_to_all` and `all_gather` in
place of one `all_reduce`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Measure, Options, paired

JOB = Path(__file__).with_name("elastic_job.py")
SHAPES = ((2, 2), (4, 4), (4, 2))
"""Ranks of the complete job, and how many are there."""
WIDTH, BATCH, ROUNDS, BLOCK, LIMIT = 1024, 64, 30, 5, 600.0


def measure(options: Options) -> list[Measure]:
    """Milliseconds of a step, and ratios."""
    return [one for ranks, here in SHAPES for one in report(ranks, here, job(ranks, here, options.quick))]


def report(ranks: int, here: int, found: dict[str, list[float]]) -> list[Measure]:
    """The measures of one shape."""
    where = f"{ranks} ranks" if here == ranks else f"{here} of {ranks} ranks"
    named = {"ddp": "DDP", "any": "ElasticLoader", "canonical": "ElasticLoader, canonical"}
    steps = [(f"{where}: step, {named[kind]}", times) for kind, times in found.items()]
    measures = [Measure(name=name, unit="ms", samples=times) for name, times in steps]
    base = {"any": "ddp", "canonical": "any"}
    return measures + [
        Measure(name=f"{where}: {named[kind]} / {named[other]}", unit="ratio",
                samples=paired("", found, kind, other, 0.0).samples)
        for kind, other in base.items() if other in found
    ]  # fmt: skip


def job(ranks: int, here: int, quick: bool) -> dict[str, list[float]]:
    """One job to its end.

    Raises:
        RuntimeError: it failed.
    """
    width, rounds, block = (32, 2, 2) if quick else (WIDTH, ROUNDS, BLOCK)
    sizes = {"ranks": ranks, "width": width, "batch": BATCH, "rounds": rounds, "block": block}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(here), str(JOB),
        *(word for name, value in sizes.items() for word in (f"--{name}", str(value))),
    ]  # fmt: skip
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-4000:])
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found
