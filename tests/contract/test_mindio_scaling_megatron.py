"""MindIO's elastic training of real Megatron jobs: scale in and scale out, by its orders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from support.again_faults import VARIABLE
from support.launchers import finish, incidents
from support.megatron import place
from support.megatron.resized import EVALUATES
from support.megatron.scaling import GPT
from support.mindio_scaling import KILLED, SOON
from support.recovery_backends import LEADERS, TORCH, Backend, used

pytestmark = [
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(place.missing()), reason=place.missing()),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a job of four ranks without a fault."""
    return GPT.undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize("lost", [3, 1])
def test_the_job_goes_on_without_a_lost_rank(
    leader: Backend, lost: int, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPT.shrunk(leader, tmp_path, undisturbed, monkeypatch, lost)


@pytest.mark.full
@pytest.mark.parametrize("lost", [[1], [3], [1, 2]])
def test_lost_ranks_are_taken_in_again(
    lost: list[int], tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPT.taken_in(tmp_path, undisturbed, monkeypatch, lost)


@pytest.mark.full
def test_the_last_rank_that_is_left_takes_in_the_other(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with six micro-batches each, and one with twelve."""
    replace(GPT, ranks=2).taken_in(tmp_path, undisturbed, monkeypatch, [1])


SECOND = [
    "stop,1,self", "clean,2,self", "resize,0,self", "writing,0,self", "publishing,0,self", "kept,1,self",
    "joining again,2,self", "let go,0,self", "entered,1,self", "data sets,2,self", "first step,0,self",
]  # fmt: skip


@pytest.mark.product
@pytest.mark.full
@pytest.mark.parametrize("second", SECOND)
def test_a_second_fault_on_the_way_ends_with_the_step_dumped(
    second: str, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPT.second_fault(TORCH, tmp_path, undisturbed, monkeypatch, 3, **{VARIABLE: second})


WHILE = "step=6,phase=backward,incarnation=1"


@pytest.mark.full
@pytest.mark.parametrize("fault", ["kind=sigkill,rank=0", "kind=exception,rank=2"])
def test_while_a_rank_is_missing_another_fault_is_dumped(
    fault: str, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPT.second_fault(TORCH, tmp_path, undisturbed, monkeypatch, 6, LASTGASP_FAULT=f"{KILLED};{fault},{WHILE}")


ON_THE_WAY_BACK = [
    "stop,1,self", "clean,2,self", "taken in,0,self", "rebuild,3,self", "resize,1,self", "writing,0,self",
    "publishing,0,self", "kept,1,self", "joining again,2,self", "let go,0,self", "entered,3,self", "entered,1,self",
    "data sets,3,self", "first step,2,self", "first step,3,self",
]  # fmt: skip


@pytest.mark.product
@pytest.mark.full
@pytest.mark.parametrize("second", ON_THE_WAY_BACK)
def test_a_fault_while_ranks_are_taken_in_ends_with_the_step_dumped(
    second: str, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    GPT.dumped_on_the_way_back(second, 3, tmp_path, undisturbed, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "why", "told"),
    [
        (f"{EVALUATES} --dataloader-type cyclic", "strategy elastic-training is refused: --dataloader-type cyclic: "
         "which samples a step has depends on the number of ranks", False),
        (f"{EVALUATES} --global-batch-size 8", "8 micro-batches cannot be shared evenly by 3 ranks", True),
    ],
    ids=["cyclic", "uneven"],
)  # fmt: skip
def test_what_cannot_go_on_with_fewer_is_dumped(
    flags: str, why: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What settings rule out MindIO is not even told of; what only some numbers of ranks can do is refused then."""
    one, directory = replace(GPT, flags=flags), tmp_path / "d"
    with used(TORCH, tmp_path, monkeypatch) as trace:
        command = one.job(directory)
        done = finish(command, tmp_path, **one.environment(directory) | SOON, LASTGASP_FAULT=KILLED)
        assert done.ok and why in done.output, done.output[-8000:]
        assert {event["zit"] for event in trace.events("init_processor")} == {told}
        assert bool(trace.events("zit_downgrade_rebuild_failed")) == told and trace.events("downgraded") == []
    [incident] = incidents(one.saves(directory))
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 3, 0), incident
