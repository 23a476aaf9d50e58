"""Communication marks over gloo: what is marked, how long it took, and that neither calls nor numbers change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import lean
from support.launchers import finish

pytestmark = pytest.mark.fault

CHILD = Path(__file__).parent / "collectives_child.py"
DEFAULT = "0"
"""torch's name of the group of all ranks."""


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.full)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of a job of two, and of three, found."""
    folder = tmp_path_factory.mktemp("ranks")
    job = finish([lean.python(), str(CHILD), str(request.param), str(folder)], folder)
    assert job.ok, job.output[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


def test_groups_are_those_of_this_rank(ranks: list[dict[str, Any]]) -> None:
    everybody = list(range(len(ranks)))
    for number, rank in enumerate(ranks):
        expected = {DEFAULT: ("default_group", number, everybody)}
        if number < 2:
            expected["1"] = ("tp", number, [0, 1])
        if number == 0:
            expected["2"] = ("", 0, [0])
        found = {k: (g["group_name"], g["group_rank"], g["global_ranks"]) for k, g in rank["groups"].items()}
        assert found == expected


def test_every_call_is_marked_once_with_what_it_moved(ranks: list[dict[str, Any]]) -> None:
    world = len(ranks)
    expected = [
        ["HcclAllReduce", 3, "fp32"], ["HcclAllReduce", 3, "bfp16"], ["HcclBroadcast", 4, "fp32"],
        ["HcclReduce", 5, "fp32"], ["HcclAllGather", 6, "fp32"], ["HcclAllGather", 7, "fp32"],
        ["HcclGather", 8, "fp32"], ["HcclScatter", 9, "fp32"], ["HcclReduceScatter", 10, "fp32"],
        ["HcclAlltoAll", 2 * world, "fp32"], ["HcclBarrier", 0, "none"],
    ]  # fmt: skip
    for number, rank in enumerate(ranks):
        calls = [call[:3] for call in rank["calls"]]
        assert calls[: len(expected)] == expected
        assert {call[3] for call in rank["calls"]} == {DEFAULT}
        rest = [call[0] for call in calls[len(expected) :]]
        gathered = ["HcclAllGather", "HcclAllGather"]  # of an object: its length, then itself
        first_two = [["HcclSend", "HcclRecv"], ["HcclRecv", "HcclSend"], []]
        assert rest == gathered + first_two[number]


def test_a_group_of_some_ranks_is_named_by_its_key(ranks: list[dict[str, Any]]) -> None:
    assert [[call[1:4] for call in rank["group"]] for rank in ranks[:2]] == [[[13, "fp32", "1"]]] * 2
    assert [rank["group"] for rank in ranks[2:]] == [[]] * (len(ranks) - 2)


def test_batched_sends_work_whoever_imported_them_when(ranks: list[dict[str, Any]]) -> None:
    assert [rank["batched"] for rank in ranks] == [2] * len(ranks)


def test_who_comes_last_waits_for_nobody_and_the_others_for_it(ranks: list[dict[str, Any]]) -> None:
    for which in (0, 1):  # synchronous, asynchronous
        (begin, _, came), *others = (rank["late"][which] for rank in ranks)
        assert came <= begin
        assert all(earlier < came and begin <= end for earlier, end, _ in others)


def test_an_exception_passes_and_the_next_call_is_marked(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        text, *marked = rank["failing"]
        assert text.startswith("Invalid function arg")
        assert marked == ["HcclAllReduce"]


def test_all_functions_are_put_back(ranks: list[dict[str, Any]]) -> None:
    assert [rank["left"] for rank in ranks] == [[]] * len(ranks)


def test_gradients_are_marked_once_a_step_and_numbers_stay_the_same(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["off"][0] == rank["on"][0] == rank["switched"][0]
        assert rank["off"][1] == []
        # The first look switches DDP's logging on; of the 11 steps after it 4 only accumulate.
        on = [call[:4] for call in rank["on"][1]]
        assert on == [["HcclAllReduce", 8 * 64 + 64 + 64 + 1, "fp32", DEFAULT]] * 7
        assert 0 < len(rank["switched"][1]) < 7
