"""MindIO's elastic training of a Lightning fit over an `ElasticLoader`: scale in and scale out, by its orders."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.again_faults import VARIABLE
from support.launchers import finish, incidents
from support.mindio_scaling import FIT, KILLED, POD
from support.recovery_backends import LEADERS, TORCH, Backend, used

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a fit of four ranks without a fault, on our own engine."""
    return FIT.undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize("lost", [3, 1])
def test_the_fit_goes_on_without_a_lost_rank(
    leader: Backend, lost: int, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FIT.shrunk(leader, tmp_path, undisturbed, monkeypatch, lost)


@pytest.mark.parametrize("lost", [[1], *(pytest.param(ranks, marks=pytest.mark.full) for ranks in ([3], [1, 2]))])
def test_lost_ranks_are_taken_in_again(
    lost: list[int], tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FIT.taken_in(tmp_path, undisturbed, monkeypatch, lost)


SECOND = ["stop,1,self", "clean,2,self", "resize,0,self", "kept,1,self", "function called,1,self", "handover,2,self"]


@pytest.mark.product("second")
@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
@pytest.mark.parametrize("second", SECOND)
def test_a_second_fault_on_the_way_ends_with_the_step_dumped(
    leader: Backend, second: str, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FIT.second_fault(leader, tmp_path, undisturbed, monkeypatch, 3, **{VARIABLE: second})


@pytest.mark.full
@pytest.mark.parametrize("leader", LEADERS)
def test_while_a_rank_is_missing_another_fault_is_dumped(
    leader: Backend, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = f"{KILLED};kind=sigkill,rank=0,step=6,phase=backward,incarnation=1"
    FIT.second_fault(leader, tmp_path, undisturbed, monkeypatch, 6, LASTGASP_FAULT=faults)


ON_THE_WAY_BACK = [
    "stop,1,self", "clean,2,self", "taken in,0,self", "rebuild,3,self", "resize,1,self", "kept,0,self",
    "joining again,2,self", "function called,3,self", "handover,3,self", "handover,0,self", "state taken,3,self",
]  # fmt: skip


@pytest.mark.product
@pytest.mark.full
@pytest.mark.parametrize("second", ON_THE_WAY_BACK)
def test_a_fault_while_ranks_are_taken_in_ends_with_the_step_dumped(
    second: str, tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FIT.dumped_on_the_way_back(second, 3, tmp_path, undisturbed, monkeypatch)


@pytest.mark.full
def test_without_an_elastic_loader_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MindIO has been told before the loader was made: its order fails, and the step is dumped."""
    directory = tmp_path / "d"
    with used(TORCH, tmp_path, monkeypatch) as trace:
        command = [*FIT.job(directory), "--plain"]
        done = finish(command, tmp_path, LASTGASP_FAULT=KILLED, **POD, **FIT.variables)
        assert done.ok, done.output[-8000:]
        assert "strategy elastic-training is refused: its data do not come from an ElasticLoader" in done.output
        assert trace.events("zit_downgrade_rebuild_failed") and trace.events("downgraded") == []
    [incident] = incidents(directory)
    assert (incident.ending, incident.step_saved, incident.steps_lost) == ("saved", 3, 0), incident
