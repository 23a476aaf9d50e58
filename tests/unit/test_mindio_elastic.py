"""The drop-in's elastic training: whether ranks may be missing, and their numbers among handlers and engine."""

from __future__ import annotations

import pytest

from lastgasp.adapter import Place
from lastgasp.adapter.again import Again
from lastgasp.gasp.again import NEW
from lastgasp_mindio import elastic, settings
from lastgasp_mindio.elastic import Wishes
from lastgasp_mindio.handlers import Handlers
from lastgasp_mindio.shards import Group, replicas_of

HALVES = (Group(0, ((0, 2), (1, 3))),)
SPLIT = (Group(0, ((0, 2),)), Group(0, ((1, 3),)))


def again(members: tuple[int, ...], lost: tuple[int, ...] = ()) -> Again:
    """An order in which these go on."""
    return Again(incarnation=1, step=5, source=0, takers=lost, lost=lost, port=77, members=members)


@pytest.mark.parametrize(
    ("groups", "dp", "can"),
    [(HALVES, (), True), (HALVES, (0, 1, 2, 3), True), (HALVES, (0, 2), False), (SPLIT, (0, 2), False)],
)
def test_ranks_may_be_missing_only_where_nobody_healthy_has_to_leave_with_them(
    groups: tuple[Group, ...], dp: tuple[int, ...], can: bool
) -> None:
    assert (elastic.cannot(groups, Wishes("auto", dp), 4) == "") == can


def test_all_handlers_are_needed() -> None:
    handlers = Handlers()
    for name in ("stop", "clean", *elastic.HANDLERS):
        assert elastic.missing(handlers) == name
        handlers.register(name, print, None)
    assert elastic.missing(handlers) == ""


def test_who_is_left_is_counted_anew_by_the_engine_alone() -> None:
    place = Place(rank=3, world_size=4, replicas=replicas_of(HALVES))
    down = again((0, 2, 3), lost=(1,))
    seats = elastic.seats_after(range(4), down)
    assert seats == (0, 2, 3)
    groups = elastic.of_seats(HALVES, seats)
    assert groups == (Group(0, ((0, 1), (2,))),)
    fewer = elastic.place_after(place, down, groups)
    assert (fewer.rank, fewer.world_size, fewer.replicas, fewer.incarnation) == (2, 3, ((0, 1), (2,)), 1)
    assert not {"RANK", "WORLD_SIZE"} & elastic.environment(down.for_rank(3)).keys()
    assert elastic.environment(down)["MASTER_PORT"] == "77"

    up = again((0, NEW, 1, 2))
    seats = elastic.seats_after(seats, up)
    assert (seats, elastic.returning(up)) == ((0, 1, 2, 3), [1])
    assert elastic.place_after(fewer, up, elastic.of_seats(HALVES, seats)) == Place(
        rank=3, world_size=4, replicas=replicas_of(HALVES), incarnation=1
    )


def test_a_rank_that_is_replaced_changes_no_number() -> None:
    order = again((), lost=(1,))
    assert elastic.seats_after((0, 1), order) == (0, 1)
    assert elastic.place_after(Place(rank=1, world_size=2, replicas=((0, 1),)), order, ()).rank == 1


@pytest.mark.parametrize(("asked", "may"), [("auto", True), ("replace", True), ("retry", False), ("save", False)])
def test_the_users_own_setting_takes_away_from_it(asked: str, may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LASTGASP_RECOVERY", asked)
    assert settings.may_be_fewer() == may
