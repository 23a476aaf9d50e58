"""An adapter of MindSpeed-LLM's shape on the drop-in `mindio_ttp`: real jobs, real faults, no step lost, bit-equal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lastgasp.checkpoint import DirectoryLayout, candidates, verify
from lastgasp.events import Incident, decode_incident
from lastgasp.testing.faults import read_log
from lastgasp.testing.weights import differences
from support.launchers import Running, until
from support.matrix import References
from support.mindio.job import DropInJob, Note
from support.together import killed_together

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
    assert all(Path(file).is_dir() for one in found for file in one.files), "names of dumps before their rename"
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
    found, *more = incidents(job)
    assert not more, f"{more}\n{where}"
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


# -- fewer ranks ---------------------------------------------------------------------------------------

GATE = 7
STOPS = "is to stop at the end of its step: missing ranks can be taken in"
"""What a rank says that waits at the gate meanwhile: it has to go on to that end by itself."""


def called(job: DropInJob, rank: int) -> list[str]:
    """The handlers that a rank's processes were called with, in order."""
    return [note.what for note in job.notes() if note.rank == rank and note.what not in ("begin", "entered", "save",
                                                                                         "rename")]  # fmt: skip


@pytest.mark.parametrize(
    ("lost", "recover"),
    [
        ([3], "retry,recover,zit"),
        pytest.param([2, 3], "zit", marks=pytest.mark.full),
        pytest.param([1], "recover,zit", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_the_job_goes_on_with_fewer_ranks_and_takes_them_in_again(
    lost: list[int], recover: str, tmp_path: Path, reference: References_
) -> None:
    """MindIO's elastic handlers, in its order; each micro-batch is done by somebody, so the numbers are the same."""
    job, left = DropInJob(tmp_path), [rank for rank in range(4) if rank not in lost]
    two = len(lost) > 1  # at once: were one to die while the step is saved for the other, the job would restart
    faults = ";".join(fault("sigstop" if two else "sigkill", rank, 5, "backward") for rank in lost)
    together = killed_together(tmp_path / "fired", len(lost) if two else 0)
    with together, job.running(faults, recover, warm=False, gate=GATE) as started:
        with showing(started):
            until(lambda: started.output.count(STOPS) >= len(left), "missing ranks can be taken in")
        job.go(GATE)
        assert started.code() == 0, started.output[-8000:]
    where = started.output[-8000:]
    assert len(read_log(tmp_path / "fired")) == len(lost), where
    found = [(one.rung, one.ending, one.steps_lost, one.world_size) for one in incidents(job)]
    assert found == [("shrink", "in_place", 0, 4), ("grow", "in_place", 0, len(left))], where
    assert differences(reference[4], job.final) == [], where
    notes = job.notes()
    pids = {rank: [note.more.split()[0] for note in notes if (note.rank, note.what) == (rank, "entered")]
            for rank in range(4)}  # fmt: skip
    assert [len(set(pids[rank])) for rank in range(4)] == [1 + (rank in lost) for rank in range(4)], pids
    assert {note.more for note in notes if note.what == "leave_out"} == {f"{left} {left}"}
    assert {note.more for note in notes if note.what == "take_in"} == {f"{lost}"}
    shards = {rank % 2 for rank in lost}
    for rank in range(4):
        down = [] if rank in lost else ["stop", "clean", "leave_out", "stop", "clean"]
        repairs = ["repair"] if rank in lost or (rank % 2 in shards and source_of(rank, lost)) else []
        assert called(job, rank) == [*down, "take_in", *repairs, "rollback"], rank


@contextmanager
def showing(started: Running) -> Iterator[None]:
    """Whoever waits in vain shows what the job has said."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{error}\n{started.output[-12000:]}") from None


DOWN, UP = ("shrink", "in_place"), ("grow", "in_place")
DUMPED = ("", "nothing_to_save")
"""The step was dumped before ranks went on without another holder of some shard."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("faults", "dies", "told", "begin"),
    [
        ([fault("sigkill", 3, 5, "backward")], "1 leave_out", [DOWN, DUMPED], "5"),
        ([fault("sigkill", 3, 5, "backward")], "2 stop", [DOWN, DUMPED], "5"),
        ([fault("sigkill", 3, 5, "backward")], "3 take_in", [DOWN, UP, DUMPED], "7"),
        ([fault("sigkill", 3, 5, "backward")], "1 repair", [DOWN, UP, DUMPED], "7"),
        ([fault("sigkill", 3, 5, "backward")], "2 rollback", [DOWN, UP, DUMPED], "7"),
        ([fault("sigkill", 0, 5, "backward")], "", [("", "saved")], "5"),
        (["kind=sigkill,rank=2,step=7,phase=backward,incarnation=1", fault("sigkill", 3, 5, "backward")], "",
         [DOWN, ("", "saved")], "7"),
        (["kind=exception,rank=1,step=7,phase=forward,incarnation=1", fault("sigkill", 3, 5, "backward")], "",
         [DOWN, ("", "saved")], "7"),
        ([fault("sleep:300", 1, 5, "forward"), fault("sigkill", 3, 5, "backward")], "", [DOWN, DUMPED], "5"),
    ],
    ids=["leave_out", "stop", "take_in", "repair", "rollback", "rank 0", "killed with fewer", "raises with fewer",
         "stays in its step"],
)  # fmt: skip
def test_what_fewer_ranks_cannot_answer_is_a_restart_without_a_loss(
    faults: list[str], dies: str, told: list[tuple[str, str]], begin: str, tmp_path: Path, reference: References_
) -> None:
    """Another rank dies in a handler, or later, or stays in its step; rank 0 is lost: the job restarts with all."""
    job = DropInJob(tmp_path)
    with job.running(";".join(faults), "retry,recover,zit", dies, warm=False, gate=GATE) as started:
        if UP in told:
            until(lambda: started.output.count(STOPS) >= 3, "missing ranks can be taken in")
        job.go(GATE)
        assert started.code() == 0, started.output[-8000:]
    where = started.output[-8000:]
    assert len(read_log(tmp_path / "fired")) == len(faults), where
    assert [(one.rung, one.ending) for one in incidents(job)] == told, where
    assert [note.more for note in job.notes() if note.what == "begin" and note.attempt == 1] == [begin] * 4, where
    assert differences(reference[4], job.final) == [], where


def source_of(rank: int, lost: list[int]) -> bool:
    """Whether a rank that is left sends its half to somebody: of two holders it is the only one."""
    return (rank + 2) % 4 in lost


# -- without the decorator -----------------------------------------------------------------------------


def ends(job: DropInJob) -> list[str]:
    """Attempt, rank, first step and weight of each rank that has come to its end."""
    return sorted((job.folder / "ended").read_text().splitlines())


def test_a_script_that_says_nothing_at_its_end_has_ended_well(tmp_path: Path) -> None:
    """As with MindIO, whose own atexit hook tells it. One rank is gone long before the other one ends."""
    job = DropInJob(tmp_path, 2, script="train_undecorated.py")
    done = job.run()
    assert done.ok, done.output[-4000:]
    assert ends(job) == ["0 0 0 12", "0 1 0 12"], done.output[-4000:]
    assert incidents(job) == [], done.output[-4000:]


def test_a_restart_that_loads_from_elsewhere_is_noted(tmp_path: Path) -> None:
    """A traceback is no good end; and only the job's own code knows where it loads (Megatron's --load)."""
    job = DropInJob(tmp_path, 2, script="train_undecorated.py")
    done = job.run(JOB_RAISES="1 4", JOB_LOAD=str(tmp_path))
    assert done.ok, done.output[-4000:]
    assert ends(job) == ["1 0 0 12", "1 1 0 12"], done.output[-4000:]
    [found] = incidents(job)
    assert (found.ending, found.step_saved, found.steps_lost) == ("saved", 4, 0), done.output[-4000:]
    assert [(one.kind, one.rank) for one in found.faults][:1] == [("exit", 1)], found
    [note] = found.notes
    assert f"began with step 0 although step 4 was saved to {job.checkpoints / 'iter_0000004'}: 4 steps" in note


@pytest.mark.parametrize("how", ["raise", pytest.param("report", marks=pytest.mark.full)])
def test_wrong_values_that_one_rank_finds_are_saved_by_none(how: str, tmp_path: Path) -> None:
    """The other one waits for it in its all-reduce, and holds the same values. No attempt follows."""
    job = DropInJob(tmp_path, 2, script="train_undecorated.py")
    done = job.run(JOB_WRONG=how)
    assert done.returncode == 1 and "stopped with exit code 1: the values are wrong" in done.output, done.output[-4000:]
    [found] = incidents(job)
    assert (found.ending, found.step_saved, found.steps_lost) == ("gave_up", None, 4), done.output[-4000:]
    assert [(one.kind, one.rank) for one in found.faults][:1] == [("exception", 1)], found
    assert not list(job.checkpoints.glob("iter_*")) and not (tmp_path / "ended").exists()
