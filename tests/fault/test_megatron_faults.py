"""Real Megatron jobs, real faults: no step is lost, and the losses are those of a job that had none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from lastgasp.events import Incident, decode_incident
from lastgasp.testing.faults import read_log
from support.megatron import place
from support.megatron.job import GptJob
from support.megatron.matrix import COVERING, SAVE_STEP, Case, all_cases, reference

LAYOUT = DirectoryLayout("iter_*")
LIMIT = 400.0
"""Seconds for one job with its restart, on a loaded machine."""

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GptJob]:
    """Uninterrupted jobs by layout; made when first asked for."""
    return _References(tmp_path_factory.mktemp("reference"))


class _References(dict[str, GptJob]):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, layout: str) -> GptJob:
        job = reference(layout, self._folder / layout)
        done = job.run(timeout=LIMIT)
        assert done.ok, done.output[-4000:]
        self[layout] = job
        return job


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_covering(case: Case, tmp_path: Path, references: dict[str, GptJob]) -> None:
    check(case, tmp_path, references)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in all_cases() if case not in COVERING], ids=str)
def test_rest_of_the_matrix(case: Case, tmp_path: Path, references: dict[str, GptJob]) -> None:
    check(case, tmp_path, references)


def check(case: Case, folder: Path, references: dict[str, GptJob]) -> None:
    """Run the job into its fault and to its end; then look at everything it left."""
    expected = references[case.layout].losses()
    job, fired = case.job(folder), folder / "fired"
    done = job.run(case.environment | {"LASTGASP_FAULT_LOG": str(fired)}, timeout=LIMIT)
    assert len(read_log(fired)) == 1, f"the fault did not fire\n{done.output[-4000:]}"
    assert done.returncode == 0, done.output[-6000:]
    assert done.left == ()
    _check_saved(case, job.checkpoints, done.output)
    losses = job.losses()
    assert losses.keys() == expected.keys()
    wrong = {
        key: times for key, times in losses.items() if any(t != expected[key][0] for t in _whole(times, expected[key]))
    }
    assert wrong == {}, "losses differ from the uninterrupted run's"


def _whole(times: list[list[str]], expected: list[list[str]]) -> list[list[str]]:
    """All but an iteration that the fault cut short; that one must be trained again."""
    cut = [t for t in times[:-1] if len(t) < len(expected[0]) and t == expected[0][: len(t)]]
    return [t for t in times if t not in cut]


def _check_saved(case: Case, directory: Path, output: str) -> None:
    records = [decode_incident(path.read_bytes()) for path in (directory / "incidents").glob("*.json")]
    assert records, "no incident was recorded"
    incident: Incident = min(records, key=lambda one: one.id)
    where = f"{incident}\n{output[-4000:]}"
    assert len(records) == 1, where
    assert incident.ending in ("saved", "nothing_to_save"), where
    assert incident.steps_lost == 0, where
    found = candidates([directory], LAYOUT)
    assert all(verify(c.path, LAYOUT).ok for c in found), where
    step = incident.step_saved if incident.step_saved is not None else SAVE_STEP
    assert case.exact_step in (None, step), where
    assert step in [c.step for c in found], where
    assert [p.name for p in directory.iterdir() if ".tmp" in p.name or p.name.startswith(".gasp-")] == []
