"""An adapter of MindSpeed-LLM's shape on the drop-in `mindio_ttp`: real jobs, real faults, no step lost, bit-equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from lastgasp.events import Incident, decode_incident
from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support.matrix import References
from support.mindio.job import DropInJob, Note

LAYOUT = DirectoryLayout("iter_*")
References_ = References[int, Path]
pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References_:
    """What uninterrupted jobs end with, by their number of ranks."""
    folder = tmp_path_factory.mktemp("reference")

    def make(world: int) -> Path:
        job = DropInJob(folder / str(world), world)
        done = job.run()
        assert done.ok, done.output[-4000:]
        return job.final

    return References(make)


def fault(kind: str, rank: int, step: int, phase: str, attempt: int = 0) -> str:
    """One fault of the job's LASTGASP_FAULT."""
    return f"kind={kind},rank={rank},step={step},phase={phase},attempt={attempt}"


def incidents(job: DropInJob) -> list[Incident]:
    """The records, oldest first."""
    found = [decode_incident(path.read_bytes()) for path in (job.checkpoints / "incidents").glob("*.json")]
    return sorted(found, key=lambda one: one.id)


def check_job(job: DropInJob, faults: list[str], expected: Path) -> list[Incident]:
    """Run into all faults and to the end: each costs no step, and the numbers are those of the undisturbed job."""
    done = job.run(";".join(faults))
    where = done.output[-6000:]
    assert len(read_log(job.folder / "fired")) == len(faults), where
    assert done.ok, where
    found = incidents(job)
    assert [(one.ending, one.steps_lost) for one in found] == [("saved", 0)] * len(found), where
    assert differences(expected, job.final) == [], where
    dumps = {one.step_saved for one in found}
    saved = {one.step: one for one in candidates([job.checkpoints], LAYOUT)}
    assert dumps <= saved.keys()
    for step in dumps:  # the manifests of what the save handlers have written
        assert saved[step].manifest is not None and verify(saved[step].path, LAYOUT).ok
    assert not list(job.checkpoints.glob("*.tmp")), "a dump was not renamed"
    return found


def dump(job: DropInJob, attempt: int) -> list[Note]:
    """What was called in one attempt, without its beginning."""
    return [note for note in job.notes() if note.attempt == attempt and note.what not in ("begin", "entered")]


def check_order(notes: list[Note], step: int, faulty: int) -> None:
    """Stop, clean and save on the chosen ranks, at the same time; rename on one of them, when all have saved.

    Who of the two holders of a half is chosen depends on which of them is at that step already; not the faulty one.
    """
    saves = [note for note in notes if note.what == "save"]
    said, _, text = saves[-1].more.partition(" ")
    [entry] = json.loads(text.replace("'", '"'))
    assert (int(said), entry["type"]) == (step, 0)
    ranks: list[int] = entry["ranks"]
    assert [rank % 2 for rank in ranks] == [0, 1] and faulty not in ranks, ranks
    for rank in ranks:
        assert [note.what for note in notes if note.rank == rank][:3] == ["stop", "clean", "save"]
    [renamed] = [note for note in notes if note.what == "rename"]
    assert notes[-1] == renamed and renamed.rank in ranks
    assert {note.rank for note in saves} >= set(ranks)


def test_covering(tmp_path: Path, reference: References_) -> None:
    """Halves on four ranks: rank 0 is killed, then another one raises, where a checkpoint of that step exists."""
    job = DropInJob(tmp_path)
    faults = [fault("sigkill", 0, 2, "backward"), fault("exception", 3, 4, "data", 1)]
    found = check_job(job, faults, reference[4])
    assert [one.step_saved for one in found] == [2, 4]
    assert [one.faults[0].kind for one in found] == ["killed", "exception"]
    check_order(dump(job, 0), 2, faulty=0)
    check_order(dump(job, 1), 4, faulty=3)
    assert [path.name for path in job.checkpoints.glob(".*.aside-*")] == [".iter_0000004.aside-1"]


