"""Which step, and who saves it: the rules of docs/how-it-works.md §10.4 for any views of any ranks."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from lastgasp.gasp.decision import Decision, GiveUp, NothingToSave, RankView, SavePlan, decide
from lastgasp.topology import ReplicaGroups, data_parallel

LIKELY = st.sampled_from([True, True, True, False])
Situation = tuple[tuple[RankView, ...], ReplicaGroups, int]


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Up to five ranks, any replica groups over them, any knowledge about each."""
    world = draw(st.integers(1, 5))
    ranks = list(range(world))
    group = st.lists(st.sampled_from(ranks), min_size=1, unique=True).map(tuple)
    replicas = tuple(draw(st.lists(group, min_size=1, max_size=3)))
    views = []
    for rank in ranks:
        alive = draw(LIKELY)
        holds = alive and draw(LIKELY)
        why = "" if holds else draw(st.sampled_from(["gone", "hung", "inside"]))
        step = draw(st.integers(-1, 4))
        views.append(RankView(rank=rank, step=step, holds=holds, faulty=draw(st.booleans()), alive=alive, why=why))
    return tuple(views), replicas, draw(st.integers(0, 2))


def holders(situation: Situation, group: tuple[int, ...], step: int) -> list[RankView]:
    """The ranks that hold a shard at that step."""
    return [view for view in situation[0] if view.rank in group and view.holds and view.step == step]


def possible(situation: Situation) -> set[int]:
    """The steps that every shard has a holder of, by trying all of them."""
    return {step for step in range(-1, 5) if all(holders(situation, group, step) for group in situation[1])}


def reached(situation: Situation) -> int:
    """The newest step that survivors of each shard have completed."""
    alive = {view.rank: view.step for view in situation[0] if view.alive}
    shards = [[alive[rank] for rank in shard if rank in alive] for shard in situation[1]]
    return min(map(max, filter(None, shards)), default=max(alive.values() or [view.step for view in situation[0]]))


@given(situations())
def test_a_plan_is_the_best_that_there_is(situation: Situation) -> None:
    views, replicas, durable = situation
    plan = decide(*situation)
    if not isinstance(plan, SavePlan):
        return
    assert plan.step == max(possible(situation)) > durable
    assert len(plan.savers) == len(replicas)
    for saver, group in zip(plan.savers, replicas, strict=True):
        candidates = holders(situation, group, plan.step)
        assert saver in [view.rank for view in candidates]
        assert not views[saver].faulty or all(view.faulty for view in candidates)
    assert plan.lost == reached(situation) - plan.step >= 0


@given(situations())
def test_it_gives_up_only_where_nothing_newer_can_be_had(situation: Situation) -> None:
    decision = decide(*situation)
    if isinstance(decision, GiveUp):
        assert max(possible(situation), default=-1) <= situation[2] or not possible(situation)
        assert decision.reason
        assert decision.lost == reached(situation) - situation[2] > 0
    else:
        assert isinstance(decision, NothingToSave) or possible(situation)


@given(situations())
def test_nothing_to_save_exactly_when_the_newest_step_is_on_disk(situation: Situation) -> None:
    decision = decide(*situation)
    assert isinstance(decision, NothingToSave) == (reached(situation) <= situation[2])
    assert not isinstance(decision, NothingToSave) or decision.step == situation[2]


@given(situations())
def test_every_rank_saves_or_is_told_why_not(situation: Situation) -> None:
    decision = decide(*situation)
    savers = set(decision.savers) if isinstance(decision, SavePlan) else set()
    assert [u.rank for u in decision.unused] == [v.rank for v in situation[0] if v.rank not in savers]
    assert all(unused.why for unused in decision.unused)


@given(situations())
def test_the_order_of_the_views_does_not_matter(situation: Situation) -> None:
    views, replicas, durable = situation
    assert decide(views, replicas, durable) == decide(views[::-1], replicas, durable)


def view(rank: int, step: int, holds: bool = True, alive: bool = True) -> RankView:
    """A healthy rank by default."""
    return RankView(rank=rank, step=step, holds=holds, alive=alive)


def saving(decision: Decision) -> SavePlan:
    """It is a plan."""
    assert isinstance(decision, SavePlan)
    return decision


def test_dead_ranks_do_not_count_for_the_step() -> None:
    dead = view(0, 9, holds=False, alive=False)
    assert saving(decide((dead, view(1, 8)), data_parallel(2), 4)) == SavePlan(
        step=8, savers=(1,), unused=decide((dead, view(1, 8)), data_parallel(2), 4).unused, lost=0
    )


def test_a_rank_inside_its_update_ahead_costs_its_step_and_that_is_reported() -> None:
    torn = RankView(rank=0, step=6, holds=False, why="torn")
    assert saving(decide((torn, view(1, 5)), data_parallel(2), 4)).lost == 1
    decision = decide((torn, view(1, 5)), data_parallel(2), 5)
    assert isinstance(decision, GiveUp)
    assert decision.reason == ("the newest step that can be saved, 5, is on disk already; rank 0 completed 6 but torn")


def test_shards_at_different_steps_are_no_step() -> None:
    decision = decide((view(0, 5), view(1, 6)), ((0,), (1,)), 0)
    assert isinstance(decision, GiveUp)
    assert "not at one common step: shard 0 at [5], shard 1 at [6]" in decision.reason
    assert {one.why for one in decision.unused} == {"it holds its part, but no step was saved"}


def test_a_step_that_survivors_have_of_one_shard_alone_was_not_completed() -> None:
    """Megatron with two instances of its optimizer: ranks 0 and 1 made their updates, and 0 died of it."""
    views, replicas = (view(0, 7, holds=False, alive=False), view(1, 7), view(2, 6), view(3, 6)), ((0, 2), (1, 3))
    plan = saving(decide(views, replicas, 4))
    assert (plan.step, plan.savers, plan.lost) == (6, (2, 3), 0)
    on_disk = decide(views, replicas, 6)
    assert isinstance(on_disk, NothingToSave) and on_disk.step == 6


def test_a_shard_of_which_nobody_survived_says_nothing_of_what_was_completed() -> None:
    decision = decide((view(0, 7, holds=False, alive=False), view(1, 6), view(2, 5)), ((0,), (1, 2)), 4)
    assert isinstance(decision, GiveUp) and decision.lost == 2


def test_a_rank_that_never_joined_is_named() -> None:
    decision = decide((view(0, 5),), ((0,), (1,)), 0)
    assert isinstance(decision, GiveUp)
    assert decision.reason == "shard 1 of 2 has no live holder (rank 1: never joined)"


def test_without_any_rank_there_is_nothing() -> None:
    assert isinstance(decide((), data_parallel(1), 0), NothingToSave)


def test_any_single_survivor_of_data_parallel_saves() -> None:
    for world, survivor in product(range(1, 5), range(4)):
        if survivor < world:
            views = [view(r, 3, holds=r == survivor, alive=r == survivor) for r in range(world)]
            assert saving(decide(tuple(views), data_parallel(world), 0)).savers == (survivor,)
