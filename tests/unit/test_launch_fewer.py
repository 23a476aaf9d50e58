"""Fewer ranks, as launcher and controller see it: who is left out, who has which number, what was asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from lastgasp.errors import ConfigError
from lastgasp.gasp.again import Again
from lastgasp.gasp.controller import Controller
from lastgasp.gasp.peers import Peer
from lastgasp.launch.agent import GaspAgent
from lastgasp.launch.fewer import MIN_RANKS, asked, least_ranks
from lastgasp.launch.growth import MISSING
from lastgasp.launch.in_place import InPlace

AGAIN = Again(incarnation=1, step=8, source=0, takers=(1,), lost=(1,), port=7, members=(0, 2, 3))


class Launcher:
    """Of some of four ranks, with what was agreed."""

    def __init__(self, *ranks: int) -> None:
        self.attempt: Any = MagicMock(number=0)
        self.attempt.controller.again.return_value = AGAIN
        self.attempt.controller.may_enter_again.return_value = None
        self.workers = [SimpleNamespace(global_rank=rank) for rank in ranks]
        group: Any = SimpleNamespace(workers=self.workers, group_world_size=1)
        self.context = MagicMock(_failures={1: "died"}, _running_local_ranks=set(range(len(ranks))))
        self.in_place = InPlace(self.attempt, group, self.context, MagicMock())

    @property
    def numbers(self) -> list[int]:
        return [worker.global_rank for worker in self.workers]


def test_a_dead_rank_is_left_out_and_the_others_are_numbered_anew() -> None:
    launcher = Launcher(0, 1, 2, 3)
    assert launcher.in_place.replaced({1: "SIGKILL"})
    assert launcher.numbers == [0, MISSING, 1, 2]
    assert (launcher.context._failures, launcher.context._running_local_ranks) == ({}, {0, 2, 3})
    assert not launcher.in_place.replaced({1: "SIGKILL"}), "that was another rank, and there is no order about it yet"


def test_a_rank_that_dies_meanwhile_is_no_reason_to_take_one_for_another() -> None:
    launcher = Launcher(0, 1, 2, 3)
    assert not launcher.in_place.replaced({1: "SIGKILL", 3: "SIGKILL"})
    assert launcher.numbers == [0, MISSING, 1, 2]


def test_a_launcher_that_has_lost_no_rank_counts_anew_as_well() -> None:
    launcher = Launcher(2, 3)
    launcher.in_place.look()
    assert launcher.numbers == [2, 3], "its workers are no processes that can be left alone"
    launcher.in_place._number_anew()
    launcher.in_place._number_anew()
    assert launcher.numbers == [1, 2]


@pytest.mark.parametrize(
    ("rank", "pid", "number"), [(3, 13, {2: "x"}), (2, 13, {2: "x"}), (1, 11, {}), (2, 9, {2: "x"})]
)
def test_the_controller_knows_a_process_whatever_its_launcher_calls_it(
    rank: int, pid: int, number: dict[int, str]
) -> None:
    controller: Any = Controller("token")
    controller._peers = {n: Peer(rank=n, writer=None, pid=10 + n) for n in range(4)}
    controller.incidents.current = SimpleNamespace(again=AGAIN)
    controller._spawn = lambda work: work.close()
    controller.report_exit(rank, "x", pid)
    assert controller.not_replaced == number


@pytest.mark.parametrize(
    ("given", "nodes", "hosts", "least"),
    [
        ("", (2, 2), 2, 0),
        ("", (1, 2), 2, 4),
        ("", (1, 2), 1, 0),
        ("3", (2, 2), 2, 3),
        ("1", (1, 2), 1, 1),
        ("", None, 2, 0),
    ],
)
def test_what_the_user_asks_for(
    given: str, nodes: tuple[int, int] | None, hosts: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MIN_RANKS, given)
    settings = {} if nodes is None else {"settings": SimpleNamespace(min_nodes=nodes[0], max_nodes=nodes[1])}
    assert least_ranks(asked(), SimpleNamespace(**settings), 4, hosts) == least


@pytest.mark.parametrize("given", ["some", "0", "-1", "1.5"])
def test_what_is_no_number_of_ranks_is_refused_before_any_is_started(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MIN_RANKS, given)
    with pytest.raises(ConfigError, match=MIN_RANKS):
        GaspAgent(spec=MagicMock(), logs_specs=MagicMock())