CASES = [
    (4, [fault("sigkill", 3, 2, "before_update"), fault("sigterm", 2, 6, "data", 1)]),
    (4, [fault("sigkill", 1, 5, "update"), fault("exception", 0, 7, "backward", 1)]),
    (4, [fault("sigkill", 2, 4, "after_update"), fault("exit3", 1, 7, "data", 1)]),
    (2, [fault("sigkill", 0, 2, "backward"), fault("exception", 1, 5, "forward", 1)]),
    (2, [fault("sigterm", 0, 3, "forward"), fault("sigkill", 1, 7, "update", 1)]),
]


@pytest.mark.full
@pytest.mark.parametrize(("world", "faults"), CASES, ids=lambda value: str(value)[:60])
def test_rest_of_the_matrix(world: int, faults: list[str], tmp_path: Path, reference: References_) -> None:
    check_job(DropInJob(tmp_path, world), faults, reference[world])


# -- in place ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "recover", "replaced"),
    [
        pytest.param([fault("exception", 3, 5, "forward")], "retry", None, marks=pytest.mark.full),
        ([fault("sigkill", 0, 5, "backward")], "retry,recover", 0),
        pytest.param([fault("exception", 1, 6, "update")], "retry", None, marks=pytest.mark.full),
        pytest.param([fault("sigkill", 3, 6, "after_update")], "recover", 3, marks=pytest.mark.full),
    ],
)
def test_in_place(
    faults: list[str], recover: str, replaced: int | None, tmp_path: Path, reference: References_
) -> None:
    """No survivor ends; MindIO's handlers are called in its order, and the numbers are those of the undisturbed job."""
    job = DropInJob(tmp_path)
    with job.running(";".join(faults), recover) as started:
        assert started.code() == 0, started.output[-6000:]
    where = started.output[-6000:]
    assert len(read_log(tmp_path / "fired")) == 1, where
    [found] = incidents(job)
    rung = "retry" if replaced is None else "replace"
    assert (found.ending, found.rung, found.steps_lost) == ("in_place", rung, 0), where
    assert differences(reference[4], job.final) == [], where
    notes = job.notes()
    pids = {rank: [note.more.split()[0] for note in notes if (note.rank, note.what) == (rank, "entered")]
            for rank in range(4)}  # fmt: skip
    assert all(len(set(of)) == 1 + (rank == replaced) for rank, of in pids.items()), pids
    takes = replaced if replaced is not None else 1 if "update" in faults[0] else None
    for rank in range(4):
        called = [note.what for note in notes if note.rank == rank and note.what not in ("begin", "entered")]
        dumped = ["save"] * (called.count("save")) + ["rename"] * called.count("rename")
        expected = [] if rank == replaced else ["stop", "clean", *dumped]
        expected += ["rebuild"] if replaced is not None else []
        expected += ["repair"] if takes is not None and rank % 2 == takes % 2 else []
        assert called == [*expected, "rollback"], (rank, called)


@pytest.mark.full
@pytest.mark.parametrize(
    ("faults", "dies"),
    [
        ([fault("sigkill", 0, 5, "backward")], "1 rebuild"),
        pytest.param([fault("sigkill", 0, 5, "backward")], "2 repair", marks=pytest.mark.full),
        pytest.param([fault("sigkill", 0, 5, "backward")], "0 rollback", marks=pytest.mark.full),
        pytest.param([fault("exception", 3, 5, "forward")], "2 clean", marks=pytest.mark.full),
        pytest.param([fault("exception", 3, 5, "forward")], "3 stop", marks=pytest.mark.full),
    ],
)
def test_a_second_fault_during_the_recovery(
    faults: list[str], dies: str, tmp_path: Path, reference: References_
) -> None:
    """Whoever is killed in whatever handler: the step is dumped, or was, and the job restarts with it."""
    job = DropInJob(tmp_path)
    with job.running(";".join(faults), "retry,recover", dies) as started:
        assert started.code() == 0, started.output[-6000:]
    where = started.output[-8000:]
    found = incidents(job)
    assert [one.ending for one in found][:1] == ["in_place"], where
    assert all(one.steps_lost == 0 for one in found), where
    assert differences(reference[4], job.final) == [], where
    assert [note.more for note in job.notes() if note.what == "begin" and note.attempt == 1] == ["5"] * 4, where
