"""MindIO's orders to scale in and out on one rank, as they reach the training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lastgasp.backends.ascend.mindio.handlers import Handlers
from lastgasp.backends.ascend.mindio.limits import ACTION
from lastgasp.backends.ascend.mindio.parking import Parking
from lastgasp.backends.ascend.mindio.strategies import Strategies
from lastgasp.config import GaspConfig
from lastgasp.errors import NotSaveable
from lastgasp.gasp import messages as m
from lastgasp.gasp.rank_status import RankStatus
from lastgasp.ports import Repaired
from lastgasp.topology import Place, data_parallel

DOWN, UP = '{"scale-in-strategy": "DP"}', '{"scale-out-strategy": "DP"}'
GIVES = {"type": [0], "repair_type": 0, "src": [2], "dst": [1], "rank_list": [1, 2]}


class Training:
    """Of a rank of four, on step 8; implements `ports.GoesOnWithFewer`."""

    from_files, no_fewer = False, ""

    def __init__(self, folder: Path, rank: int = 2) -> None:
        this: Any = self
        self.in_place, self.calls, self.status = self, list[Any](), RankStatus()
        self.status.step = 8
        self.parking = Parking(None, rank, self.status, False, 1.0)
        self.place = Place(rank=rank, world_size=4, replicas=data_parallel(4))
        self.handlers = Handlers(
            GaspConfig.resolve(folder), self.place, this, self.status, this, Strategies(False, False, True, {}),
            over=lambda ended: None, leave=lambda: None, parking=self.parking,
        )  # fmt: skip

    def stop(self) -> None:
        """Nothing is stuck."""

    def clean(self, memory_error: bool) -> int:
        """It is."""
        return 0

    def rebuild(self, ranks: list[int]) -> None:
        self.calls.append("rebuild")

    def repair(self, step: int, pairs: Any, rebuild: bool) -> None:
        self.calls.append("repair")

    def rollback(self, step: int) -> None:
        self.calls.append("rollback")

    def synchronize(self) -> None:
        """Nothing is queued."""

    def takes_in(self, ranks: tuple[int, ...]) -> None:
        self.calls.append(ranks)

    def resize(self, incarnation: int, step: int, members: tuple[int, ...], gives: bool) -> None:
        self.calls.append((incarnation, step, members, gives))

    def consult(self, step: int, saved: Any, seconds: float) -> m.Consulted:
        """What the controller keeps: nothing."""
        return m.Consulted(step=step, aux={}, parts={})

    def save(self, step: int, aux: Any, reason: str) -> Any:
        """Noted."""
        self.calls.append("save")
        return SimpleNamespace(path="p", nbytes=1, first_byte_ns=1, part=b"")

    def publish(self, result: Any, parts: Any) -> str:
        """Noted."""
        self.calls.append("publish")
        return ""

    def shrunk(self, *more: str) -> Handlers:
        """Rank 1 is missing, and this rank has joined the controller by its new number. `more` was called behind it."""
        self.parking.stopped()
        self.handlers.zit_downgrade_rebuild([0, 2, 3], [0, 2, 3], None, DOWN)
        number = (0, 2, 3).index(self.place.rank)
        self.handlers.renumber(Place(rank=number, world_size=3, replicas=data_parallel(3)))
        assert self.calls == [(1, 8, (0, 2, 3), False), *more]
        self.parking.stopped()
        self.status.step, self.calls = 9, []
        return self.handlers


def test_an_order_to_rebuild_says_that_this_process_keeps_its_rank(tmp_path: Path) -> None:
    """MindIO has no orders for one that is replaced; here `recover` was not even granted."""
    training, stays = Training(tmp_path), list[bool]()
    training.parking.stays = lambda: stays.append(True)
    with pytest.raises(NotSaveable):
        training.handlers.rebuild_group([1], None, None)
    assert stays == [True]


def test_in_and_out_again(tmp_path: Path) -> None:
    """By MindIO's numbers this rank gives its state, and by those after it as well; before, it was number 1."""
    one = Training(tmp_path)
    handlers = one.shrunk()
    handlers.zit_upgrade_rebuild([1], None, UP)
    handlers.zit_upgrade_repair(9, False, [1], GIVES, None, UP)
    handlers.zit_upgrade_rollback(9, None, UP)
    assert one.calls == [(1,), (2, 9, (0, -1, 1, 2), True)]
    assert one.parking._repaired == Repaired(2, 9, 2, (1,), (1,), (0, -1, 1, 2))
    handlers.renumber(one.place)
    one.parking.stopped()
    handlers.rollback(9, None, None)
    assert one.calls[-1] == "rollback"


def test_while_ranks_are_missing_nothing_else_is_done(tmp_path: Path) -> None:
    one = Training(tmp_path)
    handlers = one.shrunk()
    orders: list[Callable[[], None]] = [
        lambda: handlers.rollback(9, None, None), lambda: handlers.rebuild_group([1], None, None),
        lambda: handlers.zit_downgrade_rebuild([0, 2], [0, 2], None, DOWN),
    ]  # fmt: skip
    for order in orders:
        with pytest.raises(NotSaveable):
            order()
    assert one.calls == []


@pytest.mark.parametrize("rank", [0, 2])
def test_where_all_begin_with_files_the_first_rank_writes_the_step(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is agreed on, in both directions."""
    monkeypatch.setenv(ACTION, "30")
    one = Training(tmp_path, rank)
    one.from_files = True
    writes = ["save", "publish"] if rank == 0 else []
    handlers = one.shrunk(*writes)
    handlers.zit_upgrade_rebuild([1], None, UP)
    handlers.zit_upgrade_rollback(9, None, UP)
    assert one.calls == [(1,), (2, 9, (0, -1, 1, 2), False), *writes]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    one = Training(tmp_path)
    with pytest.raises(NotSaveable, match="have gone on alone"):
        one.handlers.zit_upgrade_rebuild([1], None, UP)
    handlers = one.shrunk()
    with pytest.raises(NotSaveable, match="no order has said which ranks"):
        handlers.zit_upgrade_rollback(9, None, UP)
    with pytest.raises(NotSaveable, match="have gone on alone"):
        handlers.zit_upgrade_rebuild([1, 3], None, UP)
    handlers.zit_upgrade_rebuild([1], None, UP)
    with pytest.raises(NotSaveable, match="holds the state itself"):
        handlers.zit_upgrade_repair(9, False, [2], GIVES | {"src": [0], "dst": [2]}, None, UP)
    with pytest.raises(NotSaveable, match="newest good checkpoint"):
        handlers.zit_upgrade_repair(9, False, [1], GIVES | {"repair_type": 5}, None, UP)
    with pytest.raises(NotSaveable, match="MindIO wants step 8"):
        handlers.zit_upgrade_rollback(8, None, UP)


def test_what_was_not_asked_for_is_refused(tmp_path: Path) -> None:
    handlers = Training(tmp_path).handlers
    handlers.strategies = Strategies(False, True, False, {"elastic-training": "no loader"})
    orders: list[Callable[[], None]] = [
        lambda: handlers.zit_downgrade_rebuild([0, 2], [0, 2], None, DOWN),
        lambda: handlers.zit_upgrade_rebuild([1], None, UP),
    ]
    for order in orders:
        with pytest.raises(NotSaveable, match="no loader"):
            order()
