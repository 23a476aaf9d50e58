"""The benchmarks run and say what they should; their times are never asserted."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from lastgasp.testing.jobs import Finished, run_job

ROOT = Path(__file__).parents[2]
TARGETS: dict[str, set[float]] = {
    "detect": {50.0, 20.0},
    "callback": {30.0, 40.0},
    "checkpoint": {1.0, 1.3},
    "restart": {0.5, 0.0},
    "warm": {1.5},
    "in_place": {0.5, 0.15, 0.0},
    "in_place_lightning": {1.0, 1.5, 0.0},
    "in_place_megatron": {2.0, 0.0},
    "marks": {0.5, 0.05},
    "flush": {1.0},
    "marks_step": {0.5},
    "slow": {0.0},
    "report": {30.0, 400.0},
    "megatron": {0.5, 1.0, 1.3},
    "mindspore": {1.0, 1.3},
    "mindio_drop_in": {50.0, 2.0},
    "scale": {200.0, 5.0},
    "sizes": set(),
    "elastic": set(),
    "arenas": {1.3, 1.0, 0.5, 0.02, 50.0},
}
"""The targets that each benchmark judges."""
LONG = (
    "arenas", "callback", "checkpoint", "detect", "elastic", "flush", "in_place", "in_place_lightning",
    "in_place_megatron", "marks_step", "megatron", "mindio_drop_in", "mindspore", "restart", "slow", "warm",
)  # fmt: skip
"""They start complete jobs even when they are quick."""
CASES = [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in sorted(TARGETS)]


def bench(*arguments: str, log: Path) -> Finished:
    """`python -m benchmarks` in the checkout."""
    return run_job(
        ["bash", "-c", f'cd "{ROOT}" && exec "{sys.executable}" -m benchmarks "$@"', "bench", *arguments],
        log,
        timeout=540,
        grace=60.0,
    )


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("name", CASES)
def test_a_quick_run(name: str, tmp_path: Path) -> None:
    done = bench(name, "--quick", "--json", str(tmp_path), "--dir", str(tmp_path), log=tmp_path / "log")
    assert done.ok, done.output[-4000:]
    document = json.loads((tmp_path / f"{name}.json").read_text())
    assert document["version"] == 1
    assert document["quick"] is True
    assert document["command"].startswith(f"python -m benchmarks {name}")
    assert {"date", "cpus", "load", "versions"} <= set(document["machine"])
    check_measures(document["measures"], done.output)
    assert {m["target"] for m in document["measures"] if m["target"] is not None} == TARGETS[name]
    assert list(tmp_path.glob("lastgasp-bench-*")) == [], "its scratch directory is left"


def check_measures(measures: list[dict[str, Any]], output: str) -> None:
    """Each has samples that are numbers, a median among them, a verdict where there is a target, and a row."""
    assert measures
    assert len({m["name"] for m in measures}) == len(measures)
    for m in measures:
        assert len(m["samples"]) == m["n"] > 0
        assert all(math.isfinite(sample) for sample in m["samples"])
        assert m["min"] <= m["median"] <= m["max"]
        assert m["met"] == (None if m["target"] is None else m["median"] <= m["target"])
        assert m["name"].split()[0] in output
    durations = [m for m in measures if m["unit"] in ("s", "ms") and "minus" not in m["name"]]
    assert all(m["min"] > 0 for m in durations)


def test_an_unknown_name_and_quick_numbers_for_the_readme_are_refused(tmp_path: Path) -> None:
    assert bench("nothing", log=tmp_path / "log").returncode == 2
    refused = bench("--quick", "--publish", log=tmp_path / "log")
    assert refused.returncode == 2
    assert "mean nothing" in refused.output
